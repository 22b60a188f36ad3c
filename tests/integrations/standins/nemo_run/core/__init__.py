"""Only the way to `launcher`."""

from nemo_run.core import execution

__all__ = ["execution"]
