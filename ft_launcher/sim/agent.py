"""The fake agent: the production node machine, fed and obeyed as `shell/agent.py` does it.

Events are handled in the order in which they came, those that arise meanwhile after; reports are cumulative and the newest is sent; the standby
stores follow `shell/standbys.py`. It decides nothing. A stalled agent handles late what came in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ft_launcher.core import actions as do
from ft_launcher.core import events as ev
from ft_launcher.core.evidence import Address, Hang, RankError, RankProgress
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import JobState
from ft_launcher.sim.clock import Clock, Life, Ticket
from ft_launcher.sim.host import Host
from ft_launcher.sim.nursery import Exit, Nursery, Proc

ERRORS_WAIT_S = 1.0


class Surroundings(Protocol):
    """What an agent touches of the world. Everything it tells comes with itself as `agent`."""

    clock: Clock

    def before_action(self, agent: Agent, action: do.NodeAction) -> None:
        """An action is about to be carried out: checked and noted."""

    def handled(self, agent: Agent, event: ev.NodeEvent, actions: Sequence[do.NodeAction]) -> None:
        """The node machine has answered."""

    def send_report(self, agent: Agent) -> None:
        """There is a newer report."""

    def ranks_forked(self, agent: Agent, cycle: int) -> None:
        """Its ranks run."""

    def rank_gone(self, agent: Agent, proc: Proc, how: Exit) -> None:
        """One of its processes has ended."""

    def progress_of(self, agent: Agent, ranks: Sequence[int]) -> dict[int, RankProgress]:
        """Where the ranks of its cycle are."""

    def findings_of(self, agent: Agent, cycle: int, on_pages: bool) -> dict[int, RerunFinding]:
        """What its ranks' rerun machines said, on their pages or in the tracker file."""

    def words_lost(self, found: dict[int, RerunFinding]) -> None:
        """What the tracker file says could not be read in time."""

    def read_errors_s(self) -> float:
        """How long the error files take to read this time."""

    def zygote_changed(self, agent: Agent) -> None:
        """It can start ranks, or cannot at the moment."""

    def left(self, agent: Agent, code: int) -> None:
        """It has ended."""

    def store_opened(self, agent: Agent, address: Address) -> None:
        """A standby store listens."""

    def stores_closed(self, agent: Agent, addresses: Sequence[Address]) -> None:
        """Standby stores are gone."""


class Agent:
    """One node's agent, from its start until it has left or its machine is gone. `life`: its own time; `limits` are what it has been told of timeouts."""

    def __init__(self, around: Surroundings, host: Host, nursery: Nursery, options: NodeOptions) -> None:
        self.host = host
        self.nursery = nursery
        self.machine = NodeMachine(options)
        self.gone = False
        self.exit_code: int | None = None
        self.life = Life(around.clock)
        self.incarnation = options.incarnation
        self.standbys = Standbys(around, self)
        self._around = around
        self._events: deque[ev.NodeEvent] = deque()
        self._feeding = False
        self._master: Address | None = None
        self.ranks: Sequence[int] = ()
        self.reading: int | None = None
        """The cycle of which words are still being read."""
        nursery.listen(self)

    @property
    def name(self) -> str:
        """The node id."""
        return self.host.name

    @property
    def live(self) -> bool:
        """It runs: neither left nor lost."""
        return not self.gone and self.exit_code is None

    # -- events in, actions out -----------------------------------------------------------------------------------------------------------

    def feed(self, event: ev.NodeEvent) -> None:
        """Give the machine an event; while stalled or busy, it waits its turn."""
        if not self.live:
            return
        self._events.append(event)
        self.pump()

    def stall(self, seconds: float) -> None:
        """Handle nothing for a while."""
        self.life.freeze(seconds)
        self._around.clock.at(self.life.until, self.pump)

    def pump(self) -> None:
        """Handle what waits, unless stalled."""
        if self._feeding or not self.life.awake:
            return
        self._feeding = True
        try:
            while self._events and self.live:
                event = self._events.popleft()
                actions = self.machine.handle(self._around.clock.now, event)
                self._around.handled(self, event, actions)
                for action in actions:
                    self._do(action)
        finally:
            self._feeding = False

    def _do(self, action: do.NodeAction) -> None:
        self._around.before_action(self, action)
        match action:
            case do.Report():
                self._around.send_report(self)
            case do.StartRanks():
                self._start(action.job)
            case do.KillRanks():
                self.nursery.kill(action.cycle, action.ranks)
            case do.SignalRanks():
                self.nursery.signal(action.cycle, action.ranks or (), action.signal)
            case do.Reap():
                self.nursery.reap(action.cycle)
            case do.Leave():
                self._leave(action.exit_code)
            case _:
                self._do_later(action)

    def _do_later(self, action: do.NodeAction) -> None:
        """The actions whose answer comes as an event."""
        match action:
            case do.OpenStandby():
                self.standbys.request(action.delay_s)
            case do.StartZygote():
                self.nursery.start()
            case do.ReadErrors():
                self._read_errors(action.cycle)
            case do.SetGrace():
                self.life.after(action.delay_s, self.feed, ev.GraceExpired(action.cycle))
            case _:
                pass

    def _start(self, job: JobState) -> None:
        if job.placement is not None:
            self.ranks = job.placement.ranks_on(self.name)
            self._master = job.master
            self.nursery.fork(job.cycle, self.ranks)

    def _read_errors(self, cycle: int) -> None:
        """What the ranks said of themselves; a stalled disk costs the words, not the restart."""
        takes_s = min(self._around.read_errors_s(), ERRORS_WAIT_S)
        errors = {e.rank: RankError(e.stamp or "") for e in self.machine.report.exits.values() if e.failure and takes_s < ERRORS_WAIT_S}
        found = self._around.findings_of(self, cycle, on_pages=False)
        if takes_s >= ERRORS_WAIT_S:
            self._around.words_lost(found)
            found = {}
        self.reading = cycle
        self.life.after(takes_s, self._have_read, ev.ErrorsRead(cycle, errors, found))

    def _have_read(self, event: ev.ErrorsRead) -> None:
        self.reading = None
        self.feed(event)

    def _leave(self, code: int) -> None:
        self.exit_code = code
        self.nursery.close()
        self.standbys.close()
        self._around.left(self, code)
        self.life.end()

    def vanish(self) -> None:
        """The agent is gone without a word, everything below it, too."""
        self.gone = True
        self.life.end()
        self.nursery.close()
        self.standbys.close()

    # -- what the nursery tells -----------------------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """A zygote can fork."""
        self.standbys.use(True)
        self._around.zygote_changed(self)
        self.feed(ev.ZygoteStarted())

    def on_standby(self, token: int, port: int | None) -> None:
        """A standby store listens, or there will be none."""
        self.standbys.answered(token, port)

    def on_forked(self, cycle: int, ranks: Sequence[int]) -> None:
        """All ranks of this node run."""
        self.feed(ev.RanksStarted(cycle))
        self._around.ranks_forked(self, cycle)

    def on_stamp(self, proc: Proc, at_ns: int, text: str) -> None:
        """An exception was read off a rank's page."""
        self.feed(ev.ExceptionStamped(proc.cycle, proc.rank, at_ns, text))

    def on_ended(self, proc: Proc, how: Exit, told: bool) -> None:
        """A process has ended; `told` False: nobody was left to tell of it."""
        if told:
            self.feed(ev.RankEnded(proc.cycle, proc.rank, how.code, how.signal, self.nursery.now_ns()))
        self._around.rank_gone(self, proc, how)

    def on_reaped(self, cycle: int, left: tuple[int, ...], seconds: float) -> None:
        """Nothing of the cycle is left here, but for `left`."""
        progress = self._around.progress_of(self, self.ranks)
        self.standbys.release_used(self._master)
        self.feed(ev.RanksReaped(cycle, left, seconds, progress, self._around.findings_of(self, cycle, on_pages=True)))

    def on_lost(self, reason: str) -> None:
        """The zygote is gone."""
        self.standbys.use(False)
        self._around.zygote_changed(self)
        self.feed(ev.ZygoteDied(reason))

    def on_hang(self, cycle: int, hang: Hang) -> None:
        """The detector has confirmed a hang."""
        self.feed(ev.HangFound(cycle, hang))


class Standbys:
    """The stores that wait for coming cycles: asked of the zygote, opened, used for one cycle, released (`shell/standbys.py`)."""

    def __init__(self, around: Surroundings, agent: Agent) -> None:
        self._around = around
        self._agent = agent
        self._serving = False
        self._token = 0
        self._wanted: int | None = None
        self._open: list[Address] = []
        self._timer: Ticket | None = None

    def use(self, serving: bool) -> None:
        """A new zygote serves from now on, or there is none; what the old one had opened is gone."""
        self._serving, self._wanted = serving, None
        self._around.stores_closed(self._agent, self._open)
        self._open = []

    def close(self) -> None:
        """All of them end with the agent."""
        self.use(False)
        if self._timer is not None:
            self._timer.cancel()

    def request(self, delay_s: float) -> None:
        """Have a store opened, `delay_s` from now; an earlier request that is still waiting is moved."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s > 0:
            self._timer = self._agent.life.after(delay_s, self.request, 0.0)
        elif self._serving and self._wanted is None:
            self._token += 1
            self._wanted = self._token
            self._agent.nursery.prepare_standby(self._token)

    def answered(self, token: int, port: int | None) -> None:
        """The store of this token listens, or (no port) a free one is offered and rank 0 will host it."""
        if token != self._wanted:
            return
        self._wanted = None
        boot = 100_000 * self._agent.host.boots
        address = Address(self._agent.name, boot + (port if port is not None else token), serving=port is not None)
        if address.serving:
            self._open.append(address)
            self._around.store_opened(self._agent, address)
        self._agent.feed(ev.StandbyOpened(address))

    def release_used(self, used: Address | None) -> None:
        """The cycle that met there is over."""
        if used in self._open:
            self._open.remove(used)
            self._around.stores_closed(self._agent, [used])
