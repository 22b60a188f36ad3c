"""Where the launcher meets other people's tools: Slurm, NeMo-Run, PyTorch Lightning.

A module a tool. Each turns that tool's own words into a command line, or a command's end into what the tool shall do next. None of them is
imported by the launcher itself, and none imports its tool before it is used, so that all of them can be imported anywhere.
"""
