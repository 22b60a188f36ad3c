"""What one rank says through NVRx's client, kept in the form in which `detect.HangDetector` judges: messages in, answers and a sample out.

A `RankSession` serves one rank in one cycle, over all the connections that the rank opens; the connection that last introduced itself (`InitMsg`) is the one that counts. Pure:
every call brings the time along. It knows its rank's number and sections, and nothing of sockets, other ranks or what becomes of a finding.

How NVRx's words become ours:
- sections are sections, judged by the limits of the launch. The end of a `step` is progress, and so is a higher iteration with one;
- heartbeats count only where a script uses no section at all. They are then a section `heartbeat` that is always open and began with the last one, and the steps of a script
  that has no others (else no restart of such a job could ever be seen to get anywhere);
- before the first section or heartbeat the rank is starting up, as everywhere;
- after an orderly goodbye the rank is in `exit`, which has no limit unless one was given: what a script does after it asked not to be watched is not judged. A connection lost
  with sections open leaves them for whoever asks where the rank was, and judges them no more: nobody would tell us of their end;
- timeouts that the client calculates (or loads) hold for its rank where they are lower than the launch's, but never below the floor of our own rule; `step` and out of section
  only from the sixth step on, `setup` only in the section itself, for imports before it are not in the client's figure;
- a script that uses our client too is judged by both: sections and statistics are united.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from monitors import nvrx_wire as wire
from monitors.detect import SETUP, Limits
from monitors.layout import OPEN_SLOTS, RING, SECTIONS
from monitors.page import OpenSection, PageSample, SectionStats
from monitors.timeouts import FLOOR_S
from monitors.timeouts_book import STEP, WARMUP

HEARTBEAT, EXIT = "heartbeat", "exit"
SAFETY_FACTOR = 5.0
"""What the client multiplies its longest observation by: NVRx's default."""
MAX_WARMUP = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be done after a message: bytes to send (None: nothing), then whether to close. `note`: (kind, text) to be said once per kind; `request`: to be passed on."""

    reply: bytes | None = None
    close: bool = False
    note: tuple[str, str] | None = None
    request: wire.WorkloadControlRequest | None = None


@dataclass(slots=True)
class _Section:
    """One section's history in this cycle; ns of CLOCK_MONOTONIC."""

    open_ns: int | None = None
    iteration: int | None = None
    count: int = 0
    last_ns: int = 0
    max_ns: int = 0
    last_end_ns: int = 0
    ring: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RING))

    def end(self, now_ns: int) -> None:
        """The occurrence is over."""
        took = now_ns - (self.open_ns if self.open_ns is not None else now_ns)
        self.ring.append((self.count, took))
        self.count, self.last_ns, self.max_ns = self.count + 1, took, max(self.max_ns, took)
        self.open_ns, self.last_end_ns = None, now_ns


class RankSession:
    """One rank in one cycle. `limits`: those of the launch, which the client is told. `connection`: the one that counts, None when there is none."""

    def __init__(self, rank: int, limits: Limits) -> None:
        self.rank = rank
        self.attached = False
        self.timeouts = wire.UpdateConfigMsg()
        self._base = limits
        self.connection: int | None = None
        self._one_way = False
        self._warmup = WARMUP
        self._goodbye_ns = 0
        self._sections: dict[str, _Section] = {}
        self._beat_ns = 0
        self._steps = self._beats = 0
        self._iteration: int | None = None
        self._progress_ns = 0
        self._version = 0
        self._sample: tuple[PageSample, int, PageSample] | None = None
        self._limits: tuple[Limits, int, Limits] | None = None
        self._native = False

    # -- what the rank says -------------------------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, connection: int, message: wire.Message) -> Answer:
        """Take one message of connection number `connection` at `now_ns` (CLOCK_MONOTONIC)."""
        self._version += 1
        match message:
            case wire.AuthkeyMsg():
                return Answer(wire.OK)
            case wire.InitMsg():
                return self._on_init(connection, message)
            case wire.WorkloadControlRequest():
                return Answer(wire.REQUEST_OK, close=True, request=message)
        if connection != self.connection:
            kind = type(message).__name__
            return Answer(
                wire.error(f"{kind} before InitMsg"),
                close=True,
                note=("order", f"its client sent a {kind} before it had introduced itself"),
            )
        match message:
            case wire.HeartbeatMsg():
                self._on_heartbeat(now_ns)
                return Answer(None if self._one_way else wire.OK)
            case wire.SectionMsg():
                trouble = self._on_section(now_ns, message)
                reply = wire.OK if trouble is None else wire.error(trouble)
                return Answer(None if self._one_way else reply, note=self._unlimited(message))
            case wire.UpdateConfigMsg():
                self._on_update(message)
                return Answer(wire.OK)

    def closed(self, now_ns: int, connection: int) -> tuple[str, ...]:
        """A connection has ended; returns the sections that it leaves open."""
        if connection != self.connection:
            return ()
        self._version += 1
        self.connection = None
        left = tuple(name for name, section in self._sections.items() if section.open_ns is not None)
        self._goodbye_ns = 0 if left else now_ns
        return left

    def _on_init(self, connection: int, message: wire.InitMsg) -> Answer:
        """A new life of the client: nothing is open in it."""
        self.connection, self.attached = connection, True
        self._one_way = message.reads_skip
        self._warmup = min(MAX_WARMUP, WARMUP if message.warmup_iters is None else message.warmup_iters) + self._steps
        self._goodbye_ns = self._beat_ns = 0
        for section in self._sections.values():
            section.open_ns = None
        note = None
        if message.rank is not None and message.rank != self.rank:
            note = ("rank", f"its client calls itself rank {message.rank}; it is counted as rank {self.rank}, whose socket it uses")
        return Answer(wire.welcome(self._config()), note=note)

    def _config(self) -> dict[str, Any]:
        """The FaultToleranceConfig that the client works with."""
        base = self._base
        return {
            "rank_section_timeouts": {n: _or_none(s) for n, s in base.sections.items() if n not in (HEARTBEAT, EXIT)},
            "rank_out_of_section_timeout": _or_none(base.out_of_section_s),
            "initial_rank_heartbeat_timeout": _or_none(base.hard_s(SETUP)),
            "rank_heartbeat_timeout": _or_none(heartbeat_limit_s(base)),
            "safety_factor": SAFETY_FACTOR,
            "skip_section_response": self._one_way,
            "install_exception_hook": False,
        }

    def _on_heartbeat(self, now_ns: int) -> None:
        self._beats += 1
        self._beat_ns = now_ns
        if not self._sections:
            self._progress_ns = now_ns

    def _on_section(self, now_ns: int, message: wire.SectionMsg) -> str | None:
        """Returns what the client is told it did wrong."""
        if message.section is None:
            for name in [n for n, s in self._sections.items() if s.open_ns is not None]:
                self._end(now_ns, name)
            return None
        section = self._sections.get(message.section)
        if message.action is wire.SectionAction.OPEN:
            return self._open(now_ns, message.section, section, message.iteration)
        if section is None or section.open_ns is None:
            return f"Section '{wire.printable(message.section)}' is not open."
        if message.section == STEP:
            self._advance(now_ns, message.iteration)
        self._end(now_ns, message.section)
        return None

    def _open(self, now_ns: int, name: str, section: _Section | None, iteration: int | None) -> str | None:
        """Opened twice it counts from now on: a newer client's `end_all_sections` sends nothing, so its next start is all we hear of the end."""
        twice = section is not None and section.open_ns is not None
        if not twice and sum(s.open_ns is not None for s in self._sections.values()) >= OPEN_SLOTS:
            return f"more than {OPEN_SLOTS} sections open at once"
        if section is None:
            if len(self._sections) >= SECTIONS:
                return f"more than {SECTIONS} different sections"
            section = self._sections[name] = _Section()
        section.open_ns, section.iteration = now_ns, iteration
        if name == STEP:
            self._advance(now_ns, iteration)
        return f"Section '{wire.printable(name)}' is already open." if twice else None

    def _advance(self, now_ns: int, iteration: int | None) -> None:
        if iteration is not None and (self._iteration is None or iteration > self._iteration):
            self._iteration, self._progress_ns = iteration, now_ns

    def _end(self, now_ns: int, name: str) -> None:
        self._sections[name].end(now_ns)
        if name == STEP:
            self._steps += 1
            self._progress_ns = now_ns

    def _unlimited(self, message: wire.SectionMsg) -> tuple[str, str] | None:
        name = message.section
        if name is None or name in self._base.sections:
            return None
        shown = wire.printable(name)
        text = f"section '{shown}' has no limit, which NVRx's client of 0.4 refuses and later ones ignore; give it one: --timeouts +{shown}=SECONDS"
        return (f"section {shown}" if name in self._sections else "sections", text)

    def _on_update(self, message: wire.UpdateConfigMsg) -> None:
        """What a part does not mention stays as it was."""
        known = self.timeouts
        self.timeouts = wire.UpdateConfigMsg(
            message.sections or known.sections,
            known.out_of_section_s if message.out_of_section_s is None else message.out_of_section_s,
            known.heartbeat_s if message.heartbeat_s is None else message.heartbeat_s,
        )

    # -- what is made of it ---------------------------------------------------------------------------------------------------------------------

    def sample(self, page: PageSample) -> PageSample:
        """The rank as seen through its page (ours) and this session together; the same object while nothing changes. A page that cannot be trusted is left out."""
        if not self.attached:
            return page
        if self._sample is None or self._sample[0] is not page or self._sample[1] != self._version:
            self._native = page.attached and page.broken is None
            self._sample = (page, self._version, self._united(page))
        return self._sample[2]

    def limits(self, base: Limits) -> Limits:
        """What this rank is judged by, when the launch's limits are `base`. Call `sample` first."""
        self._base = base
        if not self.attached or (self._native and self.connection is None):
            return base
        if self._limits is None or self._limits[0] is not base or self._limits[1] != self._version:
            self._limits = (base, self._version, self._own_limits(base))
        return self._limits[2]

    def occurrences(self, name: str, after_index: int = -1) -> list[tuple[int, int]]:
        """As `SectionPage.occurrences`: (index, duration in ns) of what ended after `after_index`, in order, the last `RING` at most. None where our
        own client is used too: its page has them."""
        section = None if self._native else self._sections.get(name)
        return [] if section is None else [(index, took) for index, took in section.ring if index > after_index]

    def _united(self, page: PageSample) -> PageSample:
        if not self._native:
            page = replace(page, broken=None, open=(), sections={}, steps=0, iteration=None, last_progress_ns=0)
        elif self.connection is None:
            return page
        own = {name: SectionStats(s.count, s.last_ns, s.max_ns, s.last_end_ns) for name, s in self._sections.items()}
        steps = self._steps if self._sections else self._beats
        return replace(
            page,
            attached=True,
            iteration=max((i for i in (page.iteration, self._iteration) if i is not None), default=None),
            steps=max(page.steps, steps),
            last_progress_ns=max(page.last_progress_ns, self._progress_ns),
            open=tuple(sorted((*page.open, *self._opened()), key=lambda o: o.since_ns)),
            sections={**own, **page.sections},
        )

    def _opened(self) -> list[OpenSection]:
        found = [OpenSection(name, s.open_ns, s.iteration) for name, s in self._sections.items() if s.open_ns is not None]
        if self.connection is None:
            return found if not self._goodbye_ns else [OpenSection(EXIT, self._goodbye_ns)]
        if self._beat_ns and not self._sections:
            found.append(OpenSection(HEARTBEAT, self._beat_ns))
        return found

    def _own_limits(self, base: Limits) -> Limits:
        if self.connection is None:
            never = dict.fromkeys((*base.sections, *self._sections), math.inf)
            return Limits({**never, EXIT: base.sections.get(EXIT, math.inf)}, math.inf)
        told, warm = self.timeouts, self._steps >= self._warmup
        own = {name: s for name, s in told.sections.items() if self._holds(name, warm)}
        sections = {name: _lower(hard_s, own.get(name)) for name, hard_s in base.sections.items()}
        sections[HEARTBEAT] = _lower(heartbeat_limit_s(base), told.heartbeat_s)
        return Limits(sections, _lower(base.out_of_section_s, told.out_of_section_s if warm else None), base.soft_s)

    def _holds(self, name: str, warm: bool) -> bool:
        """Whether the client's own figure for a section holds now."""
        if name == SETUP:
            section = self._sections.get(SETUP)
            return section is not None and section.open_ns is not None
        return warm or name != STEP


def heartbeat_limit_s(limits: Limits) -> float:
    """Between two heartbeats there may be a step, a save and what is in no section; `--timeouts +heartbeat=SECONDS` says it better."""
    named = limits.sections
    return named.get(HEARTBEAT, limits.out_of_section_s + named.get(STEP, 0.0) + named.get("checkpointing", 0.0))


def _lower(hard_s: float, own_s: float | None) -> float:
    return hard_s if own_s is None else min(hard_s, max(own_s, FLOOR_S))


def _or_none(seconds: float) -> float | None:
    """NVRx's word for never."""
    return seconds if math.isfinite(seconds) else None


def fields(timeouts: wire.UpdateConfigMsg) -> Mapping[str, Any]:
    """A client's timeouts for the journal, in seconds."""
    return {"sections": dict(timeouts.sections), "out_of_section_s": timeouts.out_of_section_s, "heartbeat_s": timeouts.heartbeat_s}
