"""The controller of `bench/store.py`, in a process of its own: the real one over a real etcd, with no ranks and no files. `governor.py HOST:PORT RUN_ID NODES RANKS_A_NODE`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from ft_launcher.config import StoreOptions
from ft_launcher.core.state import Options
from ft_launcher.core.topology import Topology
from ft_launcher.shell.controller import Controller, Job
from ft_launcher.shell.etcd import EtcdStore
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Store

TTL_S = 10.0
MANY = 1_000_000


class Silent:
    """A record that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Deaf:
    """Neighbours that never say that a node is lost: there are no agents to talk to, and what is measured is the store."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    async def close(self) -> None:
        """Nothing to hang up."""


async def keep(store: Store, lease: int) -> None:
    """The office's lease."""
    while True:
        await asyncio.sleep(TTL_S / 4)
        await store.keep_alive(lease)


async def main() -> None:
    """Govern until killed."""
    address, run_id, nodes, nproc = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    host, _, port = address.rpartition(":")
    store = EtcdStore(StoreOptions(kind="etcd", endpoints=((host, int(port)),), timeout_s=60))
    options = Options(nodes, nproc, can_join=True, max_restarts=MANY, no_progress_cycles=MANY, max_platform_faults=MANY)
    job = Job(Keys(run_id), 0, Topology.build(world=nodes * nproc, tp=nproc), options)
    lease = await store.grant(TTL_S)
    keeping = asyncio.create_task(keep(store, lease))
    name = '{"node": "governor", "address": "", "incarnation": ""}'
    await Controller(store, job, Silent(), name, lambda controller: Deaf()).run(lease)
    keeping.cancel()


if __name__ == "__main__":
    asyncio.run(main())
