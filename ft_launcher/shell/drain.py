"""`ft-launch drain NODE`: ask a running job to let a spare take over from a node, and say what became of it.

It looks before it asks: an unknown run or node, a job that is over or a node without a spare to follow it is refused in one line and nothing changes. The request is a key in
the store, so it outlives this command and the controller of the day; this command only waits until the node is gone, and may be interrupted. It knows keys and the job
state; it decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from ft_launcher.config import DrainOptions
from ft_launcher.core.evidence import NodeReport
from ft_launcher.core.state import JobState, Phase
from ft_launcher.errors import ConfigError, FTError
from ft_launcher.shell.follow import follow
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Delete, Put, Store

NO_SPARE = 75


class NoSpareError(FTError):
    """Nobody could take the node's place: the job would have to wait."""

    exit_code = NO_SPARE


def request(options: DrainOptions) -> int:
    """Ask, and wait until the node has left. Exit code 0. Raises ConfigError (run or node unknown, job over), NoSpareError (75), PlatformError (69)."""
    try:
        return asyncio.run(_request(options))
    except KeyboardInterrupt:
        _say(f"no longer waiting; the request to drain {options.node} stands")
        return 130


async def _request(options: DrainOptions) -> int:
    from ft_launcher.shell.etcd import EtcdStore

    keys = Keys(options.run_id)
    store = EtcdStore(options.store, registers=keys.registers)
    try:
        job = await _look(store, keys, options.node)
        await store.transact([], [Put(keys.drains + options.node, json.dumps({"at": time.time()}))])
        _say(f"asked for {options.node} to be drained from run {options.run_id}")
        said = await _until_gone(store, keys, options.node, job)
        await store.transact([], [Delete(keys.drains + options.node)])
        _say(said)
        return 0
    finally:
        await store.close()


async def _look(store: Store, keys: Keys, node: str) -> JobState:
    """The job as it is, if the request makes sense."""
    entry = await store.get(keys.job)
    if entry is None:
        raise ConfigError(
            f"drain {node}: the store knows no run {keys.run_id!r}; --run-id is the id that the run's ft-launch said at its start"
        )
    job = JobState.from_json(json.loads(entry.value))
    if job.phase is Phase.DONE:
        raise ConfigError(f"drain {node}: run {keys.run_id!r} is over ({job.reason})")
    nodes = sorted(e.key.removeprefix(keys.nodes) for e in (await store.list(keys.nodes)).entries)
    if node not in nodes:
        raise ConfigError(f"drain {node}: run {keys.run_id!r} has no such node; it has {', '.join(nodes) or 'none'}")
    holders = job.placement.nodes if job.placement is not None else ()
    if node in holders and not await _spares(store, keys, job, nodes):
        raise NoSpareError(
            f"drain {node}: no spare can take its place, and the job cannot go on without; start ft-launch on another node first"
        )
    return job


async def _spares(store: Store, keys: Keys, job: JobState, nodes: list[str]) -> list[str]:
    holders = set(job.placement.nodes) if job.placement is not None else set()
    reports = [NodeReport.from_json(json.loads(e.value)) for e in (await store.list(keys.reports)).entries]
    warm = {r.node_id for r in reports if r.reaped and r.standby is not None and r.unfit is None}
    barred = {record.node for record in job.hardware.values() if record.quarantined} | set(job.leaving)
    return [n for n in nodes if n in warm and n not in holders and n not in barred]


async def _until_gone(store: Store, keys: Keys, node: str, job: JobState) -> str:
    """Until the node holds no ranks and its agent is gone, or the job is over: what happened, one sentence."""
    gone = asyncio.create_task(_until_unregistered(store, keys, node))
    over = asyncio.create_task(_until_over(store, keys))
    try:
        done, _ = await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) is not None:
                raise error
        entry = await store.get(keys.job)
        now = JobState.from_json(json.loads(entry.value)) if entry is not None else job
        return _what_became(node, job, now)
    finally:
        for task in (gone, over):
            task.cancel()
        await asyncio.gather(gone, over, return_exceptions=True)


def _what_became(node: str, before: JobState, now: JobState) -> str:
    if now.phase is Phase.DONE:
        return f"the job ended meanwhile: {now.reason}"
    held = before.placement is not None and node in before.placement.nodes
    if not held or before.placement is None or now.placement is None:
        return f"{node} has left"
    return f"{node} has left; {now.placement.nodes[before.placement.position_of(node)]} is in its place (cycle {now.cycle})"


async def _until_unregistered(store: Store, keys: Keys, node: str) -> None:
    async with aclosing(follow(store, keys.node(node), lambda: True)) as found:
        async for batch in found:
            if not batch.changes or batch.changes[-1].entry is None:
                return


async def _until_over(store: Store, keys: Keys) -> None:
    async with aclosing(follow(store, keys.job, lambda: True)) as found:
        async for batch in found:
            entry = batch.changes[-1].entry if batch.changes else None
            if entry is None or _phase(json.loads(entry.value)) is Phase.DONE:
                return


def _phase(doc: Mapping[str, Any]) -> Phase:
    return Phase(doc["phase"])


def _say(text: str) -> None:
    sys.stderr.write(f"ft-launch: {text}\n")
    sys.stderr.flush()
