"""A bystander of `bench/store.py`, in a process of its own: reads one key of etcd ten times a second. `pinger.py HOST:PORT FILE`: a line of CLOCK_MONOTONIC ns and seconds for each."""

from __future__ import annotations

import asyncio
import sys
import time

from ft_launcher.config import StoreOptions
from ft_launcher.shell.etcd import EtcdStore

EVERY_S = 0.1


async def main() -> None:
    """Ask until killed."""
    host, _, port = sys.argv[1].rpartition(":")
    store = EtcdStore(StoreOptions(kind="etcd", endpoints=((host, int(port)),), timeout_s=60))
    with open(sys.argv[2], "a", buffering=1) as file:
        while True:
            asked_ns = time.monotonic_ns()
            await store.get("/ping")
            file.write(f"{asked_ns} {(time.monotonic_ns() - asked_ns) / 1e9:.4f}\n")
            await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(main())
