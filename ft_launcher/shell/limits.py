"""Learned limits, from the nodes' samples to every agent's detector, and from one run to the next.

The controller's half of learning: it owns the pure `Learning`, puts what it concludes into the store (one key that every agent follows, one with everything learned, so that a
successor goes on) and hands both to the record (ft_state.json: what the next run starts with). It decides no limit itself and never blocks the controller on a disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ft_launcher.errors import PlatformError
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Created, Put, Store
from monitors.learning import Learning, Sample
from monitors.timeouts import Timeout

KEEP_EVERY_S = 10.0
"""What was learned without changing a limit is kept this often."""


class Pupil(Protocol):
    """Where conclusions are recorded, and where an earlier run's are found."""

    def learned(
        self, timeouts: Mapping[str, Timeout], distributions: Mapping[str, Mapping[str, object]], records: Mapping[str, object]
    ) -> None:
        """Limits and all that led to them, as they are now."""

    def learned_before(self) -> object:
        """What an earlier run has left, or None."""


class LimitsKeeper:
    """One controller's. `make(records)` builds the `Learning` of this job; None where timeouts are fixed."""

    def __init__(self, store: Store, keys: Keys, record: Pupil, make: Callable[[object], Learning]) -> None:
        self._store = store
        self._keys = keys
        self._record = record
        self._make = make
        self._learning: Learning | None = None
        self._nodes: dict[str, int] = {}
        self._cycle = -1
        self._leader = 0
        self._kept_at_s = 0.0
        self._queue: asyncio.Queue[tuple[str, int, Sequence[Sample]] | tuple[str, float]] = asyncio.Queue()

    def offer(self, node_id: str, cycle: int, samples: Sequence[Sample]) -> None:
        """What a node's ranks took; handled by `run`, beside the controller's own work."""
        self._queue.put_nowait((node_id, cycle, samples))

    def killed(self, section: str, after_s: float) -> None:
        """A rank was ended as hung in this section."""
        self._queue.put_nowait((section, after_s))

    async def run(self) -> None:
        """Learn until cancelled. A store that is away is no reason to stop: what could not be published is with the next change."""
        while True:
            item = await self._queue.get()
            with suppress(PlatformError):
                await (self._killed(*item) if len(item) == 2 else self._add(*item))

    async def load(self, leader_revision: int) -> None:
        """Go on from the store, else from what an earlier run left; agents know the limits before the first cycle starts."""
        self._leader = leader_revision
        entry = await self._store.get(self._keys.learning)
        records = _parsed(entry.value) if entry is not None else self._record.learned_before()
        self._learning = self._make(records)
        await self._publish()

    def begin_cycle(self, cycle: int, nodes: Sequence[str]) -> None:
        """A cycle starts on these nodes, in rank order."""
        if self._learning is not None and cycle != self._cycle:
            self._cycle, self._nodes = cycle, {node: i for i, node in enumerate(nodes)}
            self._learning.begin_cycle(len(nodes))

    async def _add(self, node_id: str, cycle: int, samples: Sequence[Sample]) -> None:
        """Of another cycle or an unknown node it is ignored."""
        if self._learning is None or cycle != self._cycle or node_id not in self._nodes:
            return
        changed = self._learning.add(self._nodes[node_id], samples)
        now_s = asyncio.get_running_loop().time()
        if changed or now_s - self._kept_at_s >= KEEP_EVERY_S:
            self._kept_at_s = now_s
            await self._publish()

    async def _killed(self, section: str, after_s: float) -> None:
        if self._learning is not None and self._learning.killed(section, after_s):
            await self._publish()

    async def _publish(self) -> None:
        """One transaction, fenced like every controller's write."""
        learning = self._learning
        if learning is None:
            return
        timeouts, records = learning.timeouts(), learning.to_json()
        limits = {name: [t.soft_s, t.hard_s, t.learned] for name, t in timeouts.items()}
        puts = [Put(self._keys.limits, json.dumps(limits)), Put(self._keys.learning, json.dumps(records))]
        await self._store.transact([Created(self._keys.leader, self._leader)], puts)
        self._record.learned(timeouts, learning.distributions(), records)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def limits_in(text: str) -> dict[str, tuple[float, float, bool]]:
    """What an agent reads: section -> (soft, hard, learned); empty for anything strange."""
    found: Any = _parsed(text)
    try:
        return {str(name): (float(soft), float(hard), bool(learned)) for name, (soft, hard, learned) in found.items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def samples_in(body: object) -> list[Sample]:
    """Samples as they travel: [[section, index, seconds], ...]. Raises TypeError or ValueError for anything else."""
    if not isinstance(body, list):
        raise TypeError("samples must be a list")
    return [Sample(str(section), int(index), float(seconds)) for section, index, seconds in body]
