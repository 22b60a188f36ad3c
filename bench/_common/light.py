"""A light agent: what a node's agent is to the store, with nothing behind it.

Everything that reaches etcd is the production code's own: a client with its connection, joining, keep-alives, the pulse, three watches (job, leader, limits), reports. What is left out is
the node: ranks start and end at once, nobody listens on a channel, and the job state, which is the same for all, is parsed once in this process instead of once on each node. One thing is
changed: a call may take `PATIENCE_S`. The deadline of an agent that has a process of its own would mean nothing where a thousand share one event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from _common.etcd import Etcd
from ft_launcher.config import Config, StoreOptions
from ft_launcher.core.command import Command
from ft_launcher.core.evidence import NO_CYCLE, Address, NodeInfo, NodeReport, RankExit, RankProgress
from ft_launcher.core.membership import Reply
from ft_launcher.core.state import JobState, Phase
from ft_launcher.core.topology import Topology
from ft_launcher.shell import etcd_calls
from ft_launcher.shell.channel import Peer
from ft_launcher.shell.follow import follow
from ft_launcher.shell.join import Joiner, spec_of
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.lease import Registration
from ft_launcher.shell.reporter import Reporter
from ft_launcher.shell.store import Change

RUN_ID = "scale"
RANKS = 8
TTL_S = 10.0
STEPS = 1000
PATIENCE_S = 20.0
KEYS = Keys(RUN_ID)


@dataclass(slots=True)
class Sight:
    """What all agents of this process have seen: (phase, cycle) -> node number -> CLOCK_MONOTONIC ns. `job_bytes`: the size of the newest job state."""

    nodes: int
    seen: dict[tuple[Phase, int], dict[int, int]] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    job_bytes: int = 0
    _parsed: tuple[int, JobState] | None = None

    def parse(self, change: Change) -> JobState:
        """The job state of this revision."""
        assert change.entry is not None
        if self._parsed is None or self._parsed[0] != change.revision:
            self._parsed = (change.revision, JobState.from_json(json.loads(change.entry.value)))
            self.job_bytes = len(change.entry.value)
        return self._parsed[1]

    def all_saw(self, phase: Phase, cycle: int) -> int | None:
        """When the last agent saw it; None while some have not."""
        times = self.seen.get((phase, cycle), {})
        return max(times.values()) if len(times) == self.nodes else None

    def first_saw(self, phase: Phase, cycle: int) -> int:
        """When the first agent saw it."""
        return min(self.seen[(phase, cycle)].values())


def config_of(number: int, nodes: int) -> Config:
    """As the command line of this node would give it."""
    return Config(
        command=Command(script="train.py"), topology=Topology.build(world=nodes * RANKS, tp=RANKS), nnodes=nodes, nproc=RANKS, run_id=RUN_ID, node_id=f"node{number:05}",
        log_dir=Path("logs"), ft_state=Path("ft_state.json"), store=StoreOptions(kind="etcd"), node_ttl_s=TTL_S,
    )  # fmt: skip


def be_patient() -> None:
    """Give the calls of clients made from now on, in this process, their time."""
    etcd_calls.DEADLINE_S = etcd_calls.SLOWEST_S = PATIENCE_S


async def _answers(peer: Peer) -> Reply:
    return Reply.ANSWERED


class LightAgent:
    """One node's agent, until cancelled."""

    def __init__(self, number: int, etcd: Etcd, sight: Sight) -> None:
        self._number = number
        self._sight = sight
        self._config = config_of(number, sight.nodes)
        self._store = etcd.store()
        self._reporter = Reporter(self._store, KEYS.report(self._config.node_id))
        self._report = NodeReport(self._config.node_id, 0, NO_CYCLE, reaped=True, incarnation=f"{number:012x}")
        self._first = number * RANKS

    def _info(self, generation: int) -> NodeInfo:
        return NodeInfo(
            self._config.node_id,
            f"10.0.{self._number >> 8}.{self._number & 255}:31234",
            RANKS,
            generation,
            incarnation=self._report.incarnation,
        )

    async def run(self, joining: asyncio.Semaphore) -> None:
        """Join, keep the registration, follow and answer. `joining`: so many at a time."""
        try:
            async with joining:
                joiner = Joiner(self._store, KEYS, self._config, spec_of(self._config, {}), lambda text: None)
                await joiner.secret()
                joined = await joiner.join(self._info, _answers)
                registration = Registration(self._store, KEYS, self._info(joined.generation), TTL_S)
                self._sight.joined[self._number] = time.monotonic_ns()
                await self._say(standby=self._standby(0))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(registration.keep(joined.lease))
                tasks.create_task(self._follow_only(KEYS.leader))
                tasks.create_task(self._follow_only(KEYS.limits))
                tasks.create_task(self._follow_job())
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._store.close(), 5)

    async def _follow_only(self, key: str) -> None:
        async with aclosing(follow(self._store, key, lambda: True)) as found:
            async for _ in found:
                pass

    async def _follow_job(self) -> None:
        async with aclosing(follow(self._store, KEYS.job, lambda: True)) as found:
            async for batch in found:
                now_ns = time.monotonic_ns()
                for change in (c for c in batch.changes if c.entry is not None):
                    await self._on_job(self._sight.parse(change), now_ns)

    async def _on_job(self, job: JobState, now_ns: int) -> None:
        self._sight.seen.setdefault((job.phase, job.cycle), {}).setdefault(self._number, now_ns)
        if job.phase is Phase.RUNNING and job.cycle > self._report.cycle:
            progress = {rank: RankProgress(job.cycle * STEPS, 20, "step", 0.012, client=True) for rank in self._ranks()}
            standby = self._standby(job.cycle + 1) if job.master == self._report.standby else self._report.standby
            await self._say(cycle=job.cycle, started=True, exits={}, progress=progress, reaped=False, standby=standby)
            self._sight.started[self._number] = job.cycle
        elif job.phase is Phase.ENDING and job.cycle == self._report.cycle and not self._report.reaped:
            ended = {rank: self._exit(rank, ended=True) for rank in self._ranks()}
            await self._say(exits={**ended, **self._report.exits}, reaped=True, reap_s=0.01)

    async def fail(self) -> None:
        """One rank of this node has died: the report that begins a restart."""
        await self._say(exits={self._first: self._exit(self._first, ended=False)})

    async def _say(self, **changes: object) -> None:
        self._report = replace(self._report, sequence=self._report.sequence + 1, **changes)  # type: ignore[arg-type]
        await self._reporter.send(self._report)

    def _ranks(self) -> range:
        return range(self._first, self._first + RANKS)

    def _exit(self, rank: int, ended: bool) -> RankExit:
        return RankExit(rank, None, 9, time.monotonic_ns(), rank - self._first, ended)

    def _standby(self, cycle: int) -> Address:
        return Address(f"10.0.{self._number >> 8}.{self._number & 255}", 32000 + cycle % 1000)
