"""Writes whose answer is lost, or that arrive late: done exactly once, and the caller is told the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from ft_launcher.shell.etcd import REGISTERS, EtcdStore
from ft_launcher.shell.etcd_proto import pb
from ft_launcher.shell.store import Created, Delete, LeaseGoneError, Modified, Put
from tests.store.etcd_server import EtcdServer
from tests.store.observe import LONG_S, Recorder, options
from tests.store.proxy import Proxy


@asynccontextmanager
async def two_ways(server: EtcdServer, warm: bool = True) -> AsyncIterator[tuple[EtcdStore, Proxy, EtcdStore]]:
    """A store with two ways to the server, whose next call goes by the first one, the proxy; and a store that is somebody else's."""
    async with Proxy(server.endpoint) as proxy:
        store, other = EtcdStore(options([proxy.endpoint, server])), EtcdStore(options([server]))
        if warm:  # it has written before: its register is there
            await store.put("/ft/v1/warm", "")
        take_the_proxy(store)
        await store.get("/ft/v1/warm")
        try:
            async with asyncio.timeout(3 * LONG_S):
                yield store, proxy, other
        finally:
            await store.close()
            await other.close()


def take_the_proxy(store: EtcdStore) -> None:
    store._calls._current = 0


async def until_kept(proxy: Proxy, marker: str) -> None:
    """Until a request with this text is held back."""
    async with asyncio.timeout(LONG_S):
        while not any(marker.encode() in data for _, data in proxy.kept or []):
            await asyncio.sleep(0.005)


async def until_handled(server: EtcdServer, before: float) -> None:
    """Until the server has applied another proposal than those before, or has had ample time to."""
    for _ in range(100):
        if await asyncio.to_thread(server.metric, "etcd_server_proposals_applied_total") > before:
            return
        await asyncio.sleep(0.02)


def test_a_creation_whose_answer_was_lost_is_known_as_ours(shared_server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            start = (await other.list(prefix)).revision
            proxy.swallow_answers = True
            outcome = await store.transact([Created(prefix + "leader", 0)], [Put(prefix + "leader", "me")])
            found = await other.get(prefix + "leader")
            assert found is not None and outcome.succeeded and outcome.revision == found.created == start + 1

    asyncio.run(scenario())


def test_a_failure_whose_answer_was_lost_stays_a_failure(shared_server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            await other.put(prefix + "leader", "me")  # the same value as ours would be: comparing values would be fooled
            proxy.swallow_answers = True
            outcome = await store.transact([Created(prefix + "leader", 0)], [Put(prefix + "leader", "me")])
            assert not outcome.succeeded

    asyncio.run(scenario())


def test_a_success_that_was_overwritten_before_we_heard_of_it(shared_server: EtcdServer, prefix: str) -> None:
    """Ours was done, its answer lost, and somebody else has taken the key since: still a success, at our revision."""

    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            first = await other.put(prefix + "job", "0")
            proxy.swallow_answers = True
            async with Recorder(other, prefix + "job", first + 1) as watch:
                ours = asyncio.create_task(store.transact([Modified(prefix + "job", first)], [Put(prefix + "job", "ours")]))
                await watch.until(lambda w: w.values == ["ours"])
                await other.put(prefix + "job", "theirs")
            outcome = await ours
            assert outcome.succeeded and outcome.revision == watch.batches[0].revision
            found = await other.get(prefix + "job")
            assert found is not None and found.value == "theirs"

    asyncio.run(scenario())


def test_a_put_whose_answer_was_lost_is_done_once(shared_server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            start = (await other.list(prefix)).revision
            proxy.swallow_answers = True
            revision = await store.put(prefix + "k", "1")
            async with Recorder(other, prefix, start + 1) as watch:
                await other.put(prefix + "end", "")
                await watch.until(lambda w: ("end", "") in w.seen)
            assert watch.seen == [("k", "1"), ("end", "")] and watch.batches[0].revision == revision

    asyncio.run(scenario())


async def _late_put(store: EtcdStore, key: str) -> None:
    await store.put(key, "early")


async def _late_election(store: EtcdStore, key: str) -> None:
    assert not (await store.transact([Created(key, 0)], [Put(key, "early")])).succeeded


async def _unguarded(store: EtcdStore, key: str) -> None:
    """What a client without registers would send."""
    await store._calls.call(lambda line: line.kv.Put, pb.PutRequest(key=key.encode(), value=b"early"))


async def _late_put_then_close(store: EtcdStore, key: str) -> None:
    await _late_put(store, key)
    await store._writer.close()  # what close() does to the store's keys, without ending the connection on which the copy is stuck


@pytest.mark.parametrize(
    ("write", "arrives"), [(_late_put, False), (_late_put_then_close, False), (_late_election, False), (_unguarded, True)]
)
@pytest.mark.parametrize("first", [True, False], ids=["first write", "later write"])
def test_a_request_that_was_stuck_does_nothing_later(
    shared_server: EtcdServer, prefix: str, write: Callable[[EtcdStore, str], Awaitable[None]], arrives: bool, first: bool
) -> None:
    """Held back on the first way, answered on the second; then the world moves on, and the first copy comes free. The unguarded write shows that the
    copy does reach the server and would be carried out."""

    async def scenario() -> None:
        key = prefix + "leader"
        async with two_ways(shared_server, warm=not first) as (store, proxy, other):
            await other.put(key, "theirs")
            proxy.keep()
            writing = asyncio.create_task(write(store, key))
            await until_kept(proxy, key if not first or arrives else REGISTERS)
            kept = proxy.seal()
            await writing
            await other.transact([], [Delete(key)])
            before = await asyncio.to_thread(shared_server.metric, "etcd_server_proposals_applied_total")
            await proxy.release(kept)
            await until_handled(shared_server, before)
            found = await other.get(key)
            assert (found is not None) == arrives, f"found {found}"

    asyncio.run(scenario())


def test_a_write_on_an_ending_lease_whose_answer_was_lost(shared_server: EtcdServer, prefix: str) -> None:
    """The write was done, then the lease ended; the repetition is refused for the lease, yet the truth is that it was done."""

    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            lease = await store.grant(60.0)
            start = (await other.list(prefix)).revision
            take_the_proxy(store)
            proxy.swallow_answers = True
            async with Recorder(other, prefix, start + 1) as watch:
                writing = asyncio.create_task(store.put(prefix + "k", "1", lease))
                await watch.until(lambda w: bool(w.seen))
                await other.revoke(lease)
                assert await writing == watch.batches[0].revision
            proxy.swallow_answers = False
            with pytest.raises(LeaseGoneError):
                await store.put(prefix + "k", "2", lease)

    asyncio.run(scenario())


def test_a_grant_whose_answer_was_lost_makes_one_lease(shared_server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        async with two_ways(shared_server) as (store, proxy, other):
            proxy.swallow_answers = True
            lease = await store.grant(60.0)
            assert await other.keep_alive(lease) is not None
            response = (await other._calls.call(lambda line: line.lease.LeaseLeases, pb.LeaseLeasesRequest())).response
            assert [status.ID for status in response.leases] == [lease]
            await other.revoke(lease)

    asyncio.run(scenario())


def test_registers_are_nobodys_business_and_go_with_the_store(shared_server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        store, other = EtcdStore(options([shared_server]), prefix + "r/"), EtcdStore(options([shared_server]))
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            await asyncio.gather(*(store.put(f"{prefix}{n}", "") for n in range(5)))
            await watch.until(lambda w: len(w.seen) == 5)
        assert all("r/" not in key for key, _ in watch.seen)
        assert len((await store.list(prefix)).entries) == 5
        assert 1 <= len((await other.list(prefix + "r/")).entries) <= 5
        await store.close()
        assert (await other.list(prefix + "r/")).entries == ()
        await other.close()

    asyncio.run(scenario())
