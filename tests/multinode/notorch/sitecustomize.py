"""On PYTHONPATH of the agents under test: an environment without torch, so that no standby store spends seconds of a busy processor on importing it."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
