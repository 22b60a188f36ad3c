"""The rooms of the multi-node shell one by one, over the embedded store: what needs no process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.config import Config
from ft_launcher.core.actions import KillRanks, Leave
from ft_launcher.core.command import Command
from ft_launcher.core.evidence import Address, NodeInfo, NodeReport
from ft_launcher.core.membership import Reply, Rules
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Options, Phase
from ft_launcher.core.topology import Topology
from ft_launcher.errors import PlatformError
from ft_launcher.shell.channel import Body, ChannelServer, Identity, Peer, reach
from ft_launcher.shell.controller import Controller, DeposedError, Job
from ft_launcher.shell.follow import follow
from ft_launcher.shell.join import Joiner, spec_of
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.liaison import Liaison, Outward
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


# -- the channel ----------------------------------------------------------------------------------------------------------------------------


async def server(node_id: str, incarnation: str) -> tuple[ChannelServer, Peer]:
    found = ChannelServer(Identity(node_id, incarnation, "secret"), lambda body, answer: None)
    return found, Peer(node_id, f"127.0.0.1:{await found.listen()}", incarnation)


def test_only_that_very_agent_answers() -> None:
    async def work() -> None:
        there, peer = await server("n0", "new")
        me = Identity("me", "x", "secret")
        assert await reach(peer, me) is Reply.ANSWERED
        assert await reach(replace(peer, incarnation="old"), me) is Reply.REFUSED, "its predecessor is gone"
        assert await reach(replace(peer, node_id="n1"), me) is Reply.REFUSED
        assert await reach(peer, replace(me, secret="guess")) is not Reply.ANSWERED
        await there.close()
        assert await reach(peer, me) is Reply.REFUSED

    run(work())


def test_what_is_no_message_of_ours_is_dropped() -> None:
    async def work() -> None:
        there, peer = await server("n0", "x")
        port = int(peer.address.rpartition(":")[2])
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[]\n",
            b"{}\n",
            b'{"secret": 7}\n',
            b"\xff\xfe\n",
            b'{"secret": "\\u00e9"}\n',
            b"x" * 3_000_000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            with_end = await asyncio.wait_for(_to_the_end(reader), PATIENCE_S)
            assert with_end == b""
            writer.transport.abort()
        assert await reach(peer, Identity("me", "y", "secret")) is Reply.ANSWERED, "and the agent still serves"
        await there.close()

    run(work())


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_a_new_controller_does_not_bury_a_node_on_its_own_word() -> None:
    """It is refused by a node that has a lease; another agent is there and can reach it."""

    async def work() -> None:
        told: list[Any] = []
        witness = Identity("w", "i", "secret")

        def answer(body: Body, reply: Callable[[Body], None]) -> None:
            reply({"reached": body["reach"], "incarnation": body["incarnation"], "reply": "answered"})

        there = ChannelServer(witness, answer)
        address = f"127.0.0.1:{await there.listen()}"
        gone, peer = await server("n0", "x")
        await gone.close()
        liaison = Liaison(Identity("me", "y", "secret"), Rules(10.0), Outward(told.append, told.append, lambda *_: None))
        liaison.registered(NodeInfo("n0", peer.address, 1, 0, incarnation="x"))
        liaison.registered(NodeInfo("w", address, 1, 0, incarnation="i"))
        await asyncio.sleep(2.0)  # several probes
        assert told == []
        await liaison.close()
        await there.close()

    run(work())


def test_a_new_controller_buries_a_node_that_its_witness_cannot_reach_either() -> None:
    async def work() -> None:
        told: list[Any] = []

        def answer(body: Body, reply: Callable[[Body], None]) -> None:
            reply({"reached": body["reach"], "incarnation": body["incarnation"], "reply": "refused"})

        there = ChannelServer(Identity("w", "i", "secret"), answer)
        gone, peer = await server("n0", "x")
        await gone.close()
        liaison = Liaison(Identity("me", "y", "secret"), Rules(10.0), Outward(told.append, told.append, lambda *_: None))
        liaison.registered(NodeInfo("n0", peer.address, 1, 0, incarnation="x"))
        liaison.registered(NodeInfo("w", f"127.0.0.1:{await there.listen()}", 1, 0, incarnation="i"))
        (lost,) = await until(lambda: told)
        assert lost.node_id == "n0"
        await liaison.close()
        await there.close()

    run(work())


def test_what_was_seen_of_a_former_agent_is_not_held_against_its_successor() -> None:
    """The former agent's connection closed; the new one is registered, but not reachable from here alone."""

    async def work() -> None:
        told: list[Any] = []
        former, peer = await server("n0", "old")
        other, witness = await server("w", "i")
        liaison = Liaison(Identity("me", "y", "secret"), Rules(10.0), Outward(told.append, told.append, lambda *_: None))
        liaison.registered(NodeInfo("w", witness.address, 1, 0, incarnation="i"))
        liaison.registered(NodeInfo("n0", peer.address, 1, 0, incarnation="old"))
        await until(lambda: former.connected)
        gone, nowhere = await server("n0", "new")
        await gone.close()
        liaison._members.disconnected(asyncio.get_running_loop().time(), "n0")
        liaison.registered(NodeInfo("n0", nowhere.address, 1, 0, incarnation="new"))
        await asyncio.sleep(1.5)
        assert told == []
        await liaison.close()
        await former.close()
        await other.close()

    run(work())


def test_a_liaison_that_closes_hangs_up_everywhere() -> None:
    """A deposed controller's connections must not live on beside its successor's."""

    async def work() -> None:
        gone: list[str] = []
        there, peer = await server("n0", "i")
        there.controller_gone = lambda: gone.append("n0")
        liaison = Liaison(Identity("me", "y", "secret"), Rules(10.0), Outward(gone.append, gone.append, lambda *_: None))  # type: ignore[arg-type]
        liaison.registered(NodeInfo("n0", peer.address, 1, 0, incarnation="i"))
        await until(lambda: there.connected)
        await liaison.close()
        await until(lambda: gone == ["n0"])
        assert not there.connected
        await there.close()
        assert [t for t in asyncio.all_tasks() if "Line" in repr(t.get_coro())] == []

    run(work())


# -- joining --------------------------------------------------------------------------------------------------------------------------------


def joiner(store: MemoryStore, node_id: str = "x") -> Joiner:
    topology = Topology.build(world=2)
    script = Command(script="train.py")
    config = Config(
        command=script, topology=topology, nnodes=2, nproc=1, run_id="run", node_id=node_id, log_dir=Path("l"), ft_state=Path("f"), node_ttl_s=1.0
    )  # fmt: skip
    return Joiner(store, KEYS, config, spec_of(config, {}), lambda *_: None)


async def joined(store: MemoryStore, replies: dict[str, Reply], node_id: str = "x") -> int:
    async def answer(peer: Peer) -> Reply:
        return replies.get(peer.address, Reply.SILENT)

    found = await joiner(store, node_id).join(
        lambda generation: NodeInfo(node_id, f"{node_id}:1", 1, generation, incarnation=node_id), answer
    )
    return found.generation


async def running(store: MemoryStore) -> None:
    """A job that runs on a and b, neither of which is registered: a frozen store has ended all leases at once."""
    assert await joined(store, {}, "a") == 0
    state = JobState(
        "run",
        0,
        phase=Phase.RUNNING,
        cycle=4,
        placement=Placement(("a", "b"), 1),
        master=Address("a", 1),
        addresses={"a": "a:1", "b": "b:1"},
    )
    await store.put(KEYS.job, json.dumps(state.but(incarnations={"a": "a", "b": "b"}).to_json()))
    await store.transact([], [Delete(KEYS.node("a"))])


@pytest.mark.parametrize(
    ("replies", "generation"),
    [
        ({"a:1": Reply.REFUSED, "b:1": Reply.ANSWERED}, 0),
        ({"b:1": Reply.ANSWERED}, 0),
        ({"a:1": Reply.REFUSED, "b:1": Reply.REFUSED}, 1),
        ({"a:1": Reply.REFUSED}, 1),
        ({}, 1),
    ],
)
def test_a_running_job_without_registrations_is_not_begun_anew_while_one_of_its_agents_answers(
    replies: dict[str, Reply], generation: int
) -> None:
    async def work() -> None:
        store = MemoryStore()
        await running(store)
        assert await joined(store, replies) == generation

    run(work())


def test_who_lives_is_given_the_time_to_register_again() -> None:
    async def work() -> None:
        store = MemoryStore()
        await running(store)
        joining = asyncio.create_task(joined(store, {"c:1": Reply.ANSWERED}))
        await asyncio.sleep(0.5)
        await store.put(KEYS.node("c"), json.dumps(NodeInfo("c", "c:1", 1, 0, incarnation="c").to_json()))
        assert await joining == 0

    run(work())


def test_of_many_that_come_at_once_one_begins_and_all_meet() -> None:
    async def work() -> None:
        store = MemoryStore()
        names = [f"n{i}" for i in range(20)]
        replies = {f"{n}:1": Reply.ANSWERED for n in names}
        assert set(await asyncio.gather(*(joined(store, replies, n) for n in names))) == {0}
        assert len((await store.list(KEYS.nodes)).entries) == 20

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
    from ft_launcher.core.placement import Placement

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
    from ft_launcher.core.placement import Placement

    machine, state = node_machine()
    assert Leave(0) not in machine.handle(1.0, SignalArrived(number))
    spare = NodeMachine(NodeOptions("s0", 0))
    assert Leave(0) not in spare.handle(1.0, SignalArrived(number)), "while the job forms nobody is a spare"
    spare.handle(1.0, JobChanged(state.but(placement=Placement(("n0",), 1)), 7))
    assert spare.handle(1.0, SignalArrived(number))[-1] == Leave(0)
