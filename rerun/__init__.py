"""Rerun: what to do about a wrong number. Megatron's rerun state machine, its names and exit codes, as a pure table with a torch adapter around it."""
