"""The store's contract, and its embedded implementation.

Everything that must survive a controller or be agreed on goes through here: get, prefix list with a revision, put, transactions that compare several keys, leases,
watches from a revision. It knows keys and text values; it must never know what they mean. `MemoryStore` lives in one agent's process (one node); `shell/etcd.py`
implements the same contract over etcd v3, and one test suite runs against both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value. `created` and `modified` are store revisions; `lease` 0: lives until deleted."""

    key: str
    value: str
    created: int
    modified: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries under a prefix, by key, as they were at `revision`; watch from `revision + 1` to miss nothing."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Created:
    """Compare: the key exists and was created at this revision (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Modified:
    """Compare: the key was last modified at this revision (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, bound to a lease unless 0."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key if it is there."""

    key: str


Compare = Created | Modified
Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transaction did. `revision` is the store's after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A key has a new entry, or None: it is gone (deleted, or its lease ended)."""

    key: str
    entry: Entry | None
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes of one revision that a watch covers. `reset`: the history was compacted; the changes are a fresh, complete list."""

    changes: tuple[Change, ...]
    revision: int
    reset: bool = False


class LeaseGoneError(KeyError):
    """A write names a lease that has ended or never was: nothing was written."""


class Store(Protocol):
    """The contract. Every method may raise PlatformError (exit code 69) when the store cannot be reached within its timeout."""

    async def get(self, key: str) -> Entry | None:
        """The key's entry, None where there is none."""
        ...

    async def list(self, prefix: str) -> Listing:
        """All entries whose key starts with the prefix."""
        ...

    async def put(self, key: str, value: str, lease: int = 0) -> int:
        """Write unconditionally; returns the revision. Raises LeaseGoneError."""
        ...

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """Apply all operations at one revision if every compare holds, else none. Raises LeaseGoneError, ValueError for a key named by two operations."""
        ...

    async def grant(self, ttl_s: float) -> int:
        """A new lease; its keys vanish `ttl_s` seconds after the last keep-alive, or somewhat later (etcd counts whole seconds, and anew from each change of
        its leader), never earlier."""
        ...

    async def keep_alive(self, lease: int) -> float | None:
        """Renew once. Returns the local deadline (CLOCK_BOOTTIME seconds, counted from before the call), None when the lease is gone."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        ...

    def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        """Every change under the prefix from this revision on, in order, none twice; ends when the store is closed. Where the history is compacted away (at
        any time, not only at first) a `reset` takes the place of what is lost: whatever it does not list is gone. Abandon it with `aclose`."""
        ...

    async def close(self) -> None:
        """End all watches and connections."""
        ...


def require_distinct(operations: Sequence[Operation]) -> None:
    """ValueError where a transaction has two operations on one key: their order would mean something, and no revision could show it."""
    keys = [operation.key for operation in operations]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a transaction may name each key once: {', '.join(keys)}")


def boottime_s() -> float:
    """CLOCK_BOOTTIME in seconds: goes on while the machine is suspended, so a local lease deadline cannot be slept through."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    timer: asyncio.TimerHandle
    keys: set[str] = field(default_factory=set)


class _Watch:
    """A queue of changes under one prefix."""

    def __init__(self, prefix: str, revision: int) -> None:
        self.prefix = prefix
        self.revision = revision
        self.queue: asyncio.Queue[Changes | None] = asyncio.Queue()

    def offer(self, changes: Sequence[Change], revision: int) -> None:
        """Queue what concerns this watch."""
        mine = tuple(c for c in changes if c.key.startswith(self.prefix))
        if mine and revision >= self.revision:
            self.queue.put_nowait(Changes(mine, revision))


class MemoryStore:
    """The contract in a dictionary, for one node. Keeps the whole history of the last changes so that a watch may start in the past."""

    HISTORY = 10_000

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = 1
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._watches: set[_Watch] = set()
        self._history: list[tuple[int, tuple[Change, ...]]] = []

    async def get(self, key: str) -> Entry | None:
        """See Store."""
        return self._entries.get(key)

    async def list(self, prefix: str) -> Listing:
        """See Store."""
        found = tuple(e for k, e in sorted(self._entries.items()) if k.startswith(prefix))
        return Listing(found, self._revision)

    async def put(self, key: str, value: str, lease: int = 0) -> int:
        """See Store."""
        return self._apply([Put(key, value, lease)])

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """See Store."""
        require_distinct(operations)
        if not all(self._holds(c) for c in compares):
            return Outcome(False, self._revision)
        return Outcome(True, self._apply(operations))

    def _holds(self, compare: Compare) -> bool:
        entry = self._entries.get(compare.key)
        actual = 0 if entry is None else (entry.created if isinstance(compare, Created) else entry.modified)
        return actual == compare.revision

    def _apply(self, operations: Sequence[Operation]) -> int:
        for op in operations:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise LeaseGoneError(f"lease {op.lease} is gone")
        revision = self._revision + 1
        changes = tuple(c for c in (self._one(op, revision) for op in operations) if c is not None)
        if changes:
            self._revision = revision
            self._history.append((revision, changes))
            del self._history[: -self.HISTORY]
            for watch in self._watches:
                watch.offer(changes, revision)
        return self._revision

    def _one(self, op: Operation, revision: int) -> Change | None:
        old = self._entries.get(op.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(op.key)
        if isinstance(op, Delete):
            return Change(op.key, None, revision) if self._entries.pop(op.key, None) else None
        entry = Entry(op.key, op.value, old.created if old else revision, revision, op.lease)
        self._entries[op.key] = entry
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        return Change(op.key, entry, revision)

    async def grant(self, ttl_s: float) -> int:
        """See Store."""
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = _Lease(ttl_s, self._arm(lease, ttl_s))
        return lease

    def _arm(self, lease: int, ttl_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s, self._expire, lease)

    def _expire(self, lease: int) -> None:
        found = self._leases.get(lease)
        if found is not None:
            self._apply([Delete(k) for k in sorted(found.keys)])
            found.timer.cancel()
            del self._leases[lease]

    async def keep_alive(self, lease: int) -> float | None:
        """See Store."""
        found = self._leases.get(lease)
        if found is None:
            return None
        found.timer.cancel()
        found.timer = self._arm(lease, found.ttl_s)
        return boottime_s() + found.ttl_s

    async def revoke(self, lease: int) -> None:
        """See Store."""
        self._expire(lease)

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        """See Store."""
        watch = _Watch(prefix, revision)
        if revision <= self._revision and len(self._history) >= self.HISTORY and revision < self._history[0][0]:
            listing = await self.list(prefix)
            fresh = tuple(Change(e.key, e, e.modified) for e in listing.entries)
            watch.queue.put_nowait(Changes(fresh, listing.revision, reset=True))
        else:
            for at, changes in self._history:
                watch.offer(changes, at)
        self._watches.add(watch)
        try:
            while (batch := await watch.queue.get()) is not None:
                yield batch
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        """See Store."""
        for lease in list(self._leases.values()):
            lease.timer.cancel()
        for watch in self._watches:
            watch.queue.put_nowait(None)
