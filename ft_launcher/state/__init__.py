"""ft_state: the export of what the store knows, in one JSON file that outlives runs."""
