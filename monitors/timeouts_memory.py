"""What the timeout learner remembers of the durations it has seen, in bounded space: three memories with three different horizons.

- `Recent`: the last 64, sorted. Says what is usual now, and follows a change of regime within three occurrences.
- `Peaks`: the few kinds of long ones that stood out. One that came once is held twice as long (in occurrences) as it took to come, one that came again 8 times the
  longest wait for it. A lone stall is forgotten soon, an evaluation every 1,000 steps never, and nobody has to say which is which.
- `LogHistogram`: counts in fixed logarithmic buckets; says how heavy the tail is (and is what dashboards draw).

Everything here counts occurrences, never seconds of a clock, and knows nothing of timeouts. `from_json` raises ValueError for anything that `to_json` could not have
written: what is done about it is the learner's to say.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECENT = 64
HOLD_MIN, HOLD_MAX, HOLD_ONCE, HOLD_AGAIN = 128, 50_000, 2, 8
MAX_PEAKS, KEEP_RATIOS = 8, 64
FEW, SPREAD_OF_FEW = 16, 0.17
SAME_PEAK = 1.5
LONGEST_S = 1e9
"""No duration beyond this (30 years) is believed."""


def number(value: object, low: float, high: float) -> float:
    """`value` as a number within [low, high]; ValueError else (also for NaN and bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]} is not a number from {low:g} to {high:g}")
    return value


def whole(value: object, high: int = 1 << 53) -> int:
    """`value` as a count; ValueError else."""
    if not isinstance(value, int):
        raise ValueError(f"{str(value)[:40]} is not a count")
    return int(number(value, 0, high))


def listed(value: object, most: int) -> Sequence[object]:
    """`value` as a list of at most `most` items; ValueError else."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"not a list of at most {most}")
    return value


def _log(duration_s: float) -> int:
    """Millionths of ln(duration): whole, so that a running sum stays exact."""
    return round(1e6 * math.log(max(duration_s, 1e-6)))


class Recent:
    """The last `RECENT` durations, in order and sorted."""

    def __init__(self, durations: Sequence[float] = ()) -> None:
        self._order = deque(durations[-RECENT:])
        self._sorted = sorted(self._order)
        self._logs = sum(map(_log, self._order))

    def add(self, duration_s: float) -> None:
        """One more; the oldest goes."""
        if len(self._order) == RECENT:
            oldest_s = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest_s)]
            self._logs -= _log(oldest_s)
        self._order.append(duration_s)
        insort(self._sorted, duration_s)
        self._logs += _log(duration_s)

    def __len__(self) -> int:
        return len(self._order)

    def typical_s(self) -> float:
        """The geometric mean; 0 for nothing. (The median jumps from one kind to the other where two kinds of step are equally frequent.)"""
        return math.exp(1e-6 * self._logs / len(self._order)) if self._order else 0.0

    def nth_longest_s(self, n: int) -> float:
        """The n-th longest (1: the longest), the shortest where there are fewer; 0 for nothing."""
        return self._sorted[max(0, len(self._sorted) - n)] if self._sorted else 0.0

    def to_json(self) -> list[float]:
        """Oldest first."""
        return list(self._order)

    @classmethod
    def from_json(cls, value: object) -> Recent:
        """Raises ValueError."""
        return cls([number(item, 0, LONGEST_S) for item in listed(value, RECENT)])


@dataclass(slots=True)
class Peak:
    """A kind of long occurrence: how long, how many times the usual of its time that was, when last (index of the occurrence), the longest wait for one, how often, until
    when it is held, and what it may raise a limit to (seconds) while it came only once."""

    duration_s: float
    ratio: float
    at: int
    gap: int
    times: int
    until: int
    once_s: float

    def now_s(self, typical_s: float) -> float:
        """How long it would be where `typical_s` is usual: everything in a section grows with a longer sequence, only pauses do not shrink with a shorter one."""
        return max(self.duration_s, self.ratio * typical_s)


class Peaks:
    """At most `MAX_PEAKS` kinds of long occurrences; two whose ratios are within a factor of 1.5 are one kind."""

    def __init__(self) -> None:
        self._kinds: list[Peak] = []
        self._ratios: deque[float] = deque(maxlen=KEEP_RATIOS)
        self._spread: float | None = 0.0

    def add(self, index: int, duration_s: float, typical_s: float, once_s: float) -> None:
        """Occurrence number `index` stood out where `typical_s` was usual."""
        ratio = duration_s / max(typical_s, 1e-6)
        kind = min(self._kinds, key=lambda peak: abs(math.log(peak.ratio / ratio)), default=None)
        if kind is None or not 1 / SAME_PEAK < ratio / kind.ratio < SAME_PEAK:
            kind = Peak(duration_s, ratio, 0, 0, 0, 0, once_s)
            self._kinds.append(kind)
        held = kind.until > index
        kind.duration_s = max(kind.duration_s, duration_s) if held and ratio < kind.ratio * SAME_PEAK else duration_s
        kind.ratio = max(kind.ratio, ratio) if held else ratio
        kind.gap = max(kind.gap, index - kind.at)
        kind.times += 1
        kind.at = index
        kind.until = index + min(HOLD_MAX, max(HOLD_MIN, (HOLD_ONCE if kind.times == 1 else HOLD_AGAIN) * kind.gap))
        if len(self._kinds) > MAX_PEAKS:
            self._kinds.remove(min(self._kinds, key=lambda peak: (peak.until > index, peak.duration_s)))
        self._ratios.append(ratio)
        self._spread = None

    def held(self, index: int) -> list[Peak]:
        """Those not yet forgotten at occurrence `index`."""
        return [peak for peak in self._kinds if peak.until > index]

    def spread(self) -> float:
        """How much those that stood out lately differ: the mean of ln(ratio / upper quartile) over their longest quarter (Hill's estimator of 1/alpha of a Pareto tail);
        while they are fewer than `FEW`, over all of them against the shortest, at most `SPREAD_OF_FEW` (two kinds are not yet a tail)."""
        if self._spread is None:
            ordered = sorted(self._ratios)
            split = len(ordered) * 3 // 4 if len(ordered) >= FEW else 1
            least, above = ordered[split - 1], ordered[split:] or ordered
            mean = sum(math.log(ratio / least) for ratio in above) / len(above)
            self._spread = mean if len(ordered) >= FEW else min(SPREAD_OF_FEW, mean)
        return self._spread

    def to_json(self) -> list[list[list[float]] | list[float]]:
        """The kinds, a list for each, and the latest ratios."""
        return [[[p.duration_s, p.ratio, p.at, p.gap, p.times, p.until, p.once_s] for p in self._kinds], list(self._ratios)]

    @classmethod
    def from_json(cls, value: object, index: int) -> Peaks:
        """As of occurrence `index`. Raises ValueError."""
        peaks = cls()
        kinds, ratios = listed(value, 2)
        for item in listed(kinds, MAX_PEAKS):
            duration_s, ratio, at, gap, times, until, once_s = listed(item, 7)
            sizes = number(duration_s, 1e-9, LONGEST_S), number(ratio, 1e-9, 1e18)
            counts = whole(at, index), whole(gap, index), whole(times), whole(until, index + HOLD_MAX)
            peaks._kinds.append(Peak(*sizes, *counts, number(once_s, 0, 1e18)))
        peaks._ratios.extend(number(ratio, 1e-9, 1e18) for ratio in listed(ratios, KEEP_RATIOS))
        peaks._spread = None if peaks._ratios else 0.0
        return peaks


ROUNDING = 1e-9
"""A share of a count that is a whole number but for its last bits is that number."""


class LogHistogram:
    """Counts in buckets of equal width on a logarithmic scale: bucket i is [low * 10**(i / per_decade), ...); what is below `low` is in the first, above the last in
    the last. With `half_at`, all counts are halved whenever they sum up to it: old ones fade."""

    def __init__(self, low: float, decades: int, per_decade: int, *, half_at: float = math.inf) -> None:
        self._low, self._per_decade, self._half_at = low, per_decade, half_at
        self.buckets = decades * per_decade
        self._counts: dict[int, float] = {}
        self.total = 0.0

    def add(self, value: float) -> None:
        """One value."""
        index = self._index(value)
        self._counts[index] = self._counts.get(index, 0) + 1
        self.total += 1
        if self.total >= self._half_at:
            self._counts = {i: count / 2 for i, count in self._counts.items() if count >= 1}
            self.total = sum(self._counts.values())

    def _index(self, value: float) -> int:
        if value <= self._low:
            return 0
        return min(self.buckets - 1, int(math.log10(value / self._low) * self._per_decade))

    def bound(self, index: float) -> float:
        """The lower bound of bucket `index`."""
        return float(self._low * 10 ** (index / self._per_decade))

    def exceeded_by(self, shares: Sequence[float]) -> list[float]:
        """For each of the rising `shares`: the value that this share of all values exceeds, interpolated on the logarithmic scale; 0 for an empty histogram."""
        found: list[float] = []
        above = 0.0
        for index in sorted(self._counts, reverse=True):
            count = self._counts[index]
            while len(found) < len(shares) and above + count >= (wanted := shares[len(found)] * self.total) - ROUNDING:
                found.append(self.bound(index + 1 - min(1.0, (wanted - above) / count)))
            above += count
        return found + [self.bound(min(self._counts, default=0)) if self._counts else 0.0] * (len(shares) - len(found))

    def to_json(self) -> list[list[float]]:
        """The (bucket, count) that are not empty."""
        return [[index, count] for index, count in sorted(self._counts.items())]

    def load(self, value: object) -> None:
        """Replaces the counts by what `to_json` wrote. Raises ValueError."""
        counts: dict[int, float] = {}
        for item in listed(value, self.buckets):
            index, count = listed(item, 2)
            counts[whole(index, self.buckets - 1)] = number(count, 0.5, 1e15)
        self._counts, self.total = counts, sum(counts.values())

    def table(self) -> Mapping[str, list[float]]:
        """For drawing: `low_s` of each bucket that is not empty, and its `count`."""
        filled = sorted(self._counts.items())
        return {"low_s": [float(f"{self.bound(i):.4g}") for i, _ in filled], "count": [count for _, count in filled]}
