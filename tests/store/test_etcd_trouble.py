"""A store whose server restarts, freezes, is rebuilt, compacts, or is slow and far away: nothing is lost, repeated or made up."""

from __future__ import annotations

import asyncio
import time

import pytest

from ft_launcher.errors import PlatformError
from ft_launcher.shell.etcd import EtcdStore
from ft_launcher.shell.store import Created, Delete, Put
from tests.store.etcd_server import EtcdServer, leader
from tests.store.observe import LONG_S, Recorder, calls_of, compact, options, run_etcd, until_away
from tests.store.proxy import Proxy


async def numbered_puts(store: EtcdStore, key: str, stop: asyncio.Event) -> int:
    """Write 0, 1, 2, ... until told to stop. Returns how many."""
    count = 0
    while not stop.is_set():
        await store.put(key, str(count))
        count += 1
        await asyncio.sleep(0.005)
    return count


def each_once(watch: Recorder, count: int) -> bool:
    return watch.values == [str(n) for n in range(count)]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_restart_of_the_server_loses_no_event_and_repeats_none(server: EtcdServer, prefix: str, how: str) -> None:
    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        lease = await store.grant(60.0)
        async with Recorder(store, prefix, start + 1) as watch, Recorder(store, prefix + "k", start + 1) as other:
            stop = asyncio.Event()
            writing = asyncio.create_task(numbered_puts(store, prefix + "k", stop))
            for _ in range(2):
                seen = len(watch.seen)
                await watch.until(lambda w, seen=seen: len(w.seen) > seen + 5)
                await asyncio.to_thread(getattr(server, how))
                await until_away(store)
                await asyncio.to_thread(server.start)
            seen = len(watch.seen)
            await watch.until(lambda w: len(w.seen) > seen + 5)
            stop.set()
            count = await writing
            for recorder in (watch, other):
                await recorder.until(lambda w: len(w.seen) >= count)
                assert each_once(recorder, count), recorder.values
                assert not any(batch.reset for batch in recorder.batches)
        assert await store.keep_alive(lease) is not None

    run_etcd(options([server]), body)


def test_a_server_that_freezes_for_three_seconds(server: EtcdServer, prefix: str) -> None:
    """Frozen, its connections stay open: only our own calls can tell. Writes go on afterwards, once each."""
    turns: list[bool] = []

    async def body(store: EtcdStore) -> None:
        store.health.listen(turns.append)
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            await store.put(prefix + "k", "0")
            await watch.until(lambda w: bool(w.seen))
            assert store.health.since_s is not None and turns == []
            server.pause()
            frozen = time.monotonic()
            writing = asyncio.create_task(store.put(prefix + "k", "1"))
            await until_away(store)
            await asyncio.sleep(max(0.0, frozen + 3.0 - time.monotonic()))
            assert not writing.done() and turns == [False]
            server.resume()
            await writing
            await store.put(prefix + "k", "2")
            await watch.until(lambda w: len(w.seen) >= 3)
        assert each_once(watch, 3), watch.values
        assert turns == [False, True] and not store.health.away

    run_etcd(options([server]), body)


def test_an_idle_store_notices_by_itself_that_it_is_away(server: EtcdServer, prefix: str) -> None:
    """Nobody calls: the pulse of the watch does."""

    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1):
            server.pause()
            await until_away(store)
            server.resume()
            async with asyncio.timeout(LONG_S):
                while store.health.away:
                    await asyncio.sleep(0.02)

    run_etcd(options([server]), body)


def test_a_watch_of_a_compacted_past_lists_again(server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        first = await store.put(prefix + "a", "1")
        await store.put(prefix + "b", "1")
        await store.transact([], [Delete(prefix + "a")])
        last = await store.put(prefix + "b", "2")
        await compact(store, last)
        async with Recorder(store, prefix, first) as watch:
            await watch.until(lambda w: bool(w.batches))
            await store.put(prefix + "c", "3")
            await watch.until(lambda w: len(w.batches) == 2)
        assert [b.reset for b in watch.batches] == [True, False]
        assert watch.seen == [("b", "2"), ("c", "3")]
        assert watch.batches[0].revision >= last

    run_etcd(options([server]), body)


def test_compaction_while_the_connection_was_cut(server: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        direct = EtcdStore(options([server]))
        async with Proxy(server.endpoint) as proxy:
            store = EtcdStore(options([proxy.endpoint]))
            start = await store.put(prefix + "a", "1")
            async with Recorder(store, prefix, start) as watch:
                await watch.until(lambda w: bool(w.seen))
                proxy.refuse = True
                proxy.cut()
                await direct.transact([], [Delete(prefix + "a")])
                last = await direct.put(prefix + "b", "2")
                await compact(direct, last)
                proxy.refuse = False
                await watch.until(lambda w: len(w.batches) == 2)
                await direct.put(prefix + "b", "3")
                await watch.until(lambda w: len(w.batches) == 3)
            await store.close()
        await direct.close()
        assert [b.reset for b in watch.batches] == [False, True, False]
        assert watch.seen == [("a", "1"), ("b", "2"), ("b", "3")]

    asyncio.run(scenario())


def test_a_store_that_was_rebuilt_says_so_instead_of_being_silent(server: EtcdServer, prefix: str) -> None:
    """Revisions start again at 1: a watch from the old position would wait for a future that nobody writes."""

    async def body(store: EtcdStore) -> None:
        for n in range(50):
            start = await store.put(prefix + "k", str(n))
        async with Recorder(store, prefix, start) as watch:
            await watch.until(lambda w: bool(w.seen))
            await asyncio.to_thread(server.kill)
            server.wipe()
            await asyncio.to_thread(server.start)
            await watch.until(lambda w: w.batches[-1].reset)
            assert watch.batches[-1].changes == ()
            await EtcdStore(options([server])).put(prefix + "new", "1")
            await watch.until(lambda w: w.seen[-1:] == [("new", "1")])

    run_etcd(options([server]), body)


def test_a_leader_that_is_killed_loses_no_event(servers: list[EtcdServer], prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            stop = asyncio.Event()
            writing = asyncio.create_task(numbered_puts(store, prefix + "k", stop))
            await watch.until(lambda w: len(w.seen) > 5)
            victim = await asyncio.to_thread(leader, servers)
            await asyncio.to_thread(victim.kill)
            seen = len(watch.seen)
            await watch.until(lambda w: len(w.seen) > seen + 20)
            await asyncio.to_thread(victim.start)
            follower = next(s for s in servers if s is not victim)
            await asyncio.to_thread(follower.kill)
            seen = len(watch.seen)
            await watch.until(lambda w: len(w.seen) > seen + 20)
            stop.set()
            count = await writing
            await watch.until(lambda w: len(w.seen) >= count)
        assert each_once(watch, count), watch.values

    run_etcd(options(servers), body)


def test_a_frozen_member_loses_its_watches_to_the_others(servers: list[EtcdServer], prefix: str) -> None:
    """The member that the watch hangs on freezes; the cluster lives. An idle watcher must hear of what the others write."""

    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            await store.put(prefix + "k", "0")
            await watch.until(lambda w: len(w.seen) == 1)
            name = calls_of(store).endpoint.name
            frozen = next(s for s in servers if name.endswith(f":{s.client}"))
            frozen.pause()
            writer = EtcdStore(options([s for s in servers if s is not frozen]))
            await writer.put(prefix + "k", "1")
            await writer.close()
            await watch.until(lambda w: len(w.seen) == 2)
            frozen.resume()
            await store.put(prefix + "k", "2")
            await watch.until(lambda w: len(w.seen) >= 3)
        assert each_once(watch, 3), watch.values

    run_etcd(options(servers), body)


def test_a_slow_network_is_slow_but_works(shared_server: EtcdServer, prefix: str) -> None:
    """An answer takes longer than the first deadline: the deadline grows, and no write is done twice."""

    async def scenario() -> None:
        async with Proxy(shared_server.endpoint) as proxy:
            store, direct = EtcdStore(options([proxy.endpoint])), EtcdStore(options([shared_server]))
            start = (await direct.list(prefix)).revision
            async with Recorder(direct, prefix, start + 1) as watch, Recorder(store, prefix, start + 1) as slow:
                await store.put(prefix + "k", "0")
                proxy.delay_s = 0.4
                await store.put(prefix + "k", "1")
                assert (await store.transact([Created(prefix + "once", 0)], [Put(prefix + "once", "2")])).succeeded
                await watch.until(lambda w: len(w.seen) >= 3)
                await slow.until(lambda w: len(w.seen) >= 3)
            proxy.delay_s = 0.0
            await store.close()
            await direct.close()
        assert each_once(watch, 3) and each_once(slow, 3), (watch.values, slow.values)

    asyncio.run(scenario())


def test_a_connection_that_swallows_everything_is_replaced(shared_server: EtcdServer, prefix: str) -> None:
    """As after a cut of the network: the old connection never recovers, a new one works."""

    async def scenario() -> None:
        async with Proxy(shared_server.endpoint) as proxy:
            store = EtcdStore(options([proxy.endpoint]))
            start = (await store.list(prefix)).revision
            async with Recorder(store, prefix, start + 1) as watch:
                await store.put(prefix + "k", "0")
                await watch.until(lambda w: bool(w.seen))
                proxy.swallow_requests = proxy.swallow_answers = True
                await until_away(store)
                old = set(proxy._writers)
                proxy.swallow_requests = proxy.swallow_answers = False
                for writer in old:  # what comes over these stays lost
                    writer.write = lambda data: None  # type: ignore[method-assign]
                await store.put(prefix + "k", "1")
                await watch.until(lambda w: len(w.seen) >= 2)
            await store.close()
        assert each_once(watch, 2), watch.values

    asyncio.run(scenario())


def test_a_watch_that_was_quiet_for_longer_than_the_timeout_goes_on(
    shared_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is for being without a stream, not without news."""
    monkeypatch.setattr("ft_launcher.shell.etcd_watch.SLOWEST_S", 0.0)

    async def scenario() -> None:
        async with Proxy(shared_server.endpoint) as proxy:
            store = EtcdStore(options([proxy.endpoint], timeout_s=2.0))
            start = (await store.list(prefix)).revision
            async with Recorder(store, prefix, start + 1) as watch:
                await store.put(prefix + "k", "0")
                await watch.until(lambda w: len(w.seen) == 1)
                await asyncio.sleep(2.5)
                proxy.cut()
                await store.put(prefix + "k", "1")
                await watch.until(lambda w: len(w.seen) == 2)
            await store.close()

    asyncio.run(scenario())


def test_a_cancelled_call_is_cancelled_and_the_store_goes_on(server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "1")
        server.pause()
        tasks = [asyncio.create_task(store.put(prefix + "k", "2")), asyncio.create_task(store.get(prefix + "k"))]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        server.resume()
        await store.put(prefix + "k", "3")
        found = await store.get(prefix + "k")
        assert found is not None and found.value == "3"

    run_etcd(options([server]), body)


def test_closing_in_the_middle_of_an_outage(server: EtcdServer, prefix: str) -> None:
    """A call that waits for the store ends with an error when the store is closed, not with silence."""

    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "1")
        await asyncio.to_thread(server.kill)
        async with Recorder(store, prefix, 1) as watch:
            waiting = asyncio.create_task(store.put(prefix + "k", "2"))
            await until_away(store)
            await store.close()
            with pytest.raises(PlatformError, match="closed"):
                await waiting
            await watch.until(lambda w: w.ended)
            assert watch.error is None

    run_etcd(options([server]), body)
