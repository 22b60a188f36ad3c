"""Looks at every rank's section page twenty times a second and turns what it sees into events.

It owns the pages of one node and one cycle, and the detector that judges them. A look costs microseconds: nothing is asked of the ranks, nothing can block. What it
finds (a hang, an uncaught exception, progress) it reports; it never decides and never kills.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ft_launcher.core.events import ExceptionStamped, HangFound, NodeEvent, ProgressSeen
from ft_launcher.core.evidence import Hang, RankProgress
from ft_launcher.shell.dumps import Seen, process_state
from ft_launcher.shell.nvrx_server import NvrxServer
from monitors.detect import Finding, HangDetector, Limits
from monitors.learning import WARMUP_STEPS, NodeSamples, Sample
from monitors.page import PageSample, SectionPage

INTERVAL_S = 0.05
PROGRESS_EVERY_S = 1.0
STEP = "step"
REAL_SAVE_NS = 5_000_000
"""A `checkpointing` occurrence shorter than this did nothing: Megatron opens the section in every iteration."""


Position = tuple[int, int | None, int, tuple[str, ...]]
"""What changes whenever a rank gets anywhere: steps, iteration, sections ended, sections open; as everywhere, only sections with a limit count, for a thread may beat with others.
What was found of a rank counts while it is where it was."""


@dataclass(slots=True)
class _Watched:
    page: SectionPage
    started_ns: int
    pid: int = 0
    live: bool = True
    stamped: bool = False
    seen: tuple[Position, Seen] | None = None


@dataclass(frozen=True, slots=True)
class Reactions:
    """Where findings go: events to the node machine, progress to the controller, everything else in words."""

    event: Callable[[NodeEvent], None]
    progress: Callable[[ProgressSeen], None]
    finding: Callable[[Finding], None]


class Watchman:
    """The pages and the detector of one cycle. `hang_kills` False (`--hang-action log`): hangs are only told, never become events."""

    def __init__(self, node_id: str, limits: Limits, reactions: Reactions, hang_kills: bool = True, nvrx: NvrxServer | None = None) -> None:
        self.elsewhere: Callable[[], int | None] = lambda: None
        """The iteration of a script whose ranks tell none (`--progress-file`)."""
        self._node_id = node_id
        self._limits = limits
        self._reactions = reactions
        self._hang_kills = hang_kills
        self._nvrx = nvrx
        self._cycle = -1
        self._ranks: dict[int, _Watched] = {}
        self._frozen: dict[int, RankProgress] | None = None
        self._detector: HangDetector | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told: tuple[int | None, int, bool] = (None, 0, False)
        self._told_at_s = 0.0
        self._lease_ns = 0
        self._learned = self._warming = limits
        self._lessons = NodeSamples(1)

    def open_pages(self, cycle: int, ranks: Iterable[int], client_known: bool) -> dict[int, int]:
        """Make fresh pages for the ranks of a cycle and start looking; returns rank -> descriptor. PlatformError when the system has none left."""
        self.close()
        self._cycle, self._frozen = cycle, None
        self._told, self._told_at_s = (None, 0, False), 0.0
        now_ns = time.monotonic_ns()
        self._detector = HangDetector(self._limits, interval_s=INTERVAL_S, client_known=client_known)
        for rank in ranks:
            self._ranks[rank] = _Watched(SectionPage.create(rank, cycle), now_ns)
            self._ranks[rank].page.set_lease(self._lease_ns)
        self._lessons = NodeSamples(max(1, len(self._ranks)))
        self._arm()
        return {rank: watched.page.fd for rank, watched in self._ranks.items()}

    def started(self, rank: int, at_ns: int, pid: int = 0) -> None:
        """The rank's process exists since then: its setup budget counts from here."""
        if rank in self._ranks:
            self._ranks[rank].started_ns = at_ns
            self._ranks[rank].pid = pid

    def ended(self, rank: int) -> None:
        """The rank's process is gone: its last exception is read at once, nothing more will be found."""
        watched = self._ranks.get(rank)
        if watched is not None and watched.live:
            self._read_stamp(rank, watched, self._sample(rank, watched))
            watched.live = False
            if self._detector is not None:
                self._detector.forget(rank)

    def set_lease(self, deadline_s: float) -> None:
        """Until when this node's lease is known to hold (CLOCK_BOOTTIME seconds): what a rank's `commit_allowed()` looks at."""
        self._lease_ns = int(deadline_s * 1e9)
        for watched in self._ranks.values():
            watched.page.set_lease(self._lease_ns)

    def revoke(self) -> None:
        """The cycle is superseded: no rank of it may commit any more."""
        for watched in self._ranks.values():
            watched.page.revoke()

    def freeze(self) -> None:
        """The ranks are about to be killed: where they are now is what counts, not where a peer's broken connection takes them. The first call decides."""
        if self._frozen is None:
            self._frozen = {rank: _stopped_too(self._ranks[rank], progress) for rank, progress in self.progress().items()}

    def standing(self, quiet_s: float) -> dict[int, tuple[bool, Position]]:
        """The ranks that live and have opened or ended nothing for so long: whether they dump stacks on request, and where they are."""
        now_ns = time.monotonic_ns()
        found = {rank: (w, self._sample(rank, w)) for rank, w in self._ranks.items() if w.live}
        return {
            r: (s.stacks_signal != 0, _position(s, self._counted))
            for r, (w, s) in found.items()
            if now_ns - _last_sign_ns(w, s, self._counted) >= quiet_s * 1e9
        }

    @property
    def _counted(self) -> Collection[str]:
        return (self._detector.limits if self._detector is not None else self._limits).sections

    def unseen(self, rank: int) -> bool:
        """Nothing has been found of this rank where it is now."""
        watched = self._ranks.get(rank)
        return watched is not None and (watched.seen is None or watched.seen[0] != _position(self._sample(rank, watched), self._counted))

    def note_seen(self, seen: Mapping[int, Seen], where: Mapping[int, Position]) -> None:
        """What was found of ranks that were at these positions when they were looked at."""
        for rank, found in seen.items():
            if rank in self._ranks and rank in where:
                self._ranks[rank].seen = (where[rank], found)

    def set_learned(self, limits: Mapping[str, tuple[float, float, bool]]) -> None:
        """Section -> (soft, hard, learned) in seconds. Learned ones replace the fixed ones at once; a step's only after the warm-up steps of a cycle."""
        learned = {name: (soft_s, hard_s) for name, (soft_s, hard_s, known) in limits.items() if known and name in self._limits.sections}
        self._learned = _with(self._limits, learned)
        self._warming = _with(self._limits, {name: pair for name, pair in learned.items() if name != STEP})

    def samples(self) -> list[Sample]:
        """What this node's ranks have completed since the last call, one sample an occurrence of all of them."""
        found: list[Sample] = []
        for position, rank in enumerate(sorted(self._ranks)):
            for section in self._limits.sections:
                found += self._lessons.add(position, section, self._occurrences(rank, section, self._lessons.after(position, section)))
        return found

    def _occurrences(self, rank: int, section: str, after: int) -> list[tuple[int, int]]:
        """From the rank's page, or through NVRx's client where it uses that instead."""
        found = self._ranks[rank].page.occurrences(section, after)
        return found if found or self._nvrx is None else self._nvrx.occurrences(rank, section, after)

    def progress(self) -> dict[int, RankProgress]:
        """Where every rank of the cycle is, or was when it ended, or when the kill began."""
        if self._frozen is not None:
            return self._frozen
        now_ns = time.monotonic_ns()
        return {rank: _progress(watched, self._sample(rank, watched), now_ns, self._counted) for rank, watched in self._ranks.items()}

    def pages(self) -> dict[int, PageSample]:
        """What every rank's page says now."""
        return {rank: watched.page.sample() for rank, watched in self._ranks.items()}

    def names_of(self, rank: int) -> tuple[Collection[str], Collection[str]]:
        """The sections that this rank has ended so far, and those that have a limit for it; none where it is not of this node."""
        if rank not in self._ranks:
            return (), ()
        limits = self._limits if self._nvrx is None else self._nvrx.limits(rank, self._limits)
        return self._sample(rank, self._ranks[rank]).sections.keys(), limits.sections.keys()

    def close(self) -> None:
        """Stop looking and give the pages back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for watched in self._ranks.values():
            watched.page.close()
        self._ranks.clear()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self._arm()
        now_ns = time.monotonic_ns()
        samples: list[PageSample] = []
        for rank, watched in list(self._ranks.items()):
            if watched.live:
                sample = self._sample(rank, watched)
                samples.append(sample)
                self._judge(now_ns, rank, watched, sample)
        if samples:
            self._tell_progress(samples, now_ns / 1e9)

    def _sample(self, rank: int, watched: _Watched) -> PageSample:
        """What the rank shows on its page, and through NVRx's client if it uses that."""
        page = watched.page.sample()
        return page if self._nvrx is None else self._nvrx.sample(rank, page)

    def _judge(self, now_ns: int, rank: int, watched: _Watched, sample: PageSample) -> None:
        self._read_stamp(rank, watched, sample)
        if self._detector is None:
            return
        limits = self._learned if sample.steps >= WARMUP_STEPS else self._warming
        self._detector.limits = limits if self._nvrx is None else self._nvrx.limits(rank, limits)
        for finding in self._detector.observe(now_ns, rank, sample, watched.started_ns):
            self._reactions.finding(finding)
            if finding.kind == "hung" and self._hang_kills:
                hang = Hang(rank, finding.section, finding.since_s, finding.limit_s, finding.iteration, finding.reason)
                self._reactions.event(HangFound(self._cycle, hang))

    def _read_stamp(self, rank: int, watched: _Watched, sample: PageSample) -> None:
        if sample.exception is not None and not watched.stamped:
            watched.stamped = True
            at_ns, text = sample.exception
            self._reactions.event(ExceptionStamped(self._cycle, rank, at_ns, text))

    def _tell_progress(self, samples: list[PageSample], now_s: float) -> None:
        """The first step of all ranks at once, later ones once a second."""
        iteration = max((s.iteration for s in samples if s.iteration is not None), default=self.elsewhere())
        all_live = len(samples) == len(self._ranks)
        steps = min(s.steps for s in samples) if all_live else self._told[1]
        busy = any(s.open for s in samples)
        first = steps > 0 and self._told[1] == 0
        if (iteration, steps, busy) == self._told or not (first or now_s - self._told_at_s >= PROGRESS_EVERY_S):
            return
        self._told, self._told_at_s = (iteration, steps, busy), now_s
        began_ago_s = min((_began_ago_s(sample, now_s) for sample in samples), default=math.inf)
        self._reactions.progress(ProgressSeen(self._node_id, self._cycle, iteration, steps, began_ago_s, busy))


def _with(limits: Limits, learned: Mapping[str, tuple[float, float]]) -> Limits:
    """The fixed limits, with learned ones in the place of some."""
    hard_s = {name: pair[1] for name, pair in learned.items()}
    return Limits({**limits.sections, **hard_s}, limits.out_of_section_s, {name: pair[0] for name, pair in learned.items()})


def _began_ago_s(sample: PageSample, now_s: float) -> float:
    """Seconds since the newest completed step of this rank was begun."""
    step = sample.sections.get("step")
    return now_s - (step.last_end_ns - step.last_ns) / 1e9 if step is not None and step.count else math.inf


def _progress(watched: _Watched, sample: PageSample, now_ns: int, counted: Collection[str]) -> RankProgress:
    innermost = sample.open[-1] if sample.open else None
    ends = [stats.last_end_ns for stats in sample.sections.values()]
    since_ns = innermost.since_ns if innermost else max([watched.started_ns, *ends])
    save = sample.sections.get("checkpointing")
    seen = watched.seen[1] if watched.seen is not None and watched.seen[0] == _position(sample, counted) else None
    return RankProgress(
        iteration=sample.iteration,
        steps=sample.steps,
        section=innermost.name if innermost else None,
        since_s=max(0.0, (now_ns - since_ns) / 1e9),
        client=sample.attached,
        saved=save is not None and save.max_ns >= REAL_SAVE_NS,
        ended=_ended(sample, counted),
        stepping=any(opened.name == "step" for opened in sample.open),
        still_s=max(0.0, (now_ns - max(watched.started_ns, sample.last_progress_ns)) / 1e9),
        state=seen.state if seen else "",
        place=seen.place if seen else "",
    )


def _position(sample: PageSample, counted: Collection[str]) -> Position:
    opened = tuple(o.name for o in sample.open if o.name in counted)
    return (sample.steps, sample.iteration, _ended(sample, counted), opened)


def _ended(sample: PageSample, counted: Collection[str]) -> int:
    return sum(stats.count for name, stats in sample.sections.items() if name in counted)


def _last_sign_ns(watched: _Watched, sample: PageSample, counted: Collection[str]) -> int:
    """When this rank last opened or ended anything that counts, made progress, or was started."""
    ends = [stats.last_end_ns for name, stats in sample.sections.items() if name in counted]
    return max([watched.started_ns, sample.last_progress_ns, *ends, *(o.since_ns for o in sample.open if o.name in counted)])


def _stopped_too(watched: _Watched, progress: RankProgress) -> RankProgress:
    """The progress, with a process state that is hard evidence by itself: it may be newer than the last look."""
    state = process_state(watched.pid) if watched.live and watched.pid else ""
    return replace(progress, state=state) if state in ("T", "t", "C") else progress
