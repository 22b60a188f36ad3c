"""ft-launcher: a quasi-elastic fault-tolerance launcher for Megatron-style training (docs/design.md)."""

__version__ = "0.1.0"
