"""Are two results the same? Results are the script's: usually a tensor with one element, else whatever its own comparison understands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

COMPARISON_MATCH = 0.0
COMPARISON_MISMATCH = math.inf
Comparison = Callable[[Any, Any], float]
"""(result of the first run, result now) -> relative difference."""


def compare_floats(first: Any, now: Any) -> float:
    """Relative difference of two single floats; NaN equals NaN. Opposite infinities, and x and -x, are different (Megatron calls the former the same and divides by
    zero at the latter)."""
    a, b = float(first), float(now)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return COMPARISON_MATCH
    if not (math.isfinite(a) and math.isfinite(b)) or a + b == 0:
        return COMPARISON_MISMATCH
    return math.fabs((a - b) / (a + b) * 2)


def copied(result: Any) -> Any:
    """The result as it is now, whatever the script does to it later."""
    return result.detach().clone() if hasattr(result, "detach") else result


def beside(result: Any, like: Any) -> Any:
    """`result` where `like` is: one that comes out of a checkpoint may be on another device than the one it is compared with."""
    moves = hasattr(result, "to") and hasattr(like, "device") and getattr(result, "device", None) != like.device
    return result.to(like.device) if moves else result
