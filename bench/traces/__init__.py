"""Traces of section durations: recorded ones (`*.json`, made by `record.py`), synthetic ones (`families`), and the rules that are tried on them (`rules`)."""
