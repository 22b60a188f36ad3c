"""How large a value usually is, so that one that is unexpectedly large shows: a bit flipped in an exponent, a spiky loss. Plain numbers; knows no tensor and no rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Largest:
    """The largest absolute value among the first `num_samples` of each context; what exceeds `factor` times it is unexpectedly large. NaN and infinity are others' business."""

    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def exceeded(self, context: str, value: float, factor: float, num_samples: int) -> bool:
        """Whether `value` is unexpectedly large; until enough samples are known it becomes one, and is not."""
        value = math.fabs(value)
        if math.isnan(value) or math.isinf(value):
            return False
        if self.counts.get(context, 0) < num_samples:
            self.counts[context] = self.counts.get(context, 0) + 1
            self.maxima[context] = max(self.maxima.get(context, 0.0), value)
            return False
        return value >= self.maxima[context] * factor

    def again(self, context: str) -> None:
        """Count `num_samples` anew; the maximum stays and can only grow."""
        self.counts[context] = 0
