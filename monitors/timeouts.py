"""How long a section may take before its rank counts as hung, learned from how long it took so far. Pure: durations in, a timeout and its reason out.

The hard timeout is the largest of five terms, and never above the ceiling (what the user fixed):

- *usual*: 3.3 x the third longest of the last 64. The third, so that one or two stalls count for nothing; 3.3, so that a step that suddenly takes 3 times as long (a
  longer sequence, a slower link) lives, after which the window follows. In the first 1,000 occurrences 40 x, fading by the cube from there on: what comes at
  intervals (an evaluation 30 times as long, inside `step`) comes for the first time then.
- *tail*: where the durations spread widely, the one in 100,000 that their own tail promises (`_Tail`).
- *peaks*: what stands out is longer than twice the third longest. 2 x what came once, at most 7 x the terms above; 1.5 x what came again, and more the more they
  differ. `monitors.timeouts_memory` knows how long each kind is to be remembered.
- *kills*: what was killed at a learned timeout may have been alive. 8 x that is allowed next, so that a wrong kill cannot repeat itself for long.
- *floor*: 4.5 s (suspect at 3 s). A full garbage collection costs 60 ns an object, 2 s for a heap of 32 million; a machine with too many processes for its cores and a
  file system's hiccup reach as far.

With fewer than 16 occurrences the ceiling holds. Warm-up occurrences (the first of each cycle: compilation, connections, allocators) are judged by the ceiling and
counted apart. The timeout is raised the moment a term says so and lowered only when 15 % can be gained and nothing else was wanted for a while, so that its history stays
readable.

`docs/adr/0004-timeout-rule.md` has the alternatives with their figures, `bench/timeouts.py` measures the rule. This file must never know a clock, a rank, or what a
section's name means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from ft_launcher.errors import ConfigError
from monitors.timeouts_memory import HOLD_MIN, LONGEST_S, RECENT, LogHistogram, Peak, Peaks, Recent, listed, number, whole

VERSION = 1
MIN_SAMPLES = 16
FLOOR_S = 4.5
SOFT_SHARE = 2 / 3
FACTOR, FACTOR_EARLY, EARLY = 3.3, 40.0, 1000
NTH = 3
STANDS_OUT = 2.0
PEAK_FACTOR, PEAK_LIGHT, PEAK_HEAVY = 1.5, 3.0, 12.0
ONCE_FACTOR, ONCE_AT_MOST = 2.0, 7.0
KILL_FACTOR = 8.0
RAISE_BY, LOWER_AT, PATIENCE = 1.05, 0.85, 256

_TAIL_LEVELS, _TAIL_STEP, _TAIL_RAREST, _TAIL_BEYOND, _TAIL_SAMPLES, _TAIL_EVERY = 4, 2.5, 0.002, 8, 500, 64
_TAIL_GOAL = 1e-5
_NORMAL = NormalDist()
_TAIL_GOAL_Z = -_NORMAL.inv_cdf(_TAIL_GOAL)
_MAX_JSON_ITEMS, MAX_TEXT = 32, 500


@dataclass(frozen=True, slots=True)
class Timeout:
    """`soft_s`: suspect and gather; `hard_s`: hung (`math.inf`: never). `learned`: tighter than the ceiling. `reason`: one sentence with numbers on why it is what it
    is; below the ceiling unchanged as long as the timeout is."""

    soft_s: float
    hard_s: float
    reason: str
    learned: bool = False


class _Term(NamedTuple):
    """A lower bound for the hard timeout, and who can say why: `say(peak)`."""

    hard_s: float
    say: Callable[[Peak | None], str]
    peak: Peak | None = None


class _Tail:
    """How many times the usual duration the one in ten million would be, if the tail went on as it is.

    On the ratios duration / usual of that time (a geometric mean), so that a drift is no tail. ln(ratio) against the normal quantile z of the share that exceeds it is a straight line for
    lognormal durations; it is continued to the goal with the slope measured at the rare end. Of the slopes between four levels the middle one
    counts: a second mode is a gap, which only one of them sees.
    """

    def __init__(self) -> None:
        self.ratios = LogHistogram(0.1, 5, 48, half_at=8192)
        self.factor = 0.0

    def refresh(self) -> None:
        """Compute `factor` anew; 0 for too few ratios."""
        total = self.ratios.total
        self.factor = 0.0
        if total < _TAIL_SAMPLES:
            return
        rarest = max(_TAIL_RAREST, _TAIL_BEYOND / total)
        shares = [rarest * _TAIL_STEP**i for i in range(_TAIL_LEVELS)]
        at = [math.log(value) for value in self.ratios.exceeded_by(shares)]
        z = [-_NORMAL.inv_cdf(share) for share in shares]
        slopes = sorted((at[i] - at[i + 1]) / (z[i] - z[i + 1]) for i in range(_TAIL_LEVELS - 1))
        self.factor = math.exp(min(20.0, at[0] + slopes[len(slopes) // 2] * (_TAIL_GOAL_Z - z[0])))


class TimeoutLearner:
    """One section's timeout. `ceiling_s` is the user's fixed value in seconds, `math.inf` for never. Raises ConfigError for any other that is not above 0."""

    def __init__(self, ceiling_s: float) -> None:
        if isinstance(ceiling_s, bool) or not isinstance(ceiling_s, int | float) or not ceiling_s > 0:
            raise ConfigError(f"timeout ceiling {ceiling_s!r}: must be a number of seconds above 0 (inf: never)")
        self.ceiling_s = float(ceiling_s)
        self.count = self.warmups = self.ignored = 0
        self.longest_s = 0.0
        self._recent, self._peaks, self._tail = Recent(), Peaks(), _Tail()
        self._seen = LogHistogram(1e-3, 8, 8)
        self._kill_s, self._kill_until = 0.0, 0
        self._lower_at, self._lower_s, self._lower_why = 0, 0.0, ""
        self._hard_s = self.ceiling_s
        self._why = ""

    def observe(self, duration_s: float, *, warmup: bool = False) -> None:
        """One occurrence has ended after `duration_s` seconds; `warmup`: one of the first of a cycle. What is no duration is counted and ignored."""
        if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not 0 <= duration_s <= LONGEST_S:
            self.ignored += 1
            return
        if warmup:
            self.warmups += 1
            return
        self.count += 1
        self.longest_s = max(self.longest_s, duration_s)
        self._seen.add(duration_s)
        self._remember(max(duration_s, 1e-6))
        self._reconsider()

    def observe_kill(self, after_s: float) -> None:
        """An occurrence was killed as hung after `after_s`; no sample, but a reason to be slower next time when the timeout was learned."""
        if self.count >= MIN_SAMPLES and 0 < after_s < self.ceiling_s:
            self._kill_s, self._kill_until = KILL_FACTOR * after_s, self.count + HOLD_MIN
            self._reconsider()

    def decide(self, *, warmup: bool = False) -> Timeout:
        """The timeout now; `warmup`: the one for a cycle's first occurrences. Changes nothing."""
        soft_s, fixed = self._hard_s * SOFT_SHARE, f"the fixed value of {_s(self.ceiling_s)}"
        if warmup:
            return Timeout(self.ceiling_s * SOFT_SHARE, self.ceiling_s, f"{fixed} while warming up")
        if self._hard_s < self.ceiling_s:
            return Timeout(soft_s, self._hard_s, self._why, True)
        if self.count < MIN_SAMPLES:
            seen = f"{self.count} of the {MIN_SAMPLES} occurrences needed for a tighter one were seen"
            return Timeout(soft_s, self._hard_s, f"{fixed}: {seen}{self._why}")
        term = self._largest()
        return Timeout(
            soft_s, self._hard_s, f"{fixed}: after {self.count} occurrences {_s(term.hard_s)} would be right, {term.say(term.peak)}"
        )

    # -- the rule -------------------------------------------------------------------------------------------------------------------------------------------

    def _remember(self, duration_s: float) -> None:
        if self.count > MIN_SAMPLES and duration_s > STANDS_OUT * self._recent.nth_longest_s(NTH):
            self._stands_out(self.count, duration_s)
        typical_s = self._recent.typical_s()
        self._recent.add(duration_s)
        if typical_s:
            self._tail.ratios.add(duration_s / typical_s)
        if self.count == MIN_SAMPLES:
            for index, seen_s in enumerate(self._recent.to_json(), 1):
                if seen_s > STANDS_OUT * self._recent.nth_longest_s(NTH):
                    self._stands_out(index, seen_s)
        if self.count % _TAIL_EVERY == 0:
            self._tail.refresh()

    def _stands_out(self, index: int, duration_s: float) -> None:
        once_s = ONCE_AT_MOST * self._usual().hard_s
        self._peaks.add(index, duration_s, self._recent.typical_s(), once_s)

    def _reconsider(self) -> None:
        """Moves the published timeout where the terms want it."""
        if self.count < MIN_SAMPLES:
            return
        term = self._largest()
        if term.hard_s > self._hard_s:
            self._publish(term.hard_s * RAISE_BY, "up", term.say(term.peak))
        elif term.hard_s < LOWER_AT * self._hard_s and math.isfinite(self.ceiling_s):
            self._lower(term)
        elif self._lower_at:
            self._lower_at, self._lower_s = 0, 0.0

    def _lower(self, term: _Term) -> None:
        """Down to the highest that was wanted during the last `PATIENCE` occurrences (fewer early); at once from the ceiling, where nothing is known to come back."""
        if not self._lower_at:
            self._lower_at = self.count + (0 if self._hard_s == self.ceiling_s else min(PATIENCE, self.count // 16))
        if term.hard_s > self._lower_s:
            self._lower_s, self._lower_why = term.hard_s, term.say(term.peak)
        if self.count >= self._lower_at:
            self._publish(self._lower_s, "down", self._lower_why)

    def _publish(self, hard_s: float, way: str, why: str) -> None:
        before_s, self._hard_s = self._hard_s, min(self.ceiling_s, _rounded_up(hard_s))
        self._lower_at, self._lower_s = 0, 0.0
        self._why = ""
        if self._hard_s < self.ceiling_s:
            self._why = f"{way} from {_s(before_s)} to {_s(self._hard_s)} after {self.count} occurrences: {why}"

    def _largest(self) -> _Term:
        """The term that decides; not yet cut to the ceiling."""
        term = self._usual()
        for peak in self._peaks.held(self.count):
            other = self._peak_term(peak)
            term = other if other.hard_s > term.hard_s else term
        if self.count < self._kill_until and self._kill_s > term.hard_s:
            return _Term(self._kill_s, self._say_kill)
        return term

    def _usual(self) -> _Term:
        """What is right where nothing stands out: the largest of floor, usual and tail."""
        usual_s, tail_s = self._factor() * self._recent.nth_longest_s(NTH), self._tail.factor * self._recent.typical_s()
        if usual_s > FLOOR_S or tail_s > FLOOR_S:
            return _Term(usual_s, self._say_usual) if usual_s >= tail_s else _Term(tail_s, self._say_tail)
        return _Term(FLOOR_S, self._say_floor)

    def _factor(self) -> float:
        early = min(1.0, EARLY / max(1, self.count))
        return max(FACTOR, FACTOR_EARLY * early * early * early)

    def _peak_term(self, peak: Peak) -> _Term:
        peak_s = peak.now_s(self._recent.typical_s())
        if peak.times > 1:
            return _Term(self._peak_factor() * peak_s, self._say_peak, peak)
        return _Term(min(ONCE_FACTOR * peak_s, peak.once_s), self._say_once, peak)

    def _peak_factor(self) -> float:
        """The more the long ones differ, the longer the next may be; the square, because a heavy tail is known less well than a light one."""
        spread = self._peaks.spread()
        return max(PEAK_FACTOR, math.exp(min(20.0, PEAK_LIGHT * spread + PEAK_HEAVY * spread * spread)))

    # -- how a term is said ---------------------------------------------------------------------------------------------------------------------------------

    def _say_floor(self, _: Peak | None) -> str:
        return f"the floor of {_s(FLOOR_S)}, which a pause of a busy machine may reach; the usual is {_s(self._recent.typical_s())}"

    def _say_usual(self, _: Peak | None) -> str:
        factor = self._factor()
        few = "" if factor == FACTOR else f" ({factor:.3g} because of only {self.count} occurrences)"
        return f"{factor:.3g} x {_s(self._recent.nth_longest_s(NTH))}, the third longest of the last {RECENT}{few}"

    def _say_tail(self, _: Peak | None) -> str:
        return f"{self._tail.factor:.3g} x the usual {_s(self._recent.typical_s())}, the one in {1 / _TAIL_GOAL:,.0f} that their spread promises"

    def _say_once(self, peak: Peak | None) -> str:
        most = f"{ONCE_FACTOR:g} x that, at most {ONCE_AT_MOST:g} x what was usual"
        return f"a single one of {_s(peak.duration_s)} {self.count - peak.at} ago ({most})" if peak else ""

    def _say_peak(self, peak: Peak | None) -> str:
        if peak is None:
            return ""
        peak_s, ago = peak.now_s(self._recent.typical_s()), self.count - peak.at
        return f"{self._peak_factor():.3g} x the {_s(peak_s)} of a kind that came {peak.times} times, the last {ago} ago"

    def _say_kill(self, _: Peak | None) -> str:
        return f"{KILL_FACTOR:g} x the limit at which one was killed lately"

    # -- what is kept, what is shown ------------------------------------------------------------------------------------------------------------------------

    def distribution(self) -> dict[str, object]:
        """What dashboards draw: `count`, `warmups`, `longest_s`; `p50_s`, `p90_s`, `p99_s` of all (bucket accuracy, 33 %); `recent` with the exact `p50_s`, `p90_s` and
        `max_s` of the last 64; `histogram`: lower bounds `low_s` and `count` of the buckets that are not empty. Buckets are the same for all sections and
        runs: 10 ** (i / 8) ms for i = 0 ... 63; shorter is in the first, longer in the last."""
        p99_s, p90_s, p50_s = (float(f"{value:.3g}") for value in self._seen.exceeded_by((0.01, 0.1, 0.5)))
        recent = self._recent
        return {
            "count": self.count,
            "warmups": self.warmups,
            "longest_s": round(self.longest_s, 6),
            "p50_s": p50_s,
            "p90_s": p90_s,
            "p99_s": p99_s,
            "recent": {
                "p50_s": round(recent.typical_s(), 6),
                "p90_s": round(recent.nth_longest_s(1 + len(recent) // 10), 6),
                "max_s": round(recent.nth_longest_s(1), 6),
            },
            "histogram": {key: list(values) for key, values in self._seen.table().items()},
        }

    def to_json(self) -> dict[str, object]:
        """Everything, as plain JSON of at most about 10 KiB. The ceiling is not in it: it is the user's, and may be another next time."""
        return {
            "version": VERSION,
            "count": self.count,
            "warmups": self.warmups,
            "ignored": self.ignored,
            "longest_s": self.longest_s,
            "recent": self._recent.to_json(),
            "peaks": self._peaks.to_json(),
            "ratios": self._tail.ratios.to_json(),
            "tail": self._tail.factor,
            "seen": self._seen.to_json(),
            "kill": [self._kill_s, self._kill_until],
            "lower": [self._lower_at, self._lower_s, self._lower_why],
            "hard_s": self._hard_s if math.isfinite(self._hard_s) else None,
            "why": self._why,
        }

    @classmethod
    def from_json(cls, value: object, *, ceiling_s: float) -> TimeoutLearner:
        """The learner as it was, under this ceiling. Whatever `to_json` cannot have written gives one that has seen nothing, whose reason says what was wrong."""
        try:
            return cls._loaded(value, ceiling_s)
        except (ValueError, KeyError) as error:
            fresh = cls(ceiling_s)
            fresh._why += f" (what was learned before cannot be read: {str(error)[:80]})"
            return fresh

    @classmethod
    def _loaded(cls, value: object, ceiling_s: float) -> TimeoutLearner:
        if not isinstance(value, Mapping) or value.get("version") != VERSION or len(value) > _MAX_JSON_ITEMS:
            raise ValueError(f"not a record of version {VERSION}")
        self = cls(ceiling_s)
        self.count, self.warmups, self.ignored = (whole(value[key]) for key in ("count", "warmups", "ignored"))
        self.longest_s = number(value["longest_s"], 0, LONGEST_S)
        self._recent = Recent.from_json(value["recent"])
        if len(self._recent) != min(self.count, RECENT):
            raise ValueError(f"{len(self._recent)} recent durations of {self.count}")
        self._peaks = Peaks.from_json(value["peaks"], self.count)
        self._tail.ratios.load(value["ratios"])
        self._tail.factor = number(value["tail"], 0, LONGEST_S)
        self._seen.load(value["seen"])
        kill_s, kill_until = listed(value["kill"], 2)
        self._kill_s, self._kill_until = number(kill_s, 0, KILL_FACTOR * LONGEST_S), whole(kill_until, self.count + HOLD_MIN)
        lower_at, lower_s, lower_why = listed(value["lower"], 3)
        self._lower_at, self._lower_s = whole(lower_at, self.count + PATIENCE), number(lower_s, 0, KILL_FACTOR * LONGEST_S)
        self._lower_why = str(lower_why)[:MAX_TEXT]
        self._restore(value["hard_s"], value["why"])
        return self

    def _restore(self, hard_s: object, why: object) -> None:
        """The published timeout, if it still fits under the ceiling and above the terms."""
        if self.count >= MIN_SAMPLES and hard_s is not None and isinstance(why, str):
            learned_s = number(hard_s, 1e-3, math.inf)
            self._hard_s, self._why = (learned_s, why[:MAX_TEXT]) if learned_s < self.ceiling_s else (self.ceiling_s, "")
        self._reconsider()


def _s(seconds: float) -> str:
    """For people: three digits."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def _rounded_up(seconds: float) -> float:
    """To three significant digits, upwards: what is published is the number that is said."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.6g}")
