"""When a rank hangs: judged by what it has finished, not by whether it lives. Pure: `observe(now, rank, sample)` in, findings out.

At any moment exactly these clocks of a rank run:
- each open section that has a limit, from its own start; nested and overlapping ones side by side;
- with none of them open: *out of section*, from the last end of such a section or the last progress (the end of a `step`, a higher iteration), whichever is later;
- before the first such section or progress: *start-up*, from the rank's start, limited by the `setup` budget.

A section without a limit of its own is not there for the detector (NVRx's client does not even send those): the time in it is out of section, and neither
its end nor a thread that opens and closes it all the time starts a clock again. Give it a limit and it counts.

A clock that reaches 2/3 of a fixed hard limit (or what `Limits.soft_s` says) makes the rank *suspect*, at the limit it is *hung*; each is said once, and
*recovered* when what was said is over. A finding needs two samples in a row, both on time and both at or past the deadline, with the same clock running.

Time during which nobody looked does not count against the rank. A sample that comes later than three intervals after the one before is *late*: it never
confirms, nor is it the first of two, and every clock that runs on is set back by the gap. On a machine so busy that the last eight gaps were all longer than
the interval, the shortest of them is the interval: slow looking is looking too, and a hang is still found.

A rank whose script has not attached a client is hung past the setup budget only when the script is known to use one (`client_known`, or any rank seen attached
here); else it is *silent*: one finding, for a warning, and no kill; should a client attach later after all, the setup budget starts then. A page that cannot be
trusted is silent too.

One detector serves one cycle: nothing that a section left behind outlives it. It knows no coordinates, names no culprit and kills nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ft_launcher.errors import ConfigError

SETUP = "setup"
OUT_OF_SECTION = "out_of_section"
SOFT_SHARE = 2 / 3
LATE_INTERVALS = 3
GAPS_KEPT = 8

Kind = Literal["suspect", "hung", "recovered", "silent"]


class Opened(Protocol):
    """What is read of an open section (`monitors.page.OpenSection`)."""

    @property
    def name(self) -> str:
        """The section's name."""

    @property
    def since_ns(self) -> int:
        """When it was opened."""

    @property
    def iteration(self) -> int | None:
        """The iteration that the script gave with it."""


class Ended(Protocol):
    """What is read of a section's statistics (`monitors.page.SectionStats`)."""

    @property
    def last_end_ns(self) -> int:
        """When it last ended, 0: never."""


class Sample(Protocol):
    """What is read of a look at a rank (`monitors.page.PageSample`, or what another kind of client is translated into)."""

    @property
    def attached(self) -> bool:
        """Whether a client has connected."""

    @property
    def iteration(self) -> int | None:
        """The highest iteration reached."""

    @property
    def steps(self) -> int:
        """Steps ended in this process."""

    @property
    def last_progress_ns(self) -> int:
        """When the last step ended or the iteration last rose, 0: never."""

    @property
    def open(self) -> Iterable[Opened]:
        """The sections open now."""

    @property
    def sections(self) -> Mapping[str, Ended]:
        """Statistics of all sections seen."""

    @property
    def broken(self) -> str | None:
        """Why the sample cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard timeouts in seconds (`math.inf`: never), per section and out of section; `soft_s` overrides the 2/3 rule by name (`OUT_OF_SECTION` for that one).

    Without a `setup` entry the start-up has the out-of-section limit. Raises ConfigError for a limit that is not a positive number.
    """

    sections: Mapping[str, float]
    out_of_section_s: float
    soft_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, limit_s in [*self.sections.items(), (OUT_OF_SECTION, self.out_of_section_s), *self.soft_s.items()]:
            if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not limit_s > 0:
                raise ConfigError(f"timeout {name}={limit_s!r}: must be a number of seconds above 0 (inf: never)")

    def hard_s(self, section: str) -> float:
        """The hard limit of a section, of `OUT_OF_SECTION` or of the start-up (`SETUP`)."""
        return self.out_of_section_s if section == OUT_OF_SECTION else self.sections.get(section, self.out_of_section_s)

    def soft(self, section: str) -> float:
        """The soft limit of the same, never above the hard one."""
        hard_s = self.hard_s(section)
        return min(hard_s, self.soft_s.get(section, hard_s * SOFT_SHARE))


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a rank. `section` is None out of section and `setup` during start-up; `since_s` counts from the clock's start to now, `limit_s` is the
    hard limit (the soft one of a suspect is in the reason); `reason` is one sentence with numbers."""

    rank: int
    kind: Kind
    section: str | None
    since_s: float
    limit_s: float
    iteration: int | None
    reason: str


@dataclass(slots=True)
class _Clock:
    """A running clock: which limit, since when, and what became of it."""

    limit: str
    since_ns: int
    where: str
    iteration: int | None
    excused_ns: int = 0
    past_soft: bool = False
    past_hard: bool = False
    told: str = ""


@dataclass(slots=True)
class _Rank:
    """What is kept of a rank between two looks."""

    seen_ns: int
    gaps: deque[int] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    clocks: dict[tuple[str, str, int], _Clock] = field(default_factory=dict)
    told_broken: bool = False


class HangDetector:
    """The ranks of one node in one cycle. `limits` and `client_known` may be set anew at any time; `interval_s` is how often the caller means to look."""

    def __init__(self, limits: Limits, *, interval_s: float = 0.05, client_known: bool = False) -> None:
        self.limits = limits
        self.client_known = client_known
        self._interval_ns = int(interval_s * 1e9)
        self._ranks: dict[int, _Rank] = {}

    def observe(self, now_ns: int, rank: int, sample: Sample, started_ns: int) -> list[Finding]:
        """What this look at `rank` shows. `now_ns` is CLOCK_MONOTONIC and never goes back, `started_ns` when the rank's process was started."""
        state = self._ranks.setdefault(rank, _Rank(started_ns))
        late = self._is_late(state, now_ns)
        seen_ns, state.seen_ns = state.seen_ns, now_ns
        if sample.broken:
            return self._broken(state, rank, sample.broken)
        self.client_known |= sample.attached
        before, state.clocks = state.clocks, self._running(state.clocks, sample, started_ns)
        findings = [f for key, c in before.items() if key not in state.clocks for f in _recovered(now_ns, rank, c, sample)]
        for clock in state.clocks.values():
            if late:
                clock.excused_ns += max(0, now_ns - max(seen_ns, clock.since_ns))
            findings += self._judge(now_ns, rank, clock, sample, late)
        return findings

    def forget(self, rank: int) -> None:
        """The rank has ended: nothing more will be said about it."""
        self._ranks.pop(rank, None)

    def next_deadline_ns(self) -> int | None:
        """The earliest moment at which a clock now running reaches its next limit; a look then and one interval later confirms it. None: nothing can come."""
        due = [d for state in self._ranks.values() for clock in state.clocks.values() if (d := self._due_ns(clock)) is not None]
        return min(due, default=None)

    def _is_late(self, state: _Rank, now_ns: int) -> bool:
        gap_ns = now_ns - state.seen_ns
        usual_ns = max(self._interval_ns, min(state.gaps)) if len(state.gaps) == GAPS_KEPT else self._interval_ns
        state.gaps.append(gap_ns)
        return gap_ns > LATE_INTERVALS * usual_ns

    def _running(self, known: dict[tuple[str, str, int], _Clock], sample: Sample, started_ns: int) -> dict[tuple[str, str, int], _Clock]:
        """The clocks that run in this sample; those that ran before are the same objects."""
        clocks = {}
        for clock in self._clocks(sample, started_ns):
            key = (clock.where, clock.limit, clock.since_ns)
            clocks[key] = known.get(key, clock)
        return clocks

    def _clocks(self, sample: Sample, started_ns: int) -> list[_Clock]:
        limited = self.limits.sections
        if sample.attached:
            found = [_Clock(o.name, o.since_ns, "in", o.iteration) for o in sample.open if o.name in limited]
            if found:
                return found
            ends_ns = max((s.last_end_ns for name, s in sample.sections.items() if name in limited), default=0)
            since_ns = max(ends_ns, sample.last_progress_ns)
            if since_ns > 0:
                return [_Clock(OUT_OF_SECTION, since_ns, "out", None)]
        return [_Clock(SETUP, started_ns, "start", None)]

    def _judge(self, now_ns: int, rank: int, clock: _Clock, sample: Sample, late: bool) -> list[Finding]:
        """Moves one clock on; a limit counts when this and the sample before, both on time, are past it."""
        if clock.told == "silent" and self.client_known:
            clock.told, clock.past_soft, clock.past_hard, clock.excused_ns = "", False, False, now_ns - clock.since_ns
            return [_recovery(now_ns, rank, clock, sample, "has attached its monitoring client")] if sample.attached else []
        elapsed_ns = now_ns - clock.since_ns - clock.excused_ns
        soft = not late and elapsed_ns >= self.limits.soft(clock.limit) * 1e9
        hard = not late and elapsed_ns >= self.limits.hard_s(clock.limit) * 1e9
        kind = self._verdict(clock, sample, soft and clock.past_soft, hard and clock.past_hard)
        clock.past_soft, clock.past_hard = soft, hard
        if kind is None:
            return []
        clock.told = kind
        return [self._finding(now_ns, rank, kind, clock, sample)]

    def _verdict(self, clock: _Clock, sample: Sample, soft: bool, hard: bool) -> Kind | None:
        if clock.told == "hung":
            return None
        if not sample.attached and not self.client_known:
            return "silent" if hard and not clock.told else None
        if hard:
            return "hung"
        return "suspect" if soft and not clock.told else None

    def _finding(self, now_ns: int, rank: int, kind: Kind, clock: _Clock, sample: Sample) -> Finding:
        hard_s = self.limits.hard_s(clock.limit)
        since_s = (now_ns - clock.since_ns) / 1e9
        limit = (
            f"its soft limit is {self.limits.soft(clock.limit):g} s of {hard_s:g} s" if kind == "suspect" else f"its limit is {hard_s:g} s"
        )
        excused = f", {clock.excused_ns / 1e9:.1f} s of it not counted" if clock.excused_ns else ""
        reason = f"rank {rank} has been {_place(clock)}{_around(clock, sample)} for {since_s:.1f} s{excused}; {limit}; {_progress(now_ns, sample)}"
        if kind == "silent":
            reason = f"rank {rank} has attached no monitoring client in {since_s:.1f} s (setup limit {hard_s:g} s): hangs of this script cannot be found"
        iteration = sample.iteration if clock.iteration is None else clock.iteration
        return Finding(rank, kind, _section(clock), since_s, hard_s, iteration, reason)

    def _broken(self, state: _Rank, rank: int, why: str) -> list[Finding]:
        state.clocks = {}
        if state.told_broken:
            return []
        state.told_broken = True
        reason = f"rank {rank}'s section page cannot be trusted: {why}; hangs of this rank are not found"
        return [Finding(rank, "silent", None, 0.0, self.limits.out_of_section_s, None, reason)]

    def _due_ns(self, clock: _Clock) -> int | None:
        limit_s = self.limits.hard_s(clock.limit) if clock.told else self.limits.soft(clock.limit)
        if clock.told == "hung" or not math.isfinite(limit_s):
            return None
        return clock.since_ns + clock.excused_ns + math.ceil(limit_s * 1e9)


def _recovered(now_ns: int, rank: int, clock: _Clock, sample: Sample) -> list[Finding]:
    return [_recovery(now_ns, rank, clock, sample, f"is no longer {_place(clock)}")] if clock.told else []


def _recovery(now_ns: int, rank: int, clock: _Clock, sample: Sample, what: str) -> Finding:
    since_s = (now_ns - clock.since_ns) / 1e9
    return Finding(
        rank,
        "recovered",
        _section(clock),
        since_s,
        0.0,
        sample.iteration,
        f"rank {rank} {what}, {since_s:.1f} s on; {_progress(now_ns, sample)}",
    )


def _section(clock: _Clock) -> str | None:
    return None if clock.where == "out" else clock.limit


def _place(clock: _Clock) -> str:
    if clock.where == "in":
        return f"in section '{clock.limit}'" + (f" (iteration {clock.iteration})" if clock.iteration is not None else "")
    return "starting up" if clock.where == "start" else "out of section"


def _around(clock: _Clock, sample: Sample) -> str:
    """What else a person must know to understand why this clock runs and no other."""
    unlimited = ", ".join(f"'{o.name}'" for o in sample.open)
    if clock.where == "in":
        return ""
    if unlimited:
        return f" (inside {unlimited}, without a limit of its own)"
    return "" if clock.where == "out" else " (no section yet)" if sample.attached else " (no client attached)"


def _progress(now_ns: int, sample: Sample) -> str:
    if not sample.last_progress_ns:
        return "no progress yet"
    at = "" if sample.iteration is None else f" (iteration {sample.iteration})"
    return f"last progress {(now_ns - sample.last_progress_ns) / 1e9:.1f} s ago{at}, {sample.steps} steps"
