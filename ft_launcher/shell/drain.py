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
from contextlib import aclosing
from dataclasses import dataclass

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
    waits = f"the store does not answer; trying for {options.store.timeout_s:g} s (ft-launch --store-timeout S drain ... for less)"
    store.health.listen(lambda there: _say("the store answers" if there else waits))
    try:
        job, agent = await _look(store, keys, options.node)
        await store.transact([], [Put(keys.drains + options.node, json.dumps({"at": time.time()}))])
        _say(f"asked for {options.node} to be drained from run {options.run_id}")
        now = await _until_gone(store, keys, Asked(options.node, agent, job))
        await store.transact([], [Delete(keys.drains + options.node)])
        code, said = _what_became(options.node, job, now)
        _say(said)
        return code
    finally:
        await store.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """Who is to leave: the node, its agent of the moment, and the job as it was."""

    node: str
    agent: str
    job: JobState

    @property
    def position(self) -> int | None:
        """Where it held ranks, None where it held none."""
        placement = self.job.placement
        return placement.position_of(self.node) if placement is not None and self.node in placement else None


async def _look(store: Store, keys: Keys, node: str) -> tuple[JobState, str]:
    """The job as it is and the node's agent, if the request makes sense."""
    entry = await store.get(keys.job)
    if entry is None:
        raise ConfigError(
            f"drain {node}: the store knows no run {keys.run_id!r}; --run-id is the id that the run's ft-launch said at its start"
        )
    job = JobState.from_json(json.loads(entry.value))
    if job.phase is Phase.DONE:
        raise ConfigError(f"drain {node}: run {keys.run_id!r} is over ({job.reason})")
    agents = {e.key.removeprefix(keys.nodes): json.loads(e.value)["incarnation"] for e in (await store.list(keys.nodes)).entries}
    if node not in agents:
        raise ConfigError(f"drain {node}: run {keys.run_id!r} has no such node; it has {', '.join(sorted(agents)) or 'none'}")
    holds = job.placement is not None and node in job.placement
    if holds and not await _spares(store, keys, job, sorted(agents)):
        raise NoSpareError(
            f"drain {node}: no spare can take its place, and the job cannot go on without; start ft-launch on another node first"
        )
    return job, agents[node]


async def _spares(store: Store, keys: Keys, job: JobState, nodes: list[str]) -> list[str]:
    holders = set(job.placement.nodes) if job.placement is not None else set()
    reports = [NodeReport.from_json(json.loads(e.value)) for e in (await store.list(keys.reports)).entries]
    staying = [r for r in reports if job.leaving.get(r.node_id) != r.incarnation and r.unfit is None]
    warm = {r.node_id for r in staying if r.reaped and r.standby is not None}
    barred = {record.node for record in job.hardware.values() if record.quarantined}
    return [n for n in nodes if n in warm and n not in holders and n not in barred]


async def _until_gone(store: Store, keys: Keys, asked: Asked) -> JobState:
    """Until somebody else runs in the node's place and its agent is gone, or the job is over; the job as it is then."""
    gone = asyncio.create_task(_until_unregistered(store, keys, asked))
    passed_on = asyncio.create_task(_until_passed_on(store, keys, asked))
    try:
        if asked.position is None:
            await asyncio.wait({gone, passed_on}, return_when=asyncio.FIRST_COMPLETED)
            return passed_on.result() if passed_on.done() else asked.job
        now = await passed_on
        if now.phase is not Phase.DONE:
            await gone
        return now
    finally:
        for task in (gone, passed_on):
            task.cancel()
        await asyncio.gather(gone, passed_on, return_exceptions=True)


def _what_became(node: str, before: JobState, now: JobState) -> tuple[int, str]:
    """The exit code, and the end of the story in one sentence."""
    if now.phase is Phase.DONE:
        verdict = now.verdict
        return (0 if verdict is not None and verdict.exit_code == 0 else NO_SPARE), f"the job ended meanwhile: {now.reason}"
    held = before.placement is not None and node in before.placement
    if not held or before.placement is None or now.placement is None:
        return 0, f"{node} has left"
    return 0, f"{node} has left; {now.placement.nodes[before.placement.position_of(node)]} is in its place (cycle {now.cycle})"


async def _until_unregistered(store: Store, keys: Keys, asked: Asked) -> None:
    """The agent is gone, or another one has come under its id."""
    async with aclosing(follow(store, keys.node(asked.node), lambda: True)) as found:
        async for batch in found:
            entry = batch.changes[-1].entry if batch.changes else None
            if entry is None or json.loads(entry.value)["incarnation"] != asked.agent:
                return


async def _until_passed_on(store: Store, keys: Keys, asked: Asked) -> JobState:
    """Another node runs in its place, or the job is over."""
    async with aclosing(follow(store, keys.job, lambda: True)) as found:
        async for batch in found:
            entry = batch.changes[-1].entry if batch.changes else None
            now = JobState.from_json(json.loads(entry.value)) if entry is not None else asked.job.but(phase=Phase.DONE, reason="it is gone")
            if now.phase is Phase.DONE or _passed_on(asked, now):
                return now
    return asked.job.but(phase=Phase.DONE, reason="the store was closed")


def _passed_on(asked: Asked, now: JobState) -> bool:
    started = now.phase is Phase.RUNNING and now.cycle > asked.job.cycle and now.placement is not None
    return started and asked.position is not None and now.placement is not None and now.placement.nodes[asked.position] != asked.node


def _say(text: str) -> None:
    sys.stderr.write(f"ft-launch: {text}\n")
    sys.stderr.flush()
