"""The agent: one per node. Feeds the node machine with what happens here and carries out its actions.

It owns the zygote, the section pages, the standby stores and the node's report; the event loop is its only thread of control. It never imports torch, never touches
storage from the loop, and decides nothing: that is the node machine's, and for the job the controller's.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ft_launcher.config import Config
from ft_launcher.core import actions as do
from ft_launcher.core.events import (
    ErrorsRead,
    GraceExpired,
    JobChanged,
    NodeEvent,
    NodeUnfit,
    ProgressSeen,
    RankEnded,
    RanksReaped,
    RanksStarted,
    SignalArrived,
    StandbyOpened,
    ZygoteDied,
    ZygoteStarted,
)
from ft_launcher.core.evidence import NodeReport, RankError
from ft_launcher.core.node import STOP_SIGNALS, NodeMachine, NodeOptions
from ft_launcher.core.node_table import NodePhase
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import JobState
from ft_launcher.errors import PlatformError
from ft_launcher.shell.follow import UNREACHABLE, follow
from ft_launcher.shell.forgotten import forgotten, store_forgot
from ft_launcher.shell.health_clearing import Clearing
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.limits import limits_in
from ft_launcher.shell.logs import LogTail
from ft_launcher.shell.lookout import Lookout
from ft_launcher.shell.nursery import Nursery
from ft_launcher.shell.nvrx_requests import NvrxRequests
from ft_launcher.shell.nvrx_server import NvrxServer
from ft_launcher.shell.process import RankStarted
from ft_launcher.shell.rank_files import RankFiles
from ft_launcher.shell.record import Files
from ft_launcher.shell.rejected_results import on_pages
from ft_launcher.shell.reporter import Reporter
from ft_launcher.shell.shadow import Shadow
from ft_launcher.shell.slips import Slips
from ft_launcher.shell.standbys import Standbys
from ft_launcher.shell.stop_request import StopRequest
from ft_launcher.shell.store import Store
from ft_launcher.shell.watchman import Reactions, Watchman
from monitors.detect import Finding, Limits
from monitors.hooks import STACKS_SIGNAL
from monitors.learning import Sample

SAMPLES_EVERY_S = AGAIN_S = 1.0
AFTERWARDS_S = 0.5
"""What is not urgent is done so long after a cycle's end, when the next ranks have started."""


@dataclass(frozen=True, slots=True)
class Tell:
    """The controller, wherever it is: progress; (cycle, samples); and (cycle, seconds) of a rank that has stood still so long, for the other nodes to look at theirs."""

    progress: Callable[[ProgressSeen], None]
    samples: Callable[[int, list[Sample]], None]
    suspicion: Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an agent works with. `tell` is the controller's ear; `in_touch` tells whether the job is known to go on elsewhere while the store is away, which `away` tells."""

    config: Config
    store: Store
    keys: Keys
    files: Files
    tail: LogTail | None
    tell: Tell
    in_touch: Callable[[], bool] = lambda: False
    clearing: Clearing = field(default_factory=Clearing)
    away: Callable[[], bool] = lambda: False


class Agent:
    """`run()` returns the exit code of this agent. `hosts`: the address that others reach this node by, and the one to listen on ("": all)."""

    def __init__(self, around: Surroundings, nursery: Nursery, options: NodeOptions, hosts: tuple[str, str]) -> None:
        config = around.config
        self._around = around
        self._machine = NodeMachine(options)
        self._options = options
        self._nursery = nursery
        self._standbys = Standbys(*hosts, lambda address: self.feed(StandbyOpened(address)), self._warn)
        limits = Limits(config.timeouts.sections, config.timeouts.out_of_section_s)
        reactions = Reactions(self.feed, around.tell.progress, self._on_finding)
        requests = NvrxRequests(self._machine, self.feed, self._warn, around.files.journal)
        self._nvrx = NvrxServer(limits, requests.told(around.store, around.keys))
        self._watch = Watchman(config.node_id, limits, reactions, hang_kills=config.hang_action == "restart", nvrx=self._nvrx)
        self._watch.elsewhere = around.clearing.iteration
        self._lookout = Lookout(self._watch, around.files, lambda cycle, ranks: nursery.signal(cycle, ranks, STACKS_SIGNAL))
        self._rank_files = RankFiles(config, around.files)
        self._slips = Slips(self._warn)
        self._shadow = Shadow(config.topology, lambda: self.knows, self._watch.progress, self._warn)
        self._stop = StopRequest(around.away, self.feed, config.term_grace_s)
        self._events: deque[NodeEvent] = deque()
        self._feeding = False
        self._pids: dict[int, int] = {}
        self._forked: tuple[int, frozenset[int]] = (-1, frozenset())
        self._left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._report: asyncio.Event = asyncio.Event()

    # -- life ---------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Follow the job until it is done; the ranks, the zygote and everything below are gone when this returns."""
        self._nursery.listen(self)
        follow = (self._follow_job(), self._follow_limits(), self._check_health())
        tell = (self._send_reports(), self._tell_samples(), self._stop.insist())
        tasks = [asyncio.create_task(work) for work in (*follow, *tell)]
        for task in tasks:
            task.add_done_callback(self._on_task_done)
        self._nursery.start()
        try:
            return await self._left
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._nursery.close()
            finally:
                self._around.clearing.close()
                self._watch.close()
                self._nvrx.close()

    def busy(self) -> bool:
        """Whether this node holds ranks."""
        job = self._machine.job
        return job is not None and job.placement is not None and self._options.node_id in job.placement.nodes

    @property
    def knows(self) -> tuple[JobState | None, NodeReport]:
        """The job as this node last heard of it, and what it has to say of it."""
        return self._machine.job, self._machine.report

    def training(self) -> bool:
        """Whether ranks run here, and nothing is known against them."""
        report = self._machine.report
        trouble = report.exits or report.hangs or report.platform_fault or report.unfit or report.signals
        return self._machine.phase is NodePhase.RUNNING and not trouble

    def look(self, cycle: int, since_s: float) -> None:
        """A rank of another node has stood still for so long: what do ours that stand still, too?"""
        if cycle == self._machine.cycle:
            self._lookout.look(since_s)

    def set_lease(self, deadline_s: float) -> None:
        """Until when the node's lease is known to hold, for the ranks' `commit_allowed()`."""
        self._watch.set_lease(deadline_s)

    def fail(self, error: BaseException) -> None:
        """Something that must not end has ended: the agent ends too, and says why through the exception."""
        if not self._left.done():
            self._left.set_exception(error)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _follow_job(self) -> None:
        """Every version of the job state, in order (after a reset the newest one). Healthy ranks wait for the store without end."""
        async for batch in follow(self._around.store, self._around.keys.job, lambda: self.training() or self._around.in_touch()):
            entries = [change.entry for change in batch.changes if change.entry is not None]
            if (batch.reset or entries) and (error := forgotten(self._machine.job, entries[-1] if entries else None)) is not None:
                while self.training():
                    await asyncio.sleep(AGAIN_S)
                raise error
            for entry in entries:
                self._on_job(JobState.from_json(json.loads(entry.value)), entry.modified)

    def _on_job(self, job: JobState, revision: int) -> None:
        self.feed(JobChanged(job, revision))
        if job.check_overruled:
            self._around.clearing.overrule()
        if self._last_cycle():
            self._around.clearing.cut()

    def _last_cycle(self) -> bool:
        """The job is known to end: no further cycle will start."""
        job = self._machine.job
        return job is not None and (job.finished or job.stop_signal is not None or job.verdict is not None)

    async def _check_health(self) -> None:
        """Before the first cycle, and for as long as this node holds no ranks."""

        def next_cycle() -> int | None:
            job, idle = self._machine.job, self._machine.phase is NodePhase.IDLE and not self.busy()
            return job.cycle + 1 if idle and job is not None else None

        await self._around.clearing.begin(lambda why: self.feed(NodeUnfit(self._machine.cycle, why)), next_cycle)

    async def _tell_samples(self) -> None:
        """Once a second: how long this node's ranks took for what they did, and under which names."""
        while True:
            await asyncio.sleep(SAMPLES_EVERY_S)
            self._slips.look(*self._watch.names_of(0))
            if self._around.config.learn_timeouts and (samples := self._watch.samples()):
                self._around.tell.samples(self._machine.cycle, samples)

    async def _follow_limits(self) -> None:
        """Learned limits hold from the moment they are published."""
        if not self._around.config.learn_timeouts:
            return
        async with aclosing(follow(self._around.store, self._around.keys.limits, lambda: True)) as found:
            async for batch in found:
                newest = batch.changes[-1].entry if batch.changes else None
                self._watch.set_learned(limits_in(newest.value) if newest is not None else {})

    async def _send_reports(self) -> None:
        """Reports are cumulative: only the newest needs to arrive. One that nobody has to act upon can wait for a store that is away."""
        store, keys = self._around.store, self._around.keys
        reporter = Reporter(store, keys.report(self._options.node_id), lambda: store_forgot(store, keys.job, self._machine.job))
        while True:
            await self._report.wait()
            self._report.clear()
            try:
                report = self._machine.report
                await reporter.send(report)
                self._stop.delivered(report.signals)
            except PlatformError as error:
                if error.exit_code != UNREACHABLE or not self.training():
                    raise
                self._report.set()
                await asyncio.sleep(AGAIN_S)

    # -- events in, actions out -----------------------------------------------------------------------------------------------------------

    def feed(self, event: NodeEvent) -> None:
        """Give the machine an event and carry out what it says; events that arise meanwhile are handled after, in order."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                now = asyncio.get_running_loop().time()
                for action in self._machine.handle(now, self._events.popleft()):
                    self._do(action)
        except Exception as error:  # noqa: BLE001 - the loop's boundary: the agent ends with it
            self.fail(error)
        finally:
            self._feeding = False

    def on_signal(self, number: int) -> None:
        """A signal has reached the agent process."""
        self._around.files.journal.record("signal", self._machine.cycle, signal=number)
        self.feed(SignalArrived(number))
        if number in STOP_SIGNALS:
            self._stop.arrived.set()

    def _do(self, action: do.NodeAction) -> None:
        match action:
            case do.Report():
                self._report.set()
            case do.StartRanks():
                self._start(action.job)
            case do.KillRanks():
                self._lookout.before_kill()
                self._watch.revoke()
                self._nursery.kill(action.cycle, action.ranks)
            case do.SignalRanks():
                self._nursery.signal(action.cycle, action.ranks, action.signal)
            case do.Reap():
                self._nursery.reap(action.cycle)
            case do.Leave():
                self._leave(action.exit_code)
            case _:
                self._do_later(action)

    def _do_later(self, action: do.NodeAction) -> None:
        """The actions whose answer comes as an event."""
        match action:
            case do.OpenStandby():
                self._standbys.request(action.delay_s)
            case do.StartZygote():
                self._warn(f"starting a new zygote: {action.why}")
                self._nursery.restart()
            case do.ReadErrors():
                self._read_errors(action.cycle, action.ranks)
            case do.SetGrace():
                asyncio.get_running_loop().call_later(action.delay_s, self.feed, GraceExpired(action.cycle))
            case do.Say():
                self._around.files.console.say(action.text, action.level)
            case _:
                raise TypeError(f"no way to carry out {action!r}")

    def _leave(self, code: int) -> None:
        if not self._left.done():
            self._left.set_result(code)

    # -- ranks ------------------------------------------------------------------------------------------------------------------------------

    def _start(self, job: JobState) -> None:
        placement = job.placement
        if placement is None:
            return
        ranks = placement.ranks_on(self._options.node_id)
        sockets = self._nvrx.open(job.cycle, ranks)
        pages = self._watch.open_pages(job.cycle, ranks, job.budgets.client_known)
        self._standbys.in_use, self._pids = job.master, {}
        self._lookout.begin(job.cycle, self._pids)
        self._forked = (job.cycle, frozenset(ranks))
        plans = self._rank_files.plan(job, placement, pages, sockets)
        self._around.clearing.started()
        self._nursery.fork(job.cycle, plans)
        self._around.files.journal.record("started", job.cycle, ranks=list(ranks))
        if self._around.tail is not None:
            self._around.tail.follow(self._rank_files.shown(job.cycle, ranks))

    def _read_errors(self, cycle: int, ranks: Sequence[int]) -> None:
        def answer(errors: dict[int, RankError], reruns: dict[int, RerunFinding]) -> None:
            self.feed(ErrorsRead(cycle, errors, reruns))

        self._rank_files.read_words(cycle, ranks, answer)

    # -- what the nursery tells ---------------------------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """A zygote can fork ranks."""
        self._standbys.use(self._nursery.prepare_standby, self._nursery.release_standby)
        self._around.clearing.when_open(lambda: self.feed(ZygoteStarted()) if self._nursery.ready else None)

    def on_standby(self, token: int, port: int | None, reason: str) -> None:
        """A standby store listens, or (no port) there will be none."""
        if port is not None:
            self._standbys.ready(token, port)
        else:
            self._standbys.failed(token, reason)

    def on_rank_started(self, started: RankStarted) -> None:
        """One rank's process exists; once all do, the machine is told."""
        self._watch.started(started.rank, started.at_ns, started.pid)
        self._nvrx.started(started.rank, started.pid)
        self._pids[started.rank] = started.pid
        if (started.cycle, frozenset(self._pids)) == self._forked:
            self._around.files.journal.record("forked", started.cycle, pids=dict(self._pids))
            self.feed(RanksStarted(started.cycle))

    def on_rank_ended(self, event: RankEnded) -> None:
        """One rank's process has ended; what it stamped is read first, so that it is known who failed when."""
        self._nvrx.ended(event.rank)
        self._watch.ended(event.rank)
        how = {"code": event.code} if event.signal is None else {"signal": event.signal}
        self._around.files.journal.record("ended", event.cycle, rank=event.rank, at_ns=event.at_ns, **how)
        self.feed(event)

    def on_reaped(self, cycle: int, left: tuple[int, ...], seconds: float) -> None:
        """Nothing of the cycle is left here."""
        self._slips.look(*self._watch.names_of(0))
        progress, reruns = self._watch.progress(), on_pages(self._watch.pages())
        self._watch.close()
        self._lookout.end()
        self._nvrx.close_cycle()
        self._standbys.release_used(AFTERWARDS_S)
        if self._around.tail is not None:
            self._around.tail.end_cycle()
        self._around.clearing.after(RanksReaped(cycle, left, seconds, progress, reruns), self._last_cycle(), self.feed)

    def on_lost(self, reason: str) -> None:
        """The zygote is gone and everything below it with it."""
        self._standbys.use(None, None)
        self.feed(ZygoteDied(reason))

    def on_note(self, text: str) -> None:
        """Something about the start-up that people should read."""
        self._warn(text)

    def _warn(self, text: str) -> None:
        self._around.files.console.say(text, "warning")
        self._around.files.journal.record("note", self._machine.cycle, text=text)

    def _on_finding(self, finding: Finding) -> None:
        """Hangs become events elsewhere; everything is in the journal, and what would have been a kill is said in shadow mode."""
        fields = {"section": finding.section, "since_s": round(finding.since_s, 3), "limit_s": finding.limit_s, "reason": finding.reason}
        self._around.files.journal.record(f"finding-{finding.kind}", self._machine.cycle, rank=finding.rank, **fields)
        if self._lookout.on_finding(finding):
            self._around.tell.suspicion(self._machine.cycle, finding.since_s)
        if finding.kind == "hung" and self._around.config.hang_action == "log":
            self._shadow.found(finding)
        elif finding.kind == "silent":
            self._around.files.console.say(finding.reason, "warning")
