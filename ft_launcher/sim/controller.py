"""The fake controller's shell: the production job machine, fed and obeyed as `shell/controller.py` does it, in whichever agent holds the office.

One queue; a commit takes its time and everything behind it waits: the later actions of the same decision, and the events that came meanwhile. A commit that fails ends it. It lives
in its agent's time: frozen with it, gone with it, in the middle of whatever it did. It keeps the journal of what the machine was given, so that it can be replayed. It decides nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ft_launcher.core.actions import Commit, JobAction, SetTimer
from ft_launcher.core.events import DrainAsked, JobEvent, NodeJoined, NodeLost, ProgressSeen, ReportReceived, Timer, TimerFired
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.clock import Life, Ticket
from ft_launcher.sim.etcd import Entry, Etcd, Watch
from ft_launcher.sim.host import Host
from ft_launcher.sim.liaison import Liaison


class Desk(Protocol):
    """What a controller touches of the world. It says who it is with itself as first argument."""

    store: Etcd
    alone: bool

    def fresh_machine(self, state: JobState) -> JobMachine:
        """A job machine that goes on from this state."""

    def first_state(self) -> JobState:
        """The state of a launch that has none."""

    def judged(self, controller: Controller, before: JobState, event: JobEvent, actions: Sequence[JobAction]) -> Callable[[], None]:
        """The job machine has answered. To be called when what it decided is in the store."""

    def committed(self, controller: Controller, job: JobState) -> None:
        """The job state is durable."""

    def performed(self, action: JobAction) -> None:
        """Something to say or to record."""

    def controller_ended(self, controller: Controller, why: str) -> None:
        """It has been deposed."""

    def store_unreachable(self, controller: Controller) -> None:
        """It has waited for `--store-timeout` in vain."""


class Controller:
    """`term`: the created revision of its office. `commits`: all it tried to write; `heard`: node -> (incarnation, sequence) of the newest report it was given.

    `step_heard`: when the newest step that it has been told of was begun; `unleased`: since when it has known of a node without a lease."""

    def __init__(self, desk: Desk, host: Host, life: Life, term: int) -> None:
        self.host = host
        self.term = term
        self.journal: list[tuple[float, JobEvent]] = []
        self.commits: list[JobState] = []
        self.heard: dict[str, tuple[str, int]] = {}
        self.began_at = life.now
        self.step_heard = -math.inf
        self.unleased: dict[str, float] = {}
        self.closed = False
        self.loaded = False
        self._desk = desk
        self._life = life
        self._machine: JobMachine | None = None
        self._first: JobState | None = None
        self._liaison: Liaison | None = None
        self._job_revision = 0
        self._queue: deque[JobEvent] = deque()
        self._timers: dict[Timer, Ticket] = {}
        self._watches: list[Watch] = []
        self._busy = False

    @property
    def machine(self) -> JobMachine:
        """The production machine, once the state is read."""
        if self._machine is None:
            raise RuntimeError("no job state was loaded")
        return self._machine

    @property
    def first(self) -> JobState:
        """What it found."""
        return self._first if self._first is not None else self.machine.state

    @property
    def liaison(self) -> Liaison:
        """Its ears."""
        if self._liaison is None:
            raise RuntimeError("nobody listens for this controller")
        return self._liaison

    def listen(self, liaison: Liaison) -> None:
        """Set its ears, before `begin`."""
        self._liaison = liaison

    @property
    def done(self) -> bool:
        """The verdict stands, as far as it knows."""
        return self._machine is not None and self._machine.state.phase is Phase.DONE

    def _call(self, effect: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        life = self._life
        self._desk.store.call(self.host, effect, lambda result: life.soon(self._unless_closed, answer, result), self._give_up)

    def _give_up(self) -> None:
        self._life.soon(self._desk.store_unreachable, self)

    def _unless_closed(self, answer: Callable[[Any], None], result: Any) -> None:
        if not self.closed:
            answer(result)

    # -- taking over ------------------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Continue from the job key."""
        self._call(lambda: self._desk.store.keys.get("job"), self._load)

    def _load(self, entry: Entry | None) -> None:
        known: JobState = entry.value if entry is not None else self._desk.first_state()
        self._job_revision = entry.modified if entry is not None else 0
        self._first = known
        self._machine = self._desk.fresh_machine(known)
        self.began_at = self._life.now
        self._carry_out([Commit(known), *self.machine.begin(self.began_at)], lambda: None, self._list_nodes)

    def _list_nodes(self) -> None:
        self._call(lambda: self._list_and_watch("nodes/", self._on_node), self._nodes_listed)

    def _list_and_watch(self, prefix: str, told: Callable[[str, Entry | None, int], None]) -> list[tuple[str, Entry]]:
        """As an effect: nothing is missed between the list and its watch."""
        self._watch(prefix, told)
        return self._desk.store.under(prefix)

    def _watch(self, prefix: str, told: Callable[[str, Entry | None, int], None]) -> None:
        if not self.closed:
            watch = self._desk.store.watch(self.host, prefix, lambda *change: self._life.soon(self._heard, told, *change))
            self._watches.append(watch)

    def _heard(self, told: Callable[..., None], *change: Any) -> None:
        if not self.closed:
            told(*change)

    def _nodes_listed(self, found: list[tuple[str, Entry]]) -> None:
        for key, entry in found:
            self._on_node(key, entry, 0)
        self.look_for_missing({key.removeprefix("nodes/") for key, _ in found})
        self._call(lambda: self._list_and_watch("reports/", self._on_report), self._reports_listed)

    def look_for_missing(self, registered: set[str]) -> None:
        """Nodes that hold ranks and have no registration: nobody else will ever speak of them."""
        job = self.first
        for name in job.placement.nodes if job.placement is not None and job.phase is not Phase.DONE else ():
            if name in registered or name in job.lost:
                continue
            if self._desk.alone:
                self.offer(NodeLost(name, "it is not registered"))
            else:
                self.unleased[name] = self._life.now
                self.liaison.missing(
                    NodeInfo(name, job.addresses.get(name, ""), 0, job.generation, incarnation=job.incarnations.get(name, ""))
                )

    def _reports_listed(self, found: list[tuple[str, Entry]]) -> None:
        self._on_reports(found)
        self.loaded = True
        if not self._desk.alone:
            self._call(lambda: self._list_and_watch("drains/", self._on_drain), self._drains_listed)
        self._call(lambda: self._list_and_watch("leader", self._on_office), self._office_listed)
        self._pump()

    def _drains_listed(self, found: list[tuple[str, Entry]]) -> None:
        for key, entry in found:
            self._on_drain(key, entry, 0)

    def _on_drain(self, key: str, entry: Entry | None, revision: int) -> None:
        """Somebody wants a node out; a successor hears of it, too, which changes nothing."""
        if entry is not None:
            self.offer(DrainAsked(key.removeprefix("drains/")))

    def _on_reports(self, found: list[tuple[str, Entry]]) -> None:
        for key, entry in found:
            self._on_report(key, entry, 0)

    def _office_listed(self, found: list[tuple[str, Entry]]) -> None:
        if not found or found[0][1].created != self.term:
            self._depose("the office is held by another controller, or vacant")

    def _on_office(self, key: str, entry: Entry | None, revision: int) -> None:
        if entry is None or entry.created != self.term:
            self._depose("the office is held by another controller, or vacant")

    def _on_node(self, key: str, entry: Entry | None, revision: int) -> None:
        name = key.removeprefix("nodes/")
        if entry is not None:
            self.unleased.pop(name, None)
            self.offer(NodeJoined(entry.value))
            self.liaison.registered(entry.value)
        elif self._desk.alone:
            self.offer(NodeLost(name, "its registration is gone"))
        else:
            self.unleased.setdefault(name, self._life.now)
            self.liaison.unregistered(name)

    def _on_report(self, key: str, entry: Entry | None, revision: int) -> None:
        if entry is not None:
            self.offer(ReportReceived(entry.value))

    def list_again(self) -> None:
        """The reports' watch begins anew: everything is listed."""
        store = self._desk.store
        self._call(lambda: store.under("reports/"), self._on_reports)

    # -- events in, actions out -----------------------------------------------------------------------------------------------------------------

    def offer(self, event: JobEvent) -> None:
        """Queue an event."""
        if not self.closed:
            self._queue.append(event)
            self._pump()

    def _pump(self) -> None:
        life = self._life
        while self._queue and not self._busy and self.loaded and not self.closed and not self.done and life.awake:
            event = self._queue.popleft()
            if isinstance(event, ProgressSeen):
                self.hear_step(event.began_ago_s)
            before = self.machine.state
            self.journal.append((life.now, event))
            actions = self.machine.handle(life.now, event)
            durable = self._desk.judged(self, before, event, actions)
            if not any(isinstance(action, Commit) for action in actions):
                durable()
            self._carry_out(actions, durable, self._pump)

    def hear_step(self, began_ago_s: float) -> None:
        """A step that was begun so long ago has been completed."""
        self.step_heard = max(self.step_heard, self._life.now - began_ago_s)
        self.liaison.stepped(began_ago_s)

    def feel_store(self, there: bool) -> None:
        """The store is away, or back: doubts begin anew."""
        self.unleased = dict.fromkeys(self.unleased, self._life.now)
        self.liaison.store_there(there)

    def wake(self) -> None:
        """Its process goes on."""
        self._pump()

    def _carry_out(self, actions: Sequence[JobAction], durable: Callable[[], None], then: Callable[[], None]) -> None:
        """In order; a commit makes the rest wait for it. `then` follows the rest, where there was a commit."""
        for position, action in enumerate(actions):
            if isinstance(action, Commit):
                self._busy = True
                self.commits.append(action.job)
                self._commit(action.job, durable, (actions[position + 1 :], then))
                return
            if isinstance(action, SetTimer):
                self._set_timer(action)
            else:
                self._desk.performed(action)

    def _commit(self, job: JobState, durable: Callable[[], None], after: tuple[Sequence[JobAction], Callable[[], None]]) -> None:
        self._call(lambda: self._write(job, durable), lambda revision: self._on_answer(revision, *after))

    def _write(self, job: JobState, durable: Callable[[], None]) -> int:
        """The effect: only while the office is ours and nobody has written since."""
        store = self._desk.store
        if store.created("leader") != self.term or store.modified("job") != self._job_revision:
            return 0
        durable()
        revision = store.put("job", JobState.from_json(job.to_json()))
        self._desk.committed(self, job)
        return revision

    def _on_answer(self, revision: int, rest: Sequence[JobAction], then: Callable[[], None]) -> None:
        if not revision:
            self._depose("the leader key or the job key has changed hands")
            return
        self._job_revision = revision
        self._busy = False
        self._carry_out(rest, lambda: None, then)
        if not self._busy:
            then()

    def _set_timer(self, action: SetTimer) -> None:
        pending = self._timers.pop(action.timer, None)
        if pending is not None:
            pending.cancel()
        self._timers[action.timer] = self._life.after(action.delay_s, self.offer, TimerFired(action.timer, action.cycle))

    # -- the end --------------------------------------------------------------------------------------------------------------------------------

    def _depose(self, why: str) -> None:
        """Resign: an office that is still ours must not stay with somebody who does not act."""
        if self.closed:
            return
        self.close()
        store, term = self._desk.store, self.term
        store.call(self.host, lambda: store.delete("leader") if store.created("leader") == term else None, lambda _: None)
        self._desk.controller_ended(self, why)

    def close(self) -> None:
        """It acts no more."""
        self.closed = True
        for timer in self._timers.values():
            timer.cancel()
        for watch in self._watches:
            watch.close()
        if self._liaison is not None:
            self._liaison.close()
