"""Watching ranks: section page, client, checkpoint fence, hang detection. Importing the package imports nothing: the training process pays for what it uses."""
