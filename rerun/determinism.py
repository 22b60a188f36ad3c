"""How far apart two computations of one step are, over many steps (mode REPORT_DETERMINISM_STATS): every step is run twice, nothing is rejected.

(Megatron 0.16.1 collects the same and raises AttributeError when it would print it: its callers no longer have the file name that it prints.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rerun import ranks
from rerun.compare import Comparison, copied
from rerun.saved import Call

logger = logging.getLogger(__name__)
MAX_SAMPLES = 100_000
QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(slots=True)
class QuickStats:
    """Distribution of relative differences; the newest `max_size` that are not zero are kept."""

    samples: list[float] = field(default_factory=list)
    pos: int = 0
    zero_cnt: int = 0
    max: float = 0.0
    max_size: int = MAX_SAMPLES

    def record(self, data: float) -> None:
        """One more difference."""
        if data == 0.0:
            self.zero_cnt += 1
            return
        if len(self.samples) < self.max_size:
            self.samples.append(data)
        else:
            self.samples[self.pos % self.max_size] = data
        self.pos += 1
        self.max = max(self.max, data)

    def combine(self, others: Iterable[QuickStats]) -> None:
        """Take in what other ranks have seen, as far as there is room for samples."""
        for other in others:
            self.samples += other.samples[: self.max_size - len(self.samples)]
            self.zero_cnt += other.zero_cnt
            self.max = max(self.max, other.max)
        self.pos = len(self.samples)

    def reset(self) -> None:
        """Forget all."""
        self.samples, self.pos, self.zero_cnt, self.max = [], 0, 0, 0.0

    def print_stats(self) -> str:
        """The distribution, on one line."""
        zeros, found = self.zero_cnt, sorted(self.samples)
        if not found:
            return f"{zeros:,} samples, all identical"
        total = zeros + len(found)
        at = [int(total * q) - zeros for q in QUANTILES]
        quantiles = ", ".join(f"p{q * 100:g}={found[i] if i >= 0 else 0.0:.3E}" for q, i in zip(QUANTILES, at, strict=True))
        mean = sum(found) / total
        return f"{total:,}/{zeros:,} total/identical samples, rel. variability: avg={mean:.3E}, {quantiles}, max={self.max:.3E}"


class Determinism:
    """One rank's statistics, by check."""

    def __init__(self) -> None:
        self._first: dict[Call, Any] = {}
        self._stats: dict[str, QuickStats] = {}

    def first(self, call: Call, result: Any) -> None:
        """What the first run of a step gave."""
        self._first[call] = copied(result)

    def second(self, call: Call, result: Any, comparison_func: Comparison) -> None:
        """What its second run gave."""
        assert call in self._first, f"Result from initial run missing: {call.message!r} number {call.sequence}"
        self._stats.setdefault(call.message, QuickStats()).record(comparison_func(self._first.pop(call), result))

    def report(self) -> None:
        """All ranks' statistics, in the log of rank 0; others start anew. A collective."""
        everyones = ranks.gathered(self._stats)
        if everyones is None:
            self._stats = {}
            return
        for message in sorted({message for found in everyones for message in found}):
            mine = self._stats.setdefault(message, QuickStats())
            mine.combine(found[message] for found in everyones[1:] if message in found)
            logger.info("Computation determinism of %r: %s", message, mine.print_stats())
