"""The rooms of the multi-node shell one by one, over the embedded store: what needs no process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core.actions import KillRanks, Leave
from ft_launcher.core.evidence import Address, NodeInfo, NodeReport
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Options, Phase
from ft_launcher.core.topology import Topology
from ft_launcher.errors import PlatformError
from ft_launcher.shell.controller import Controller, DeposedError, Job
from ft_launcher.shell.follow import follow
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.reporter import Reporter
from ft_launcher.shell.store import Changes, Delete, MemoryStore, Put
from tests.core.machines import Job as CoreJob

KEYS = Keys("run")
PATIENCE_S = 30.0


class Silent:
    """A record that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, say: Any) -> None:
        self.lines.append(say.text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


async def until(what: Callable[[], Any]) -> Any:
    while not (found := what()):
        await asyncio.sleep(0.005)
    return found


def job_of(generation: int = 0) -> Job:
    return Job(KEYS, generation, Topology.build(world=2), Options(nodes_wanted=2, nproc=1, can_join=True))


# -- the controller ------------------------------------------------------------------------------------------------------------------------


async def register(store: MemoryStore, *nodes: str) -> None:
    """Nodes that are there and ready."""
    for i, node in enumerate(nodes):
        await store.put(KEYS.node(node), json.dumps(NodeInfo(node, f"h:{i + 1}", 1, 0).to_json()))
        await store.put(KEYS.report(node), json.dumps(NodeReport(node, 0, -1, 1, reaped=True, standby=Address("h", 1000 + i)).to_json()))


def test_a_controller_that_lost_its_key_ends_though_it_has_nothing_to_write() -> None:
    async def work() -> None:
        store = MemoryStore()
        lease = await store.grant(1000)
        controller = Controller(store, job_of(), Silent(), "me")  # type: ignore[arg-type]
        task = asyncio.create_task(controller.run(lease))
        while await store.get(KEYS.job) is None:
            await asyncio.sleep(0)
        await store.revoke(lease)
        with pytest.raises(DeposedError):
            await task

    run(work())


def test_a_deposed_controller_writes_nothing() -> None:
    """It has not heard yet that it is deposed, and wants to start a cycle."""

    class Deaf(MemoryStore):
        async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
            if prefix == KEYS.leader:
                await asyncio.Event().wait()
            async for batch in super().watch(prefix, revision):
                yield batch

    async def work() -> None:
        store = Deaf()
        controller = Controller(store, job_of(), Silent(), "me")  # type: ignore[arg-type]
        task = asyncio.create_task(controller.run(await store.grant(1000)))
        await register(store, "a")
        while len(store._watches) < 2:
            await asyncio.sleep(0)
        await store.transact([], [Delete(KEYS.leader)])
        await store.put(KEYS.leader, "somebody else")
        before = await store.get(KEYS.job)
        await register(store, "b")
        with pytest.raises(DeposedError):
            await task
        assert await store.get(KEYS.job) == before
        leader = await store.get(KEYS.leader)
        assert leader is not None
        assert leader.value == "somebody else", "what is another's is left alone"

    run(work())


def test_a_controller_whose_job_key_was_changed_gives_the_office_back() -> None:
    """Otherwise its lease would keep the office occupied, by nobody."""

    async def work() -> None:
        store = MemoryStore()
        controller = Controller(store, job_of(), Silent(), "me")  # type: ignore[arg-type]
        task = asyncio.create_task(controller.run(await store.grant(1000)))
        await register(store, "a")
        while len(store._watches) < 2:
            await asyncio.sleep(0)
        await store.put(KEYS.job, json.dumps(JobState("run", 1).to_json()))
        await register(store, "b")
        with pytest.raises(DeposedError):
            await task
        assert await store.get(KEYS.leader) is None

    run(work())


def test_an_older_generation_never_governs_a_newer_one() -> None:
    async def work() -> None:
        store = MemoryStore()
        newer = json.dumps(JobState("run", 3).to_json())
        await store.put(KEYS.job, newer)
        with pytest.raises(DeposedError, match="generation 3"):
            await Controller(store, job_of(2), Silent(), "me").run(await store.grant(1000))  # type: ignore[arg-type]
        entry = await store.get(KEYS.job)
        assert entry is not None
        assert entry.value == newer
        assert await store.get(KEYS.leader) is None

    run(work())


def test_what_a_controller_has_committed_is_written_down_though_its_agent_leaves_meanwhile() -> None:
    """A spare that is told to go may be the controller, and in the middle of the job's last word."""

    class Slow(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.written = asyncio.Event()

        async def transact(self, compares: Any, operations: Any) -> Any:
            outcome = await super().transact(compares, operations)
            if any(o.key == KEYS.job and '"phase":"running"' in o.value for o in operations if isinstance(o, Put)):
                self.written.set()
                await asyncio.sleep(0.2)
            return outcome

    class Recorder(Silent):
        def __init__(self) -> None:
            super().__init__()
            self.phases: list[Phase] = []

        def committed(self, job: JobState, revision: int) -> None:
            self.phases.append(job.phase)

    async def work() -> None:
        store, record = Slow(), Recorder()
        await register(store, "a", "b")
        task = asyncio.create_task(Controller(store, job_of(), record, "me").run(await store.grant(1000)))  # type: ignore[arg-type]
        await store.written.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert record.phases[-1] is Phase.RUNNING

    run(work())


# -- following and reporting ----------------------------------------------------------------------------------------------------------------


class Flaky(MemoryStore):
    """Each watch ends with "unreachable" when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.away = asyncio.Event()

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        inner = super().watch(prefix, revision)
        failing = asyncio.create_task(self.away.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(inner))
                await asyncio.wait({coming, failing}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    self.away.clear()
                    raise PlatformError("no answer", 69)
                yield coming.result()
        finally:
            failing.cancel()
            await inner.aclose()


def test_who_is_patient_follows_through_an_outage_and_misses_nothing() -> None:
    async def work() -> None:
        store = Flaky()
        await store.put("k", "0")
        seen: list[str] = []

        async def watch() -> None:
            async for batch in follow(store, "k", lambda: True):
                seen.extend(change.entry.value for change in batch.changes if change.entry is not None)

        task = asyncio.create_task(watch())
        await until(lambda: seen == ["0"])
        store.away.set()
        await store.put("k", "1")
        await store.put("k", "2")
        await until(lambda: seen == ["0", "1", "2"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work())


def test_who_is_not_patient_learns_that_the_store_is_away() -> None:
    async def work() -> None:
        store = Flaky()

        async def watch() -> None:
            async for batch in follow(store, "k", lambda: False):
                assert batch.reset
                store.away.set()

        with pytest.raises(PlatformError):
            await watch()

    run(work())


def test_a_report_is_never_written_over_another_agents() -> None:
    async def work() -> None:
        store, key = MemoryStore(), KEYS.report("n0")
        old, new = NodeReport("n0", 0, 3, 1, incarnation="old"), NodeReport("n0", 0, -1, 1, incarnation="new")
        first = Reporter(store, key)
        await first.send(old)
        await first.send(replace(old, sequence=2))
        await store.transact([], [Delete(key)])  # a new agent joins
        with pytest.raises(PlatformError, match="taken over"):
            await first.send(replace(old, sequence=3))
        second = Reporter(store, key)
        await second.send(new)
        with pytest.raises(PlatformError, match="taken over"):
            await first.send(replace(old, sequence=4))
        entry = await store.get(key)
        assert entry is not None
        assert NodeReport.from_json(json.loads(entry.value)) == new

    run(work())


def test_a_report_of_ours_that_arrived_late_is_no_stranger() -> None:
    async def work() -> None:
        store, key = MemoryStore(), KEYS.report("n0")
        report = NodeReport("n0", 0, 3, 1, incarnation="x")
        reporter = Reporter(store, key)
        await reporter.send(report)
        await store.transact([], [Put(key, json.dumps(report.to_json()))])  # a copy whose answer was lost
        await reporter.send(replace(report, sequence=2))
        entry = await store.get(key)
        assert entry is not None
        assert json.loads(entry.value)["sequence"] == 2

    run(work())


# -- the machines -----------------------------------------------------------------------------------------------------------------------------


def test_the_place_of_a_lost_node_asks_for_its_labels() -> None:
    job = CoreJob(nodes=2, nproc=1, can_join=True)
    from ft_launcher.core.events import NodeJoined, NodeLost

    for node, rack in (("n0", "a"), ("n1", "b")):
        job.join(node)
        job.send(NodeJoined(NodeInfo(node, "127.0.0.1:1", 1, 0, labels={"rack": rack})))
    job.forked()
    for node, rack in (("s0", "a"), ("s1", "b")):
        job.join(node)
        job.send(NodeJoined(NodeInfo(node, "127.0.0.1:1", 1, 0, labels={"rack": rack})))
    job.send(NodeLost("n1", "gone"))
    job.clear("n0")
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s1")
    assert job.state.budgets.node_failures == {"n1": 1}, "should it come back, it is the spare of last resort"


def test_who_waits_is_told_and_nobody_else() -> None:
    job = CoreJob(nodes=3, nproc=1, can_join=True)
    job.join("n0")
    assert job.machine.waiting() == "still waiting for nodes: 1 of 3 are ready (ready: n0; 2 more to come)"
    job.join("n1")
    job.join("n2")
    assert job.state.phase is Phase.RUNNING
    assert job.machine.waiting() is None


def node_machine(generation: int = 0) -> tuple[NodeMachine, JobState]:
    from ft_launcher.core.events import JobChanged, StandbyOpened, ZygoteStarted

    machine = NodeMachine(NodeOptions("n0", generation))
    machine.handle(0.0, ZygoteStarted())
    machine.handle(0.0, StandbyOpened(Address("h", 1)))
    state = JobState("run", generation, phase=Phase.RUNNING, cycle=0, placement=Placement(("n0",), 1), master=Address("h", 1))
    machine.handle(0.0, JobChanged(state, 5))
    return machine, state


def test_a_newer_generation_ends_the_ranks_and_then_the_agent() -> None:
    from ft_launcher.core.events import JobChanged, RankEnded, RanksReaped

    machine, _ = node_machine()
    actions = machine.handle(1.0, JobChanged(JobState("run", 1), 6))
    assert KillRanks(0, [0]) in actions
    machine.handle(1.0, RankEnded(0, 0, None, 9, 5))
    assert Leave(0) in machine.handle(1.0, RanksReaped(0, (), 0.0))


def test_an_older_generation_changes_nothing() -> None:
    from ft_launcher.core.events import JobChanged

    machine, state = node_machine(2)
    assert machine.handle(1.0, JobChanged(state.but(generation=1, phase=Phase.ENDING), 9)) == []


@pytest.mark.parametrize("number", [1, 2, 15])
def test_a_spare_leaves_by_itself_but_who_holds_ranks_asks(number: int) -> None:
    from ft_launcher.core.events import JobChanged, SignalArrived

    machine, state = node_machine()
    assert Leave(0) not in machine.handle(1.0, SignalArrived(number))
    spare = NodeMachine(NodeOptions("s0", 0))
    assert Leave(0) not in spare.handle(1.0, SignalArrived(number)), "while the job forms nobody is a spare"
    spare.handle(1.0, JobChanged(state.but(placement=Placement(("n0",), 1)), 7))
    assert spare.handle(1.0, SignalArrived(number))[-1] == Leave(0)


def test_a_controller_that_takes_over_knows_all_spares_before_it_fills_a_hole() -> None:
    """The cycle has ended, `a` is lost and all who hold ranks have acknowledged: the last report that it reads is that of the best spare."""

    async def work() -> None:
        store = MemoryStore()
        state = JobState("run", 0, Phase.ENDING, 4, Placement(("a", "c"), 1), lost={"a": "it is gone"})
        state = state.but(budgets=replace(state.budgets, node_failures={"b": 2}))
        await store.put(KEYS.job, json.dumps(state.to_json()))
        for i, (node, cycle) in enumerate((("b", 3), ("c", 4), ("z", -1))):
            await store.put(KEYS.node(node), json.dumps(NodeInfo(node, f"h:{i + 1}", 1, 0).to_json()))
            await store.put(
                KEYS.report(node), json.dumps(NodeReport(node, 0, cycle, 1, reaped=True, standby=Address("h", 1000 + i)).to_json())
            )
        controller = Controller(store, job_of(), Silent(), "me")  # type: ignore[arg-type]
        task = asyncio.create_task(controller.run(await store.grant(1000)))
        try:
            await until(lambda: controller._machine is not None and controller._machine.state.cycle == 5)
            assert controller._machine is not None
            assert controller._machine.state.placement == Placement(("z", "c"), 1)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(work())
