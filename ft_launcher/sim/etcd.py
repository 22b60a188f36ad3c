"""The fake etcd: keys with revisions and leases, one transaction after the other, and watches; slow, cut off or away as the world has it.

A call takes effect at one moment and is answered at a later one. While the store is away, or out of its caller's reach, either has to wait: so an answer may come long after the
effect, which is what an ambiguous transaction is once its client has found out. Nothing is written, seen or expired while the store is away.
Watches bring every change in order. It knows keys and values, not what they mean.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ft_launcher.sim.clock import Clock, Ticket
from ft_launcher.sim.host import Host


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; `created` and `modified` are revisions, `lease` 0: none."""

    value: Any
    created: int
    modified: int
    lease: int = 0


@dataclass(slots=True)
class Lease:
    """A lease. `expires_at`: None as long as its holder renews it."""

    number: int
    ttl_s: float
    keys: set[str] = field(default_factory=set)
    expires_at: float | None = None
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    host: Host
    effect: Callable[[], Any]
    answer: Callable[[Any], None]
    gives_up: Callable[[], None]
    asked_at: float


OnChange = Callable[[str, Entry | None, int], None]
"""(key, its new entry or None for gone, revision)."""


class Watch:
    """One client's watch of a prefix: changes in order, each when it can be there."""

    def __init__(self, store: Etcd, host: Host, prefix: str, told: OnChange) -> None:
        self.prefix = prefix
        self.closed = False
        self._store = store
        self._host = host
        self._told = told
        self._queue: deque[tuple[float, str, Entry | None, int]] = deque()
        self._late = False

    def push(self, key: str, entry: Entry | None, revision: int) -> None:
        """A change has happened."""
        ready_at = self._store.clock.now + self._store.delay_s(self._host)
        self._queue.append((ready_at, key, entry, revision))
        self._store.clock.at(ready_at, self._pump)

    def _pump(self) -> None:
        store = self._store
        while self._queue and not self.closed and self._queue[0][0] <= store.clock.now:
            reach_at = store.reach_at(self._host)
            if reach_at > store.clock.now:
                store.clock.at(reach_at, self._pump)
                self._late = True
                return
            if self._late and store.compacts:
                self._list_anew()
            self._late = False
            _, key, entry, revision = self._queue.popleft()
            self._told(key, entry, revision)

    def _list_anew(self) -> None:
        """The revisions that were missed are compacted: of each key only what has become of it is seen."""
        newest = {key: (ready_at, key, entry, revision) for ready_at, key, entry, revision in self._queue}
        self._queue = deque(sorted(newest.values(), key=lambda change: change[3]))

    def close(self) -> None:
        """Nobody listens any more."""
        self.closed = True
        self._store.some_closed = True


class Etcd:
    """`timeout_s`: `--store-timeout`; `compacts`: a watch that was cut off finds a list instead of what it has missed.

    `away_until`: it does not exist for anybody until then. `watch_all`: the truth's own watch, at once. `some_closed`: watches to forget.
    """

    def __init__(self, clock: Clock, noise: random.Random, usual_s: float, timeout_s: float = math.inf, compacts: bool = False) -> None:
        self.clock = clock
        self.revision = 0
        self.keys: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.away_until = 0.0
        self.watch_all: Callable[[str, Entry | None], None] = lambda key, entry: None
        self._noise = noise
        self.timeout_s = timeout_s
        self.compacts = compacts
        self._usual_s = usual_s
        self.some_closed = False
        self._watches: dict[str, list[Watch]] = {}
        self._granted = 0

    def delay_s(self, host: Host) -> float:
        """How long one way takes now, for this machine."""
        slow_s = host.store_slow_s if self.clock.now < host.store_slow_until else 0.0
        return self._usual_s * self._noise.uniform(0.25, 1.0) + slow_s * self._noise.random()

    def reach_at(self, host: Host) -> float:
        """When this machine reaches the store next."""
        return max(self.clock.now, self.away_until, host.store_cut_until, host.isolated_until)

    def call(
        self, host: Host, effect: Callable[[], Any], answer: Callable[[Any], None], gives_up: Callable[[], None] = lambda: None
    ) -> None:
        """Have `effect` take place at the store, and `answer` get what it returned; both when they can. Who has no answer after `timeout_s` `gives_up`: the effect may have taken place."""
        self.clock.after(self.delay_s(host), self._arrive, _Call(host, effect, answer, gives_up, self.clock.now))

    def _arrive(self, call: _Call) -> None:
        reach_at = self.reach_at(call.host)
        if reach_at > self.clock.now:
            self._wait(call, reach_at, self._arrive, call)
            return
        self.clock.after(self.delay_s(call.host), self._answer, call, call.effect())

    def _answer(self, call: _Call, result: Any) -> None:
        reach_at = self.reach_at(call.host)
        if reach_at > self.clock.now:
            self._wait(call, reach_at, self._answer, call, result)
        else:
            call.answer(result)

    def _wait(self, call: _Call, until: float, then: Callable[..., None], *args: Any) -> None:
        over_at = call.asked_at + self.timeout_s
        if until < over_at:
            self.clock.at(until, then, *args)
        else:
            self.clock.at(over_at, call.gives_up)

    # -- keys: to be used within an effect ----------------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, lease: int = 0) -> int:
        """Write; returns the revision."""
        self.revision += 1
        old = self.keys.get(key)
        entry = Entry(value, old.created if old is not None else self.revision, self.revision, lease)
        self.keys[key] = entry
        if lease:
            self.leases[lease].keys.add(key)
        self._tell(key, entry)
        return self.revision

    def delete(self, key: str) -> None:
        """Remove, if it is there."""
        entry = self.keys.pop(key, None)
        if entry is None:
            return
        if entry.lease in self.leases:
            self.leases[entry.lease].keys.discard(key)
        self.revision += 1
        self._tell(key, None)

    def created(self, key: str) -> int:
        """The revision at which the key was created, 0 when there is none."""
        return self.keys[key].created if key in self.keys else 0

    def modified(self, key: str) -> int:
        """The revision at which the key was last written, 0 when there is none."""
        return self.keys[key].modified if key in self.keys else 0

    def under(self, prefix: str) -> list[tuple[str, Entry]]:
        """All keys under a prefix, in their order."""
        return sorted((key, entry) for key, entry in self.keys.items() if key.startswith(prefix))

    def _tell(self, key: str, entry: Entry | None) -> None:
        self.watch_all(key, entry)
        for prefix, watches in self._watches.items():
            if key.startswith(prefix):
                for watch in watches:
                    watch.push(key, entry, self.revision)

    def watch(self, host: Host, prefix: str, told: OnChange) -> Watch:
        """From now on, every change under the prefix."""
        if self.some_closed:
            self._watches = {p: [watch for watch in watches if not watch.closed] for p, watches in self._watches.items()}
            self.some_closed = False
        watch = Watch(self, host, prefix, told)
        self._watches.setdefault(prefix, []).append(watch)
        return watch

    # -- leases -------------------------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float) -> int:
        """A new lease, renewed until `unrenewed` is called."""
        self._granted += 1
        self.leases[self._granted] = Lease(self._granted, ttl_s)
        return self._granted

    def renewed(self, number: int) -> bool:
        """Its holder renews it (again). False when it has ended."""
        lease = self.leases.get(number)
        if lease is None:
            return False
        if lease.ticket is not None:
            lease.ticket.cancel()
        lease.expires_at, lease.ticket = None, None
        return True

    def unrenewed(self, number: int, last_s: float) -> None:
        """Its holder renews it no more; it did so last `last_s` seconds ago."""
        lease = self.leases.get(number)
        if lease is not None and lease.expires_at is None:
            self._expire_at(lease, self.clock.now - last_s + lease.ttl_s)

    def _expire_at(self, lease: Lease, when: float) -> None:
        if lease.ticket is not None:
            lease.ticket.cancel()
        lease.expires_at = when
        lease.ticket = self.clock.at(when, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        if self.away_until > self.clock.now:
            self._expire_at(lease, self.away_until)
        else:
            self.revoke(lease.number)

    def revoke(self, number: int) -> None:
        """End a lease, and every key on it."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return
        if lease.ticket is not None:
            lease.ticket.cancel()
        for key in sorted(lease.keys):
            self.delete(key)

    # -- outages ------------------------------------------------------------------------------------------------------------------------

    def go_away(self, seconds: float, forgets: bool) -> None:
        """Nobody reaches it for so long. `forgets`: what was not renewed meanwhile ends at once when it is back; else every lease gets its whole time anew (a new etcd leader)."""
        self.away_until = max(self.away_until, self.clock.now + seconds)
        if not forgets:
            self.clock.at(self.away_until, self._extend)

    def _extend(self) -> None:
        for lease in self.leases.values():
            if lease.expires_at is not None:
                self._expire_at(lease, max(lease.expires_at, self.clock.now + lease.ttl_s))
