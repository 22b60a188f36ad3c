"""The node machine: what one agent does with its own ranks.

It follows the job state level-triggered: whatever it missed, comparing what the store says with what runs here gives the next step. It knows its ranks, their
exits, its zygote and its standby store; it never decides who was at fault or whether the job goes on. A rank that ends after the launcher killed it is marked so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ft_launcher.core.actions import (
    KillRanks,
    Leave,
    NodeAction,
    OpenStandby,
    ReadErrors,
    Reap,
    Report,
    Say,
    SetGrace,
    SignalRanks,
    StartRanks,
    StartZygote,
)
from ft_launcher.core.events import (
    ErrorsRead,
    ExceptionStamped,
    GraceExpired,
    HangFound,
    JobChanged,
    NodeEvent,
    NodeUnfit,
    RankEnded,
    RanksReaped,
    RanksStarted,
    SignalArrived,
    StandbyOpened,
    StopUnheard,
    ZygoteDied,
    ZygoteStarted,
)
from ft_launcher.core.evidence import NO_CYCLE, NodeReport, signal_name
from ft_launcher.core.fitness import by_check
from ft_launcher.core.local_ranks import SIGTERM, LocalRanks
from ft_launcher.core.machine import IGNORE, IMPOSSIBLE, Story
from ft_launcher.core.node_table import EDGES, TRANSITIONS, NodePhase
from ft_launcher.core.state import JobState, Phase

STOP_SIGNALS = frozenset({1, 2, 15})
"""HUP, INT and TERM ask for the end; every other signal that the agent catches is only forwarded."""
MAX_ZYGOTE_STARTS = 4
"""A zygote that died this often without ever becoming ready makes the node unfit."""
UNKILLABLE_S = 10.0
"""A rank that has not ended so long after its SIGKILL hangs in the kernel (a driver, a file system): its node cannot be cleared."""
STANDBY_DELAY_S = 1.0
"""A fresh standby store is opened this long after a start, out of the way of the ranks' own start-up."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The node's part of the configuration. `forward_signals`: numbers that are passed on to ranks; seconds elsewhere. `tracker`: the script writes a file of rejected results, in
    which there may be a word of a rank that failed nowhere: its peers left first, and it was ended.
    """

    node_id: str
    generation: int
    forward_signals: frozenset[int] = frozenset()
    error_grace_s: float = 1.0
    survivor_grace_s: float = 0.0
    incarnation: str = ""
    tracker: bool = False
    devices: tuple[str, ...] = ()


class NodeMachine:
    """`handle(now, event) -> actions` is the only mutator."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.phase = NodePhase.IDLE
        self.cycle = NO_CYCLE
        self._ranks = LocalRanks()
        self.report = NodeReport(
            options.node_id, options.generation, NO_CYCLE, reaped=True, incarnation=options.incarnation, devices=options.devices
        )
        self.job: JobState | None = None
        self._revision = -1
        self._zygote_ready = False
        self._zygote_starts = 1
        self._errors_awaited = self._reap_asked = self._reaped = False
        self._forwarded: int | None = None
        self._alone = False
        self._story = Story()

    @property
    def alive(self) -> set[int]:
        """The ranks here whose end has not been heard of."""
        return self._ranks.alive

    def handle(self, now: float, event: NodeEvent) -> list[NodeAction]:
        """Take one event at time `now` (seconds, monotonic) and say what to do, in order. Raises BugError for an impossible one."""
        self._story.tell(now, self.phase, event)
        name = TRANSITIONS[(self.phase, type(event))]
        if name == IGNORE or (getattr(event, "cycle", self.cycle) != self.cycle):
            return []
        if name == IMPOSSIBLE:
            raise self._story.bug(f"node {self.options.node_id}: {type(event).__name__} in phase {self.phase}")
        handler: Callable[[Any], list[NodeAction]] = getattr(self, name)
        return handler(event)

    def _become(self, phase: NodePhase) -> None:
        if phase not in EDGES[self.phase]:
            raise self._story.bug(f"node {self.options.node_id}: {self.phase} cannot become {phase}")
        self.phase = phase

    # -- the job says -------------------------------------------------------------------------------------------------------------

    def on_job(self, event: JobChanged) -> list[NodeAction]:
        """Follow a newer job state; older revisions and generations change nothing."""
        if event.revision <= self._revision or event.job.generation < self.options.generation:
            return []
        self._revision, self.job, self._alone = event.revision, event.job, False
        if event.job.check_overruled and by_check(self.report.unfit):
            self.report = replace(self.report, unfit=None)
        return self._follow()

    def _follow(self) -> list[NodeAction]:
        """Compare what should run here with what does."""
        job = self.job
        if job is None or self.phase is NodePhase.LEFT:
            return []
        if self.phase is NodePhase.RUNNING:
            return self._follow_running(job)
        if self.phase is NodePhase.STOPPING:
            return []
        if job.generation > self.options.generation:
            self._become(NodePhase.LEFT)
            return [
                Say(f"run {job.run_id} was launched anew (generation {job.generation}) while this node was away: leaving", "warning"),
                Leave(0),
            ]
        if job.phase is Phase.DONE:
            return self._leave(job)
        if self._told_to_leave(job) and job.phase not in (Phase.DRAINING, Phase.ENDING):
            self._become(NodePhase.LEFT)
            return [Say(f"node {self.options.node_id} was asked to leave and does; the job goes on"), Leave(0)]
        if job.cycle <= self.cycle or not self._my_ranks(job):
            return []
        if job.phase is not Phase.RUNNING or self.report.unfit is not None:
            return self._skip(job)
        if job.placement is not None and job.placement.nodes[0] == self.options.node_id and job.master != self.report.standby:
            return self._skip(job, platform_fault=f"the store of cycle {job.cycle} ended before the cycle began")
        return self._start(job) if self._zygote_ready else []

    def _skip(self, job: JobState, **found: Any) -> list[NodeAction]:
        """Answer for a cycle that was never started here: there is nothing to clear."""
        self.cycle = job.cycle
        nothing = {"started": False, "exits": {}, "hangs": {}, "progress": {}, "reruns": {}, "platform_fault": None, "reap_s": 0.0}
        return self._say(cycle=job.cycle, reaped=True, **{**nothing, **found})

    def _follow_running(self, job: JobState) -> list[NodeAction]:
        if job.generation > self.options.generation:
            return self._stop()
        if job.cycle == self.cycle and job.phase is Phase.RUNNING:
            return []
        if job.cycle == self.cycle and job.phase is Phase.DRAINING:
            number = job.stop_signal or (job.leave_signal if self._told_to_leave(job) else None)
            return self._forward_stop(number) if number is not None else []
        return [*self._replaced(job), *self._stop()]

    def _replaced(self, job: JobState) -> list[NodeAction]:
        """It has slept, or was out of reach, and finds that the job goes on without it."""
        node = self.options.node_id
        if node not in job.lost and (job.cycle <= self.cycle or self._my_ranks(job)):
            return []
        why = job.lost.get(node, f"it has no place in cycle {job.cycle}")
        return [Say(f"node {node} has been given up while it was away ({why}): ending its ranks of cycle {self.cycle}", "warning")]

    def _told_to_leave(self, job: JobState) -> bool:
        return job.leaving.get(self.options.node_id) == self.options.incarnation

    def _my_ranks(self, job: JobState) -> tuple[int, ...]:
        placement = job.placement
        if placement is None or self.options.node_id not in placement.nodes:
            return ()
        return placement.ranks_on(self.options.node_id)

    def _forward_stop(self, number: int) -> list[NodeAction]:
        """Each rank's own process gets the stop signal once, also where several reach the job."""
        if self._forwarded is not None or not self.alive:
            return []
        self._forwarded = number
        return [SignalRanks(self.cycle, number, sorted(self.alive))]

    def _leave(self, job: JobState) -> list[NodeAction]:
        self._become(NodePhase.LEFT)
        took_part = bool(self._my_ranks(job))
        code = job.verdict.exit_code if job.verdict is not None else 0
        return [Leave(code if took_part or job.placement is None else 0)]

    def _start(self, job: JobState) -> list[NodeAction]:
        self._become(NodePhase.RUNNING)
        self.cycle = job.cycle
        self._ranks = LocalRanks(self._my_ranks(job))
        self._errors_awaited = self._reap_asked = self._reaped = False
        self._forwarded = None
        actions: list[NodeAction] = [StartRanks(job)]
        standby = self.report.standby
        if standby is not None and standby == job.master:
            standby = None
            actions.append(OpenStandby(STANDBY_DELAY_S))
        self.report = NodeReport(
            node_id=self.options.node_id,
            generation=self.options.generation,
            cycle=job.cycle,
            sequence=self.report.sequence,
            standby=standby,
            signals=self.report.signals,
            incarnation=self.options.incarnation,
            devices=self.options.devices,
        )
        return actions

    # -- the ranks' life ------------------------------------------------------------------------------------------------------------

    def on_started(self, event: RanksStarted) -> list[NodeAction]:
        """All ranks of this node have been forked."""
        return self._say(started=True)

    def on_stamp(self, event: ExceptionStamped) -> list[NodeAction]:
        """Evidence for later: who failed first. Not a fault by itself, for a script may call its excepthook and live on."""
        self._ranks.stamped(event)
        return []

    def on_ended(self, event: RankEnded) -> list[NodeAction]:
        """Record an exit, in the order in which they happen; report it unless the whole node is about to be."""
        if event.rank not in self.alive:
            return []
        exit_ = self._ranks.ended(event, order=len(self.report.exits))
        self.report = replace(self.report, exits={**self.report.exits, event.rank: exit_})
        if self.phase is NodePhase.STOPPING:
            return self._reap_when_empty()
        return [*self._say(), *(self._stop() if self._alone and not self.alive else [])]

    def on_hang(self, event: HangFound) -> list[NodeAction]:
        """A confirmed hang is a fault; a rank that ended meanwhile is not hung."""
        if event.hang.rank not in self.alive:
            return []
        return self._say(hangs={**self.report.hangs, event.hang.rank: event.hang})

    def on_unfit(self, event: NodeUnfit) -> list[NodeAction]:
        """A spare is to take this node's place: the controller ends the cycle."""
        return self._say(unfit=event.reason)

    # -- the end of a cycle ---------------------------------------------------------------------------------------------------------

    def _stop(self) -> list[NodeAction]:
        """Kill at once, except those who may still have something to write: earliest failures by exception, and survivors if asked."""
        self._become(NodePhase.STOPPING)
        grace_s = self.options.survivor_grace_s
        spared = set(self.alive) if grace_s > 0 else self._ranks.first_to_fail(self.report.exits)
        grace_s = max(grace_s, self.options.error_grace_s) if spared else UNKILLABLE_S
        actions = self._kill(self.alive - spared)
        if spared and self.options.survivor_grace_s > 0:
            actions.append(SignalRanks(self.cycle, SIGTERM, self._ranks.ask(spared)))
        if self.alive:
            actions.append(SetGrace(self.cycle, grace_s))
        if self.report.standby is None:
            actions.append(OpenStandby(0.0))
        return actions + self._reap_when_empty()

    def _kill(self, ranks: Iterable[int]) -> list[NodeAction]:
        doomed = self._ranks.kill(ranks)
        return [KillRanks(self.cycle, doomed)] if doomed else []

    def on_grace(self, event: GraceExpired) -> list[NodeAction]:
        """Time is up for everybody who is left. Who was killed long ago and is still there cannot be: the reaping will name it."""
        fresh = self._ranks.unkilled
        if fresh:
            return [*self._kill(fresh), SetGrace(self.cycle, UNKILLABLE_S)]
        if self.alive and not self._reap_asked:
            self._ranks = LocalRanks()
            return self._reap_when_empty()
        return []

    def _reap_when_empty(self) -> list[NodeAction]:
        if self.alive or self._reap_asked:
            return []
        self._reap_asked = True
        failed = [e.rank for e in self.report.exits.values() if e.failure]
        self._errors_awaited = bool(failed) or self.options.tracker
        ask: list[NodeAction] = [ReadErrors(self.cycle, failed)] if self._errors_awaited else []
        return [*ask, Reap(self.cycle)]

    def on_errors(self, event: ErrorsRead) -> list[NodeAction]:
        """Attach last words to the exits."""
        self._errors_awaited = False
        exits = {r: replace(e, error=event.errors.get(r, e.error)) for r, e in self.report.exits.items()}
        self.report = replace(self.report, exits=exits, reruns={**event.reruns, **self.report.reruns})
        return self._acknowledge()

    def on_reaped(self, event: RanksReaped) -> list[NodeAction]:
        """Nothing is left, or what is left cannot be killed: then the node is unfit."""
        unfit = f"processes {list(event.left)} cannot be killed" if event.left else event.unfit or self.report.unfit
        reruns = {**self.report.reruns, **event.reruns}
        self._reaped = True
        self.report = replace(self.report, reap_s=event.seconds, progress=dict(event.progress), reruns=reruns, unfit=unfit)
        return self._acknowledge()

    def _acknowledge(self) -> list[NodeAction]:
        """Once nothing is left and all words are read: a report that says so is final, and judged."""
        if not self._reaped or self._errors_awaited:
            return []
        self.report = replace(self.report, reaped=True)
        self._become(NodePhase.IDLE)
        return [*self._say(), *(self._leave_alone() if self._alone else self._follow())]

    # -- zygote and standby store -----------------------------------------------------------------------------------------------------

    def on_zygote_started(self, event: ZygoteStarted) -> list[NodeAction]:
        """Warm: a cycle may start here as soon as a store listens."""
        self._zygote_ready, self._zygote_starts = True, 0
        opening: list[NodeAction] = [OpenStandby(0.0)] if self.report.standby is None else []
        return [*opening, *self._follow()]

    def on_zygote_died(self, event: ZygoteDied) -> list[NodeAction]:
        """Its ranks and its standby store ended with it: a platform fault when ranks ran, and a new zygote in any case."""
        self._zygote_ready = False
        fault = event.reason if self.alive else self.report.platform_fault
        exits = dict(self.report.exits) | {e.rank: e for e in self._ranks.vanished(order=len(self.report.exits))}
        self.report = replace(self.report, exits=exits, platform_fault=fault, standby=None)
        reaping = self._reap_when_empty() if self.phase is NodePhase.STOPPING else []
        return [*self._restart_zygote(event.reason), *reaping, *self._say()]

    def _restart_zygote(self, reason: str) -> list[NodeAction]:
        self._zygote_starts += 1
        if self._zygote_starts > MAX_ZYGOTE_STARTS:
            self.report = replace(self.report, unfit=f"the zygote does not start: {reason}")
            return [Say(f"node {self.options.node_id} is unfit: {self.report.unfit}", "error"), *self._follow()]
        return [StartZygote(reason)]

    def on_standby(self, event: StandbyOpened) -> list[NodeAction]:
        """The next cycle's store listens; whoever waits for it must know."""
        return self._say(standby=event.address)

    # -- signals ------------------------------------------------------------------------------------------------------------------------

    def on_signal(self, event: SignalArrived) -> list[NodeAction]:
        """Stop signals are the controller's to weigh; the others go to each rank's own process, once."""
        if event.signal in STOP_SIGNALS and self._spare():
            self._become(NodePhase.LEFT)
            ends = self.job is not None and (self.job.stop_signal is not None or self.job.verdict is not None)
            job = "the job is being stopped" if ends else "the job goes on"
            return [Say(f"{signal_name(event.signal)}: node {self.options.node_id} holds no ranks and leaves; {job}"), Leave(0)]
        if event.signal in STOP_SIGNALS:
            told = self._say(signals=(*self.report.signals, event.signal))
            impatient = self.phase is NodePhase.STOPPING and len(self.report.signals) > 1
            return [*told, *(self._kill(self._ranks.unkilled) if impatient else [])]
        if event.signal in self.options.forward_signals and self.alive and self.phase is NodePhase.RUNNING:
            return [SignalRanks(self.cycle, event.signal, sorted(self.alive))]
        return []

    def on_unheard(self, event: StopUnheard) -> list[NodeAction]:
        """Whatever the job decided, ranks here would get the signal: so they do, and this node leaves when they have. A word of the job ends that."""
        if not self.report.signals:
            return []
        again = self._alone and (event.overdue or len(self.report.signals) > 1)
        self._alone = True
        if self.phase is NodePhase.IDLE:
            return self._leave_alone()
        if self.phase is NodePhase.STOPPING:
            return []
        if again or not self.alive:
            return self._stop()
        return self._forward_stop(self.report.signals[0])

    def _leave_alone(self) -> list[NodeAction]:
        number = self.report.signals[0]
        self._become(NodePhase.LEFT)
        return [
            Say(f"{signal_name(number)}: node {self.options.node_id} leaves; the others could not be told", "warning"),
            Leave(128 + number),
        ]

    def _spare(self) -> bool:
        """The job has been given its nodes, and this is none of them."""
        job = self.job
        return self.phase is NodePhase.IDLE and job is not None and job.placement is not None and not self._my_ranks(job)

    def _say(self, **changes: Any) -> list[NodeAction]:
        self.report = replace(self.report, **changes, sequence=self.report.sequence + 1)
        return [Report(self.report)]
