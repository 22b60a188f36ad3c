"""The controller's shell: elects, reads the store, feeds the job machine, carries out its actions.

At most one controller writes at a time: each transaction compares the leader key's create revision and the job key's mod revision, so a deposed one can write nothing.
It owns no process and decides nothing itself; what people read is handed to a `Record`. All time is the event loop's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from ft_launcher.core.actions import Commit, JobAction, RecordDecision, RecordRecovery, Say, SetTimer
from ft_launcher.core.events import DrainAsked, JobEvent, NodeJoined, NodeLost, ProgressSeen, ReportReceived, Timer, TimerFired
from ft_launcher.core.evidence import NO_CYCLE, NodeInfo, NodeReport
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Options, Phase
from ft_launcher.core.topology import Topology
from ft_launcher.errors import PlatformError
from ft_launcher.shell.follow import follow
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.limits import LimitsKeeper
from ft_launcher.shell.store import Change, Compare, Created, Delete, Listing, Modified, Put, Store
from monitors.learning import Sample

NAG_S = 5.0
"""How often people are told who is missing."""
SAME_NAG_S = 60.0
"""And how often in the same words."""
FINISH_S = 2.0
"""So long a write that is under way may still take when the controller has to go."""


class DeposedError(Exception):
    """Another controller holds the lease, or the job key has moved on: this one must not act any more."""


class Record(Protocol):
    """Where decisions become lines and files. None of these may block."""

    def say(self, say: Say) -> None:
        """One line for people."""
        ...

    def committed(self, job: JobState, revision: int) -> None:
        """The job state is durable."""
        ...

    def decided(self, decision: RecordDecision) -> None:
        """A cycle is settled."""
        ...

    def recovered(self, recovery: RecordRecovery) -> None:
        """Training goes on."""
        ...

    def progressed(self, progress: ProgressSeen) -> None:
        """Where training is."""
        ...

    def spares(self, count: int) -> None:
        """How many nodes could take another's place."""
        ...

    def alive(self) -> None:
        """Every few seconds: this controller is there."""
        ...

    def flush(self) -> None:
        """Write now what was postponed."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a controller has to know of the job besides the store's content."""

    keys: Keys
    generation: int
    topology: Topology
    options: Options
    inherit: Callable[[JobState], JobState] = lambda fresh: fresh
    """What a generation that has not begun takes over from files."""


class Neighbours(Protocol):
    """Who watches over the other nodes (shell/liaison.py). Without one (one node) a vanished registration is a lost node."""

    def registered(self, node: NodeInfo) -> None:
        """The node is in the store."""

    def unregistered(self, node_id: str) -> None:
        """It is there no more."""

    def left(self, node_id: str) -> None:
        """It is gone, as it was asked to be."""

    def missing(self, node: NodeInfo) -> None:
        """It holds ranks and was not there when this controller began."""

    def stepped(self, began_ago_s: float) -> None:
        """A step that was begun so long ago has been completed."""

    async def close(self) -> None:
        """The controller goes."""


class Controller:
    """Runs one job while it holds the lease. `offer` hands it events from this process (progress); everything else comes through the store.

    `name` goes into the leader key: where this controller is, for those who want to know whether it is still there.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        record: Record,
        name: str,
        neighbours: Callable[[Controller], Neighbours] | None = None,
        keeper: LimitsKeeper | None = None,
    ) -> None:
        self._store = store
        self._job = job
        self._record = record
        self._name = name
        self._keeper = keeper
        self._neighbours = neighbours(self) if neighbours is not None else None
        self._queue: asyncio.Queue[JobEvent | Exception] = asyncio.Queue()
        self._nag: asyncio.TimerHandle | None = None
        self._nagged = ("", 0.0)
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._machine: JobMachine | None = None
        self._leader_revision = 0
        self._job_revision = 0
        self._watching: list[asyncio.Task[None]] = []

    def offer(self, event: JobEvent) -> None:
        """Queue an event; handled in order with the store's."""
        self._queue.put_nowait(event)

    def learn(self, node_id: str, cycle: int, samples: Sequence[Sample]) -> None:
        """How long a node's ranks took for what they did."""
        if self._keeper is not None:
            self._keeper.offer(node_id, cycle, samples)

    async def close(self) -> None:
        """Let go of the neighbours; what was not urgent to write is written."""
        self._record.flush()
        if self._neighbours is not None:
            await self._neighbours.close()

    def warn(self, text: str) -> None:
        """Say something about a node."""
        self._record.say(Say(text, "warning"))

    @property
    def training(self) -> bool:
        """The job runs, as far as this controller knows."""
        return self._machine is not None and self._machine.state.phase is Phase.RUNNING

    async def run(self, lease: int) -> None:
        """Be the controller until the job is done. Raises DeposedError when another one is, PlatformError when the store is out of reach."""
        if not await self._elect(lease):
            raise DeposedError("another controller holds the lease")
        try:
            await self._load()
            await self._serve()
        except DeposedError:
            await self._resign()
            raise
        finally:
            for timer in (*self._timers.values(), *([self._nag] if self._nag else [])):
                timer.cancel()
            for task in self._watching:
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)

    async def _resign(self) -> None:
        """An office that is still ours must not stay with somebody who does not act: our lease would keep it for ever."""
        leader = self._job.keys.leader
        await self._store.transact([Created(leader, self._leader_revision)], [Delete(leader)])

    async def _elect(self, lease: int) -> bool:
        key = self._job.keys.leader
        outcome = await self._store.transact([Created(key, 0)], [Put(key, self._name, lease)])
        self._leader_revision = outcome.revision
        return outcome.succeeded

    async def _load(self) -> None:
        """Continue from the job key, or begin a new generation over what an older one left."""
        keys = self._job.keys
        entry = await self._store.get(keys.job)
        known = JobState.from_json(json.loads(entry.value)) if entry is not None else None
        self._job_revision = entry.modified if entry is not None else 0
        if known is None or known.generation < self._job.generation:
            known = JobState(keys.run_id, self._job.generation)
        if known.generation > self._job.generation:
            raise DeposedError(f"generation {known.generation} of the job is not ours to govern")
        if known.cycle == NO_CYCLE and known.phase is Phase.FORMING:
            known = self._job.inherit(known)
        if self._keeper is not None:
            await self._keeper.load(self._leader_revision)
            self._watching.append(asyncio.create_task(self._keeper.run()))
        self._machine = JobMachine(known, self._job.topology, self._job.options)
        await self._carry_out([Commit(known), *self._machine.begin(self._now())])
        for prefix in (keys.nodes, keys.reports, keys.drains):
            listing = await self._store.list(prefix)
            for found in sorted(listing.entries, key=lambda entry: self._holds_ranks(prefix, entry.key)):
                self._on_change(Change(found.key, found, found.modified))
            self._watching.append(asyncio.create_task(self._watch(prefix, listing)))
            if prefix == keys.nodes:
                self._look_for_missing(known, {entry.key for entry in listing.entries})
        self._watching.append(asyncio.create_task(self._watch_office()))
        self._now_and_then()

    def _holds_ranks(self, prefix: str, key: str) -> bool:
        """Those without ranks are heard first: who takes a hole, and whether anybody can, must not be decided before all spares are known."""
        placement = self._require_machine().state.placement
        return placement is not None and key.removeprefix(prefix) in placement

    def _now_and_then(self) -> None:
        """Who is missing, while nothing can start (the same words again only once a minute; quiet otherwise); and that somebody governs."""
        now = asyncio.get_running_loop().time()
        waiting = self._require_machine().waiting() if self._nag is not None else None
        if waiting is not None and (waiting != self._nagged[0] or now - self._nagged[1] >= SAME_NAG_S):
            self._nagged = (waiting, now)
            self._record.say(Say(waiting))
        self._nag = asyncio.get_running_loop().call_later(NAG_S, self._now_and_then)
        self._record.alive()

    async def _watch_office(self) -> None:
        """Who has lost the office ends as a controller even when it has nothing to write: its agent must listen to the successor."""
        ended: Exception = DeposedError("the office is held by another controller, or vacant")
        try:
            await self._until_succeeded()
        except Exception as error:  # noqa: BLE001 - handed to run(), which raises it
            ended = error
        self._queue.put_nowait(ended)

    async def _until_succeeded(self) -> None:
        async with aclosing(follow(self._store, self._job.keys.leader, lambda: True)) as found:
            async for batch in found:
                entry = batch.changes[-1].entry if batch.changes else None
                if entry is None or entry.created != self._leader_revision:
                    return

    def _look_for_missing(self, job: JobState, registered: set[str]) -> None:
        """Nodes that hold ranks and have no registration: nobody else will ever speak of them."""
        for node_id in job.placement.nodes if job.placement is not None and job.phase is not Phase.DONE else ():
            if self._job.keys.node(node_id) in registered or node_id in job.lost:
                continue
            if self._neighbours is None:
                self.offer(NodeLost(node_id, "it is not registered"))
            else:
                address, agent = job.addresses.get(node_id, ""), job.incarnations.get(node_id, "")
                self._neighbours.missing(NodeInfo(node_id, address, self._job.options.nproc, job.generation, incarnation=agent))

    async def _watch(self, prefix: str, listing: Listing) -> None:
        """A watch that fails or ends must be an error, never a silence; a store that is away is waited for, until there is something to write. After a reset, what is not listed is gone."""
        ended: Exception = DeposedError("a watch on the store ended")
        known = {entry.key for entry in listing.entries}
        try:
            async for batch in follow(self._store, prefix, lambda: True, listing):
                present = {change.key for change in batch.changes if change.entry is not None}
                vanished = known - present if batch.reset else set()
                for change in (*batch.changes, *(Change(key, None, batch.revision) for key in sorted(vanished))):
                    self._on_change(change)
                    (known.add if change.entry is not None else known.discard)(change.key)
        except Exception as error:  # noqa: BLE001 - handed to run(), which raises it
            ended = error
        self._queue.put_nowait(ended)

    def _on_change(self, change: Change) -> None:
        """Registrations and reports become events."""
        keys = self._job.keys
        if change.key.startswith(keys.nodes):
            self._on_registration(change.key.removeprefix(keys.nodes), change)
        elif change.key.startswith(keys.drains):
            self._on_drain_request(change)
        elif change.entry is not None:
            self.offer(ReportReceived(NodeReport.from_json(json.loads(change.entry.value))))

    def _on_drain_request(self, change: Change) -> None:
        """Known from now on; a successor that finds it again asks again, which changes nothing. It is taken away with the node."""
        if change.entry is not None:
            self.offer(DrainAsked(change.key.removeprefix(self._job.keys.drains)))

    def _on_registration(self, node_id: str, change: Change) -> None:
        if change.entry is None:
            if self._machine is not None and node_id in self._machine.state.leaving:
                self._has_left(node_id)
            elif self._neighbours is not None:
                self._neighbours.unregistered(node_id)
            else:
                self.offer(NodeLost(node_id, "its registration is gone"))
            return
        node = NodeInfo.from_json(json.loads(change.entry.value))
        if node.generation == self._job.generation:
            self.offer(NodeJoined(node))
            if self._neighbours is not None:
                self._neighbours.registered(node)

    def _has_left(self, node_id: str) -> None:
        """As it was asked to: nobody has to look for it, and the request is fulfilled."""
        if self._neighbours is not None:
            self._neighbours.left(node_id)
        self.offer(NodeLost(node_id, "it was asked to leave and has left"))
        self._watching.append(asyncio.create_task(self._forget_drain(node_id)))

    async def _forget_drain(self, node_id: str) -> None:
        with suppress(PlatformError):  # a successor finds the request again, and that nobody of that name is left to fulfil it
            await self._store.transact([], [Delete(self._job.keys.drains + node_id)])

    async def _serve(self) -> None:
        machine = self._require_machine()
        while machine.state.phase is not Phase.DONE:
            event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, ProgressSeen):
                self._record.progressed(event)
                if self._neighbours is not None:
                    self._neighbours.stepped(event.began_ago_s)
            if actions := machine.handle(self._now(), event):
                await self._carry_out(actions)
            if not isinstance(event, ProgressSeen) and (self._outside(event) or machine.state.phase is not Phase.RUNNING):
                self._record.spares(machine.spares())

    def _outside(self, event: JobEvent) -> bool:
        """About a node without ranks; reports of the others, thousands of them, cannot change who is a spare."""
        placement = self._require_machine().state.placement
        node_id = event.report.node_id if isinstance(event, ReportReceived) else event.node_id if isinstance(event, NodeLost) else None
        return node_id is None or placement is None or node_id not in placement

    def _require_machine(self) -> JobMachine:
        if self._machine is None:
            raise DeposedError("no job state was loaded")
        return self._machine

    async def _carry_out(self, actions: Sequence[JobAction]) -> None:
        """In order; nothing after a commit that failed. What has begun is finished, also where the agent leaves meanwhile: else the store knew of an end that nobody has written down."""
        work = asyncio.ensure_future(self._carry_out_all(actions))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=FINISH_S)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def _carry_out_all(self, actions: Sequence[JobAction]) -> None:
        for action in actions:
            if isinstance(action, Commit):
                await self._commit(action.job)
            else:
                self._simple(action)

    def _simple(self, action: SetTimer | Say | RecordDecision | RecordRecovery) -> None:
        if isinstance(action, SetTimer):
            self._set_timer(action)
        elif isinstance(action, Say):
            self._record.say(action)
        elif isinstance(action, RecordDecision):
            self._record.decided(action)
            self._learn_from(action)
        else:
            self._record.recovered(action)

    async def _commit(self, job: JobState) -> None:
        keys = self._job.keys
        compares: list[Compare] = [Created(keys.leader, self._leader_revision), Modified(keys.job, self._job_revision)]
        outcome = await self._store.transact(compares, [Put(keys.job, json.dumps(job.to_json(), separators=(",", ":")))])
        if not outcome.succeeded:
            raise DeposedError("the leader key or the job key has changed hands")
        self._job_revision = outcome.revision
        if self._keeper is not None and job.phase is Phase.RUNNING and job.placement is not None:
            self._keeper.begin_cycle(job.cycle, job.placement.nodes)
        self._record.committed(job, outcome.revision)

    def _learn_from(self, decision: RecordDecision) -> None:
        """A section in which a rank was ended as hung is given more time for a while."""
        found = decision.ranks.get(decision.culprit["rank"]) if decision.culprit is not None else None
        if self._keeper is not None and decision.cause == "hang" and found is not None and found["section"]:
            self._keeper.killed(found["section"], found["since_s"])

    def _set_timer(self, action: SetTimer) -> None:
        pending = self._timers.pop(action.timer, None)
        if pending is not None:
            pending.cancel()
        fire: Callable[[JobEvent], None] = self.offer
        event = TimerFired(action.timer, action.cycle)
        self._timers[action.timer] = asyncio.get_running_loop().call_later(action.delay_s, fire, event)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
