"""Only the way to `launcher`."""

from nemo_run.core.execution import launcher

__all__ = ["launcher"]
