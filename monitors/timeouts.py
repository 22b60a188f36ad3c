"""How long a section may take before its rank counts as hung, learned from how long it took so far. Pure: durations in, a timeout and its reason out.

The hard timeout is the largest of five terms, and never above the ceiling (what the user fixed):

- *usual*: 4 x the third longest of the last 64. The third, so that one or two stalls count for nothing; 4, so that a step that suddenly takes 3 times as long
  (a longer sequence, a slower link) lives, after which the window follows. Early the factor is larger, 32,000 / occurrences up to 40: what has
  not happened yet is the likelier the shorter we have looked (an evaluation 30 times as long as a step, every 1,000 steps, inside `step`, survives its first time).
- *tail*: where the durations spread widely, the one in ten million that their own tail promises (`_Tail`).
- *peaks*: 2 x each kind of long occurrence that came more than once lately, 1.5 x one that came once, at most 7 x the terms above. Held twice as long as
  it took to come, so that a lone stall is forgotten and a rare evaluation is not (`monitors.timeouts_memory`).
- *kills*: what was killed at a learned timeout may have been alive. 8 x that is allowed next, so that a wrong kill cannot repeat itself for long.
- *floor*: 4.5 s (suspect at 3 s). A full garbage collection costs 60 ns an object, 2 s for a heap of 32 million; a machine with too many processes for its cores and a
  file system's hiccup reach as far.

With fewer than 16 occurrences the ceiling holds. Warm-up occurrences (the first of each cycle: compilation, connections, allocators) are judged by the ceiling and
counted apart. The timeout is raised the moment a term says so and lowered only when 30 % can be gained, so that its history stays readable.

`docs/adr/0004-timeout-rule.md` has the alternatives with their figures, `bench/timeouts.py` measures the rule. This file must never know a clock, a rank, or what a
section's name means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from ft_launcher.errors import ConfigError
from monitors.timeouts_memory import HOLD_MIN, LONGEST_S, RECENT, LogHistogram, Peak, Peaks, Recent, listed, number, whole

VERSION = 1
MIN_SAMPLES = 16
FLOOR_S = 4.5
SOFT_SHARE = 2 / 3
FACTOR, FACTOR_EARLY, EARLY = 3.5, 40.0, 1000
NTH = 3
STANDS_OUT = 2.0
RARE_FACTOR, ONCE_FACTOR, ONCE_AT_MOST, PEAK_RECORDS = 2.0, 1.5, 7.0, 6.0
KILL_FACTOR = 8.0
RAISE_BY, LOWER_AT = 1.1, 0.8

_TAIL_LEVELS, _TAIL_STEP, _TAIL_RAREST, _TAIL_BEYOND, _TAIL_SAMPLES, _TAIL_EVERY = 4, 2.5, 0.002, 8, 500, 64
_TAIL_GOAL = 1e-7
_NORMAL = NormalDist()
_TAIL_GOAL_Z = -_NORMAL.inv_cdf(_TAIL_GOAL)
_MAX_JSON_ITEMS = 32


@dataclass(frozen=True, slots=True)
class Timeout:
    """`soft_s`: suspect and gather; `hard_s`: hung (`math.inf`: never). `learned`: tighter than the ceiling. `reason`: one sentence with numbers on why it is what it
    is, unchanged as long as the timeout is."""

    soft_s: float
    hard_s: float
    reason: str
    learned: bool = False


@dataclass(frozen=True, slots=True)
class _Term:
    """A lower bound for the hard timeout, and how it is said."""

    hard_s: float
    why: Callable[[], str]


class _Tail:
    """How many times the usual duration the one in ten million would be, if the tail went on as it is.

    On the ratios duration / median of that time, so that a drift is no tail. ln(ratio) against the normal quantile z of the share that exceeds it is a straight line for
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
        self._upper_s = -1.0
        self._hard_s = self.ceiling_s
        self._why = f"the fixed value of {_s(self.ceiling_s)}: none of the {MIN_SAMPLES} occurrences needed for a tighter one was seen"

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
            self._upper_s = -1.0
            self._reconsider()

    def decide(self, *, warmup: bool = False) -> Timeout:
        """The timeout now; `warmup`: the one for a cycle's first occurrences. Changes nothing."""
        if warmup:
            return Timeout(self.ceiling_s * SOFT_SHARE, self.ceiling_s, f"the fixed value of {_s(self.ceiling_s)} while warming up")
        return Timeout(self._hard_s * SOFT_SHARE, self._hard_s, self._why, self._hard_s < self.ceiling_s)

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
            self._upper_s = -1.0

    def _stands_out(self, index: int, duration_s: float) -> None:
        self._peaks.add(index, duration_s, self._recent.typical_s())
        self._upper_s = -1.0

    def _reconsider(self) -> None:
        """Moves the published timeout where the terms want it. Cheap while nothing changed: most occurrences leave all terms as they were."""
        if self.count < MIN_SAMPLES:
            self._why = (
                f"the fixed value of {_s(self.ceiling_s)}: {self.count} of the {MIN_SAMPLES} occurrences needed for a tighter one were seen"
            )
            return
        upper_s = self._recent.nth_longest_s(NTH)
        fading = EARLY < self.count < 5 * EARLY and self.count % RECENT == 0
        if upper_s == self._upper_s and not fading and not self._peaks.changes_at(self.count) and self.count != self._kill_until:
            return
        self._upper_s = upper_s
        term = self._largest(upper_s)
        if term.hard_s > self._hard_s:
            self._publish(term, "up", RAISE_BY)
        elif term.hard_s < LOWER_AT * self._hard_s and math.isfinite(self.ceiling_s):
            self._publish(term, "down", 1.0)
        elif self._hard_s == self.ceiling_s:
            self._why = f"the fixed value of {_s(self.ceiling_s)}: {term.why()} would allow {_s(term.hard_s)} ({self.count} occurrences seen)"

    def _largest(self, upper_s: float) -> _Term:
        """The term that decides; not yet cut to the ceiling."""
        typical_s = self._recent.typical_s()
        factor = max(FACTOR, FACTOR_EARLY * min(1.0, EARLY / self.count) ** 2)
        terms = [
            _Term(FLOOR_S, lambda: f"the floor of {_s(FLOOR_S)}, which a pause of a busy machine may reach; the usual is {_s(typical_s)}"),
            _Term(factor * upper_s, lambda: f"{factor:.3g} x {_s(upper_s)}, the third longest of the last {RECENT}{few}"),
            _Term(self._tail.factor * typical_s, lambda: f"the one in {1 / _TAIL_GOAL:,.0f} that the spread of the durations promises"),
        ]
        few = "" if factor == FACTOR else f" ({factor:.3g} because of only {self.count} occurrences)"
        usual_s = max(term.hard_s for term in terms)
        terms += [self._peak_term(peak, typical_s, usual_s) for peak in self._peaks.held(self.count)]
        if self.count < self._kill_until:
            terms.append(_Term(self._kill_s, lambda: f"{KILL_FACTOR:g} x what an occurrence was killed at lately"))
        return max(terms, key=lambda term: term.hard_s)

    def _peak_term(self, peak: Peak, typical_s: float, usual_s: float) -> _Term:
        peak_s, ago = peak.now_s(typical_s), self.count - peak.at
        if peak.times > 1:
            factor = max(RARE_FACTOR, math.exp(min(20.0, PEAK_RECORDS * self._peaks.spread)))
            return _Term(factor * peak_s, lambda: f"{factor:.3g} x the {_s(peak_s)} of a kind that came {peak.times} times, the last {ago} ago")
        at_most = f"at most {ONCE_AT_MOST:g} x the usual limit"
        limit_s = min(ONCE_FACTOR * peak_s, ONCE_AT_MOST * usual_s)
        return _Term(limit_s, lambda: f"{ONCE_FACTOR:g} x the {_s(peak_s)} ({at_most}) of a single one {ago} ago")

    def _publish(self, term: _Term, way: str, by: float) -> None:
        before_s, self._hard_s = self._hard_s, min(self.ceiling_s, _rounded_up(term.hard_s * by))
        if self._hard_s != before_s:
            self._why = f"{way} from {_s(before_s)} to {_s(self._hard_s)} after {self.count} occurrences: {term.why()}"

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
            "hard_s": self._hard_s if math.isfinite(self._hard_s) else None,
            "why": self._why,
        }

    @classmethod
    def from_json(cls, value: object, *, ceiling_s: float) -> TimeoutLearner:
        """The learner as it was, under this ceiling. Whatever `to_json` cannot have written gives one that has seen nothing, whose reason says what was wrong."""
        try:
            return cls._loaded(value, ceiling_s)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
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
        self._restore(value["hard_s"], value["why"])
        return self

    def _restore(self, hard_s: object, why: object) -> None:
        """The published timeout, if it still fits under the ceiling and above the terms."""
        if self.count < MIN_SAMPLES:
            return
        if hard_s is not None and isinstance(why, str) and number(hard_s, 1e-3, math.inf) < self.ceiling_s:
            self._hard_s, self._why = number(hard_s, 1e-3, math.inf), why[:500]
        self._reconsider()


def _s(seconds: float) -> str:
    """For people: three digits."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def _rounded_up(seconds: float) -> float:
    """To two significant digits, upwards: what is published should be a number that one can remember."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.6g}")
