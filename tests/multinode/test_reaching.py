"""Joining, the channel and the liaison, over the embedded store and loopback: what needs no agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.config import Config
from ft_launcher.core.command import Command
from ft_launcher.core.evidence import Address, NodeInfo
from ft_launcher.core.membership import Reply, Rules
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Phase
from ft_launcher.core.topology import Topology
from ft_launcher.shell.channel import Body, ChannelServer, Identity, Peer, reach
from ft_launcher.shell.join import Joiner, spec_of
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.liaison import Liaison, Outward
from ft_launcher.shell.store import Delete, MemoryStore

KEYS = Keys("run")
PATIENCE_S = 30.0


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


async def until(what: Callable[[], Any]) -> Any:
    while not (found := what()):
        await asyncio.sleep(0.005)
    return found


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
