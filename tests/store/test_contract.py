"""The contract of `shell/store.py`, kept by the embedded store and by a real etcd alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from ft_launcher.shell.etcd import EtcdStore
from ft_launcher.shell.store import (
    Created,
    Delete,
    LeaseGoneError,
    MemoryStore,
    Modified,
    Operation,
    Put,
    Store,
    boottime_s,
)
from tests.store.observe import Recorder, options, run

Body = Callable[[Store, str], Awaitable[None]]
NO_LEASE = 12345


def contract(body: Body) -> Callable[..., None]:
    """Makes a test of a scenario: once with each kind of store."""

    @pytest.mark.parametrize("kind", ["memory", "etcd"])
    def test(kind: str, prefix: str, request: pytest.FixtureRequest) -> None:
        if kind == "memory":
            run(MemoryStore, body, prefix)
        else:
            opts = options([request.getfixturevalue("shared_server")])
            run(lambda: EtcdStore(opts), body, prefix)

    test.__doc__ = body.__doc__
    return test


@contract
async def test_a_key_is_absent_written_and_overwritten(store: Store, p: str) -> None:
    assert await store.get(p + "k") is None
    first = await store.put(p + "k", "1")
    second = await store.put(p + "k", "2")
    found = await store.get(p + "k")
    assert found is not None and second > first
    assert (found.key, found.value, found.created, found.modified, found.lease) == (p + "k", "2", first, second, 0)


@contract
async def test_a_key_made_again_has_a_new_creation(store: Store, p: str) -> None:
    first = await store.put(p + "k", "1")
    await store.transact([], [Delete(p + "k")])
    second = await store.put(p + "k", "1")
    found = await store.get(p + "k")
    assert found is not None and found.created == second > first


@contract
async def test_a_list_is_sorted_and_exact(store: Store, p: str) -> None:
    names = ["b/2", "b/1", "b/10", "b", "b0", "a/9", "b/é", "b/\U0001f680"]
    for name in names:
        await store.put(p + name, name)
    revision = await store.put(p + "c/1", "")
    listing = await store.list(p + "b/")
    assert [e.key.removeprefix(p) for e in listing.entries] == ["b/1", "b/10", "b/2", "b/é", "b/\U0001f680"]
    assert all(p + e.value == e.key for e in listing.entries)
    assert listing.revision >= revision


@contract
async def test_a_watch_from_a_list_misses_nothing_even_of_an_empty_one(store: Store, p: str) -> None:
    listing = await store.list(p)
    assert listing.entries == ()
    await store.put(p + "k", "before the watch")
    async with Recorder(store, p, listing.revision + 1) as watch:
        await watch.until(lambda w: len(w.seen) == 1)
        await store.put(p + "k", "after")
        await watch.until(lambda w: len(w.seen) == 2)
    assert watch.seen == [("k", "before the watch"), ("k", "after")]


@contract
async def test_values_of_every_kind_come_back(store: Store, p: str) -> None:
    for value in ("", "\0", "line\nline\r\n", "é\U0001f680", '{"json": [1, 2]}', "x" * 262_144):
        await store.put(p + "k", value)
        found = await store.get(p + "k")
        assert found is not None and found.value == value


@contract
async def test_one_of_two_creations_wins(store: Store, p: str) -> None:
    first = await store.transact([Created(p + "leader", 0)], [Put(p + "leader", "a")])
    second = await store.transact([Created(p + "leader", 0)], [Put(p + "leader", "b"), Put(p + "other", "b")])
    found = await store.get(p + "leader")
    assert first.succeeded and not second.succeeded
    assert found is not None and (found.value, found.created) == ("a", first.revision)
    assert await store.get(p + "other") is None, "nothing of a failed transaction is applied"


@contract
async def test_of_many_rivals_exactly_one_wins(store: Store, p: str) -> None:
    rivals = [store.transact([Created(p + "leader", 0)], [Put(p + "leader", str(n))]) for n in range(20)]
    outcomes = await asyncio.gather(*rivals)
    found = await store.get(p + "leader")
    winners = [n for n, outcome in enumerate(outcomes) if outcome.succeeded]
    assert found is not None and winners == [int(found.value)]
    assert outcomes[winners[0]].revision == found.created


@contract
async def test_a_counter_loses_no_increment(store: Store, p: str) -> None:
    async def increment(times: int) -> None:
        while times:
            found = await store.get(p + "n")
            value, revision = (int(found.value), found.modified) if found else (0, 0)
            times -= (await store.transact([Modified(p + "n", revision)], [Put(p + "n", str(value + 1))])).succeeded

    await asyncio.gather(*(increment(10) for _ in range(5)))
    found = await store.get(p + "n")
    assert found is not None and found.value == "50"


@contract
async def test_a_deposed_controller_writes_nothing(store: Store, p: str) -> None:
    """The fencing of docs/design.md: the leader key's creation and the job's modification are compared in the same transaction."""
    mine = await store.transact([Created(p + "leader", 0)], [Put(p + "leader", "a")])
    job = await store.transact([Created(p + "leader", mine.revision), Modified(p + "job", 0)], [Put(p + "job", "1")])
    await store.transact([], [Delete(p + "leader")])
    theirs = await store.transact([Created(p + "leader", 0)], [Put(p + "leader", "a")])
    late = await store.transact([Created(p + "leader", mine.revision), Modified(p + "job", job.revision)], [Put(p + "job", "2")])
    new = await store.transact([Created(p + "leader", theirs.revision), Modified(p + "job", job.revision)], [Put(p + "job", "3")])
    found = await store.get(p + "job")
    assert (mine.succeeded, job.succeeded, theirs.succeeded, late.succeeded, new.succeeded) == (True, True, True, False, True)
    assert found is not None and (found.value, found.modified) == ("3", new.revision)


@contract
async def test_a_transaction_is_one_revision_and_one_batch(store: Store, p: str) -> None:
    start = await store.put(p + "gone", "x")
    async with Recorder(store, p, start + 1) as watch:
        outcome = await store.transact([Modified(p + "gone", start)], [Put(p + "a", "1"), Put(p + "b", "2"), Delete(p + "gone")])
        await watch.until(lambda w: bool(w.batches))
    batch = watch.batches[0]
    assert {(c.key.removeprefix(p), c.entry and c.entry.value) for c in batch.changes} == {("a", "1"), ("b", "2"), ("gone", None)}
    assert {batch.revision, outcome.revision} == {c.revision for c in batch.changes} | {c.entry.modified for c in batch.changes if c.entry}
    assert not batch.reset


@contract
async def test_deleting_what_is_not_there_changes_nothing(store: Store, p: str) -> None:
    start = (await store.list(p)).revision
    async with Recorder(store, p, start + 1) as watch:
        assert (await store.transact([Created(p + "k", 0)], [Delete(p + "k")])).succeeded
        await store.put(p + "k", "sign")
        await watch.until(lambda w: bool(w.seen))
    assert watch.seen == [("k", "sign")]


@contract
async def test_compares_alone_answer(store: Store, p: str) -> None:
    revision = await store.put(p + "k", "1")
    yes = await store.transact([Created(p + "k", revision), Modified(p + "none", 0)], [])
    no = await store.transact([Modified(p + "k", revision - 1)], [])
    assert yes.succeeded and not no.succeeded and yes.revision >= revision


@contract
async def test_a_transaction_names_each_key_once(store: Store, p: str) -> None:
    with pytest.raises(ValueError, match="each key once"):
        await store.transact([], [Put(p + "k", "1"), Delete(p + "k")])
    assert await store.get(p + "k") is None


@contract
async def test_watches_see_everything_once_and_in_order(store: Store, p: str) -> None:
    start = (await store.list(p)).revision
    async with (
        Recorder(store, p + "a/", start + 1) as one,
        Recorder(store, p, start + 1) as both,
        Recorder(store, p + "b/", start + 1) as other,
    ):
        await asyncio.gather(*(store.put(f"{p}{'ab'[n % 2]}/{n}", str(n)) for n in range(60)))
        await both.until(lambda w: len(w.seen) >= 60)
        await one.until(lambda w: len(w.seen) >= 30)
        await other.until(lambda w: len(w.seen) >= 30)
    for watch, mine in ((one, range(0, 60, 2)), (other, range(1, 60, 2)), (both, range(60))):
        assert sorted(int(v or -1) for v in watch.values) == list(mine)
        revisions = [batch.revision for batch in watch.batches]
        assert revisions == sorted(set(revisions))


@contract
async def test_a_watch_begins_in_the_past(store: Store, p: str) -> None:
    revisions = [await store.put(p + "k", str(n)) for n in range(5)]
    async with Recorder(store, p, revisions[2]) as watch:
        await watch.until(lambda w: len(w.seen) == 3)
        await store.put(p + "k", "5")
        await watch.until(lambda w: len(w.seen) == 4)
    assert watch.values == ["2", "3", "4", "5"]
    assert [b.revision for b in watch.batches[:3]] == revisions[2:]


@contract
async def test_a_watch_of_the_future_waits_for_it(store: Store, p: str) -> None:
    now = await store.put(p + "k", "0")
    async with Recorder(store, p, now + 2) as watch:
        await store.put(p + "k", "1")
        await store.put(p + "k", "2")
        await watch.until(lambda w: bool(w.seen))
    assert watch.values == ["2"]


@contract
async def test_closing_ends_every_watch(store: Store, p: str) -> None:
    revision = await store.put(p + "k", "1")
    async with Recorder(store, p, revision) as one, Recorder(store, p + "none", revision) as two:
        await one.until(lambda w: len(w.seen) == 1)
        await store.close()
        await one.until(lambda w: w.ended)
        await two.until(lambda w: w.ended)
    assert one.error is None and two.error is None


@contract
async def test_a_lease_that_is_not_kept_takes_its_keys_along(store: Store, p: str) -> None:
    lease = await store.grant(1.0)
    revision = await store.put(p + "mine", "1", lease)
    await store.put(p + "also", "2", lease)
    found = await store.get(p + "mine")
    assert found is not None and found.lease == lease
    async with Recorder(store, p, revision + 2) as watch:
        await watch.until(lambda w: len(w.seen) == 2)
    assert sorted(watch.seen) == [("also", None), ("mine", None)]
    assert len(watch.batches) == 1
    assert await store.get(p + "mine") is None
    assert await store.keep_alive(lease) is None


@contract
async def test_a_lease_that_is_kept_lives_on(store: Store, p: str) -> None:
    lease = await store.grant(1.0)
    await store.put(p + "k", "1", lease)
    born = boottime_s()
    while boottime_s() < born + 1.8:
        before = boottime_s()
        deadline = await store.keep_alive(lease)
        if deadline is None:
            pytest.skip("this machine stood still for longer than the lease")
        assert before + 1.0 <= deadline <= boottime_s() + 1.0
        await asyncio.sleep(0.2)
    assert await store.get(p + "k") is not None


@contract
async def test_no_key_vanishes_before_the_deadline(store: Store, p: str) -> None:
    lease = await store.grant(1.0)
    revision = await store.put(p + "k", "1", lease)
    deadline = await store.keep_alive(lease)
    async with Recorder(store, p, revision + 1) as watch:
        await watch.until(lambda w: bool(w.seen))
        assert deadline is not None and boottime_s() >= deadline


@contract
async def test_revoking_ends_a_lease_at_once_and_only_once(store: Store, p: str) -> None:
    lease, other = await store.grant(60.0), await store.grant(60.0)
    await store.put(p + "a", "1", lease)
    await store.put(p + "b", "1", other)
    await store.revoke(lease)
    await store.revoke(lease)
    assert [e.key for e in (await store.list(p)).entries] == [p + "b"]
    assert await store.keep_alive(lease) is None
    await store.revoke(other)


@contract
async def test_a_write_on_a_lease_that_is_gone_writes_nothing(store: Store, p: str) -> None:
    lease = await store.grant(60.0)
    await store.revoke(lease)
    for gone in (lease, NO_LEASE):
        with pytest.raises(LeaseGoneError):
            await store.put(p + "k", "1", gone)
        with pytest.raises(LeaseGoneError):
            await store.transact([Created(p + "k", 0)], [Put(p + "free", "1"), Put(p + "k", "1", gone)])
    assert (await store.list(p)).entries == ()
    await store.put(p + "k", "1")
    assert not (await store.transact([Created(p + "k", 0)], [Put(p + "k", "2", lease)])).succeeded


@contract
async def test_a_key_written_without_its_lease_outlives_it(store: Store, p: str) -> None:
    lease = await store.grant(60.0)
    await store.put(p + "k", "1", lease)
    await store.put(p + "k", "2")
    await store.revoke(lease)
    found = await store.get(p + "k")
    assert found is not None and (found.value, found.lease) == ("2", 0)


@contract
async def test_lease_ids_are_not_used_again(store: Store, p: str) -> None:
    leases = [await store.grant(60.0) for _ in range(20)]
    assert len(set(leases)) == 20 and all(leases)
    for lease in leases:
        await store.revoke(lease)


def _random_step(rng: random.Random, p: str, known: dict[str, tuple[int, int]]) -> tuple[list[tuple[str, str, int]], list[Operation]]:
    """(compares as (kind, key, 0 absent | 1 right | 2 wrong), operations), the same for whoever has the same random numbers."""
    keys = [p + name for name in ("a", "b", "c", "d")]
    compares = [(rng.choice(["created", "modified"]), rng.choice(keys), rng.choice([0, 1, 1, 1, 2])) for _ in range(rng.randrange(3))]
    chosen = rng.sample(keys, rng.randrange(1, 4))
    return compares, [Put(key, str(rng.randrange(100))) if rng.random() < 0.7 else Delete(key) for key in chosen]


async def _play(store: Store, p: str, seed: int) -> tuple[list[bool], list[list[tuple[str, str | None]]]]:
    """Random transactions on a few keys: which succeeded, and what a watch saw, batch by batch."""
    rng = random.Random(seed)
    known: dict[str, tuple[int, int]] = {}
    outcomes = []
    start = (await store.list(p)).revision
    async with Recorder(store, p, start + 1) as watch:
        for _ in range(120):
            compares, operations = _random_step(rng, p, known)
            built = [
                (Created if kind == "created" else Modified)(key, (0, known.get(key, (0, 0))[kind != "created"], 10**9)[what])
                for kind, key, what in compares
            ]
            outcomes.append((await store.transact(built, operations)).succeeded)
            known = {e.key: (e.created, e.modified) for e in (await store.list(p)).entries}
        await store.put(p + "end", "")
        await watch.until(lambda w: w.seen[-1:] == [("end", "")])
    return outcomes, [sorted((c.key.removeprefix(p), c.entry and c.entry.value) for c in b.changes) for b in watch.batches]


@contract
async def test_random_transactions_go_as_in_the_embedded_store(store: Store, p: str) -> None:
    twin = MemoryStore()
    for seed in (1, 2):
        assert await _play(store, f"{p}{seed}/", seed) == await _play(twin, f"{p}{seed}/", seed)
    await twin.close()
