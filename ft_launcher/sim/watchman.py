"""The fake watchman of one agent: the production hang detector, shown what the pages of its ranks say, but only where that could lead to something.

A real one looks twenty times a second. Looks that see the same clocks short of their limits change nothing, so they are left out, and the detector is told that they took place; what an
agent missed because it was frozen it has missed here, too. While the training moves as usual nobody looks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft_launcher.core.evidence import Hang
from ft_launcher.core.node_table import NodePhase
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.clock import Ticket
from ft_launcher.sim.nursery import Proc
from ft_launcher.sim.setting import Script
from ft_launcher.sim.training import LockStep
from monitors.detect import Finding, HangDetector, Limits, _Rank
from monitors.learning import WARMUP_STEPS

INTERVAL_S = 0.05
Learned = Mapping[str, tuple[float, float, bool]]
"""Section -> (soft, hard, learned), as published."""


class Lookout(HangDetector):
    """The production detector, which can be told of looks that saw nothing new."""

    def saw_nothing_new(self, rank: int, started_ns: int, until_ns: int) -> None:
        """The rank was looked at in time up to this moment."""
        self._ranks.setdefault(rank, _Rank(started_ns)).seen_ns = until_ns


@dataclass(frozen=True, slots=True)
class Open:
    """An open section, as the detector reads it."""

    name: str
    since_ns: int
    iteration: int | None


@dataclass(frozen=True, slots=True)
class Past:
    """A section's statistics, as the detector reads them."""

    last_end_ns: int


@dataclass(frozen=True, slots=True)
class Look:
    """A look at a page, as the detector reads it (`monitors.detect.Sample`)."""

    attached: bool
    iteration: int | None
    steps: int
    last_progress_ns: int
    open: tuple[Open, ...]
    sections: Mapping[str, Past]
    broken: str | None = None


def fixed_limits(script: Script) -> Limits:
    """What the user has given."""
    sections = {"setup": script.setup_timeout_s, "step": script.step_timeout_s, "checkpointing": script.save_timeout_s}
    return Limits(sections, script.setup_timeout_s)


def with_learned(limits: Limits, learned: Learned, warm: bool) -> Limits:
    """The fixed limits, with learned ones in the place of some; a step's only after the warm-up."""
    known = {name: pair for name, pair in learned.items() if pair[2] and (warm or name != "step")}
    return Limits({**limits.sections, **{n: p[1] for n, p in known.items()}}, limits.out_of_section_s, {n: p[0] for n, p in known.items()})


class Watchman:
    """`step()`: the training of the cycle that runs here. `learned`: the newest limits that this agent has heard of."""

    def __init__(self, agent: Agent, script: Script, step: Callable[[int], LockStep | None]) -> None:
        self.learned: Learned = {}
        self._agent = agent
        self._script = script
        self._step = step
        self._fixed = fixed_limits(script)
        self._detector = Lookout(self._fixed, interval_s=INTERVAL_S)
        self._cycle = -1
        self._looked_at = 0.0
        self._next: Ticket | None = None

    def begin(self, cycle: int, client_known: bool) -> None:
        """Ranks of this cycle have been started."""
        self._cycle = cycle
        self._detector = Lookout(self._fixed, interval_s=INTERVAL_S, client_known=client_known)
        self.look()

    def look(self) -> None:
        """Something may have begun to stand still: look until that is settled."""
        if self._next is not None:
            self._next.cancel()
        self._next = self._agent.life.after(0.0, self._look)

    def hard_s(self, section: str, steps: int) -> float:
        """The limit in force here."""
        return with_learned(self._fixed, self.learned, steps >= WARMUP_STEPS).hard_s(section)

    def _look(self) -> None:
        agent, step = self._agent, self._step(self._cycle)
        self._next = None
        if not agent.live or agent.machine.cycle != self._cycle or agent.machine.phase is not NodePhase.RUNNING or step is None:
            return
        look = self._sample(step)
        self._detector.limits = with_learned(self._fixed, self.learned, look.steps >= WARMUP_STEPS)
        for proc in sorted(agent.nursery.procs.values(), key=lambda p: p.rank):
            if proc.cycle == self._cycle and proc.leaving is None:
                self._observe(proc, look)
        self._looked_at = agent.life.now
        due_ns = self._detector.next_deadline_ns()
        if due_ns is not None and self._script.client and not (step.met and step.steady):
            due_s = (due_ns - agent.host.clock_ns) / 1e9 - agent.life.now
            self._next = agent.life.after(max(INTERVAL_S, due_s), self._look)

    def _observe(self, proc: Proc, look: Look) -> None:
        now, life = self._agent.life.now, self._agent.life
        seen_at = life.frozen_at if life.frozen_at >= self._looked_at else now - INTERVAL_S
        self._detector.saw_nothing_new(proc.rank, self._ns(proc.started_at), self._ns(max(seen_at, proc.started_at)))
        for finding in self._detector.observe(self._ns(now), proc.rank, look, self._ns(proc.started_at)):
            if finding.kind == "hung":
                self._agent.on_hang(self._cycle, _hang(finding))

    def _sample(self, step: LockStep) -> Look:
        page = step.page()
        iteration = step.base + page.steps if page.steps else None
        opened = (Open(page.section, self._ns(page.since), iteration),) if page.section is not None else ()
        ended = {name: Past(self._ns(at)) for name, at in page.ended.items()}
        progress_ns = self._ns(page.progress_at) if page.progress_at is not None else 0
        return Look(self._script.client, iteration, page.steps, progress_ns, opened, ended)

    def _ns(self, at: float) -> int:
        """CLOCK_MONOTONIC of this machine, to the microsecond."""
        return round(at * 1e6) * 1000 + self._agent.host.clock_ns


def _hang(finding: Finding) -> Hang:
    return Hang(finding.rank, finding.section, finding.since_s, finding.limit_s, finding.iteration, finding.reason)
