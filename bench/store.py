"""What many agents cost one etcd: registration, keep-alives and watches, and the time from one report until all agents have seen the next cycle.

    python bench/store.py [--runs 5] [--quick] [--json FILE]

Light agents (`_common/light.py`) in this one process, each with a client and a connection of its own, on a real etcd with its default settings; a real controller in another process.
8 ranks a node, TTL 10 s. A restart is: one node reports a dead rank; the controller ends the cycle; every agent sees that and acknowledges; the controller starts the next one; every
agent sees it. All share this machine's cores, so these times are upper bounds: in a cluster each agent has its own. CPU and bytes of etcd are its own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from _common.contestants import FT, SCRIPTS
from _common.etcd import Etcd
from _common.figures import Figure, Options, Results, parse, progress, run
from _common.light import KEYS, RANKS, RUN_ID, LightAgent, Sight, be_patient
from _common.processes import BenchError

from ft_launcher.core.state import Phase

SIZES, QUICK_SIZES = (500, 1000), (40,)
ASKED = 2000
AT_A_TIME = 50
WINDOW_S, QUICK_WINDOW_S = 15.0, 5.0
JOIN_LIMIT_S, CYCLE_LIMIT_S = 180.0, 90.0
SENT = "etcd_network_client_grpc_sent_bytes_total"
HANDLED = "grpc_server_handled_total"


@dataclass(frozen=True, slots=True)
class Steady:
    """Nothing happens: per second, over all agents."""

    etcd_cpu: float
    calls: float
    agents_cpu: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from the report; etcd's CPU seconds and megabytes sent until every agent had answered, steady cost included."""

    end_seen_s: float
    start_made_s: float
    start_seen_s: float
    began_ns: int
    etcd_cpu_s: float
    sent_mb: float


class Crowd:
    """The agents and what they have seen."""

    def __init__(self, etcd: Etcd, nodes: int) -> None:
        self.etcd = etcd
        self.sight = Sight(nodes)
        self._agents = [LightAgent(number, etcd, self.sight) for number in range(nodes)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        self._joining = asyncio.Semaphore(AT_A_TIME)
        self._start(self._agents[:1])
        await self.until(lambda: len(self.sight.joined) == 1, "registration of the first", JOIN_LIMIT_S)
        return self

    def _start(self, agents: Sequence[LightAgent]) -> None:
        self._tasks += [asyncio.create_task(agent.run(self._joining)) for agent in agents]

    async def join(self) -> tuple[float, float]:
        """All but the first, which has made the run: seconds until all are registered, and etcd's CPU seconds."""
        began_s, cpu_s = time.monotonic(), self.etcd.cpu_s()
        self._start(self._agents[1:])
        await self.until(lambda: len(self.sight.joined) == self.sight.nodes, "registration of all", JOIN_LIMIT_S)
        return time.monotonic() - began_s, self.etcd.cpu_s() - cpu_s

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait for all agents. Raises BenchError."""
        end = time.monotonic() + limit_s
        while not done():
            failed = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
            if failed:
                raise BenchError(f"an agent has ended while waiting for {what}: {failed[0]!r}")
            if time.monotonic() > end:
                raise BenchError(f"no {what} within {limit_s:.0f} s: {self.story()}")
            await asyncio.sleep(0.01)

    def story(self) -> str:
        """How many agents have seen what."""
        seen = {f"{phase.value} {cycle}": len(agents) for (phase, cycle), agents in self.sight.seen.items()}
        return f"{len(self.sight.joined)} of {self.sight.nodes} joined; {seen}"

    async def has_leader(self) -> None:
        """Until there is a controller: from then on whoever joins asks it, and not everybody."""
        store = self.etcd.store()
        while await store.get(KEYS.leader) is None:
            await asyncio.sleep(0.1)
        await store.close()

    async def all_running(self, cycle: int, limit_s: float = CYCLE_LIMIT_S) -> None:
        """Until each has seen the cycle and has reported that its ranks run."""
        started = self.sight.started
        await self.until(lambda: len(started) == self.sight.nodes and min(started.values()) >= cycle, f"cycle {cycle} on all", limit_s)

    async def steady(self, window_s: float) -> Steady:
        """What it costs to be there."""
        etcd_s, calls, own_s, began_s = self.etcd.cpu_s(), self.etcd.metric(HANDLED), time.process_time(), time.monotonic()
        await asyncio.sleep(window_s)
        took_s = time.monotonic() - began_s
        spent = (self.etcd.cpu_s() - etcd_s, self.etcd.metric(HANDLED) - calls, time.process_time() - own_s)
        return Steady(*(value / took_s for value in spent))

    async def restart(self, cycle: int, victim: int) -> Restart:
        """One rank of `victim` dies in `cycle`."""
        sight, cpu_s, sent = self.sight, self.etcd.cpu_s(), self.etcd.metric(SENT)
        began_ns = time.monotonic_ns()
        await self._agents[victim].fail()
        await self.all_running(cycle + 1)
        end_ns, start_ns = sight.all_saw(Phase.ENDING, cycle), sight.all_saw(Phase.RUNNING, cycle + 1)
        if start_ns is None:
            raise BenchError(f"not all have seen cycle {cycle + 1}: {self.story()}")
        made_ns = sight.first_saw(Phase.RUNNING, cycle + 1)
        end_s, made_s, start_s = ((at_ns - began_ns) / 1e9 for at_ns in (end_ns or made_ns, made_ns, start_ns))
        return Restart(end_s, made_s, start_s, began_ns, self.etcd.cpu_s() - cpu_s, (self.etcd.metric(SENT) - sent) / 1e6)


async def crowd_of(nodes: int, options: Options, folder: Path, results: Results) -> dict[str, Figure | None]:
    """One size."""
    async with AsyncExitStack() as stack:
        etcd = stack.enter_context(Etcd(folder / f"{nodes}"))
        idle_s, began_s = etcd.cpu_s(), time.monotonic()
        await asyncio.sleep(QUICK_WINDOW_S)
        idle = (etcd.cpu_s() - idle_s) / (time.monotonic() - began_s)
        crowd = await stack.enter_async_context(Crowd(etcd, nodes))
        governor = stack.enter_context(Helper("governor.py", etcd.address, RUN_ID, nodes, RANKS))
        await crowd.has_leader()
        joined_s, joining_s = await crowd.join()
        pings = folder / f"pings{nodes}"
        stack.enter_context(Helper("pinger.py", etcd.address, pings))
        await crowd.all_running(0, JOIN_LIMIT_S)
        progress(f"{nodes} agents run cycle 0")
        window_s = QUICK_WINDOW_S if options.quick else WINDOW_S
        await asyncio.sleep(window_s / 3)
        steady = await crowd.steady(window_s)
        memory_mb = etcd.rss_mb()
        restarts = []
        for cycle in range(options.runs):
            restarts.append(await crowd.restart(cycle, cycle % nodes))
            progress(f"{nodes} agents, restart {cycle + 1}: {restarts[-1]}")
            await asyncio.sleep(2.0)
        governor_s = governor.cpu_s()
        slowest = [slowest_ping_s(pings, restart) for restart in restarts]
    at = f"{nodes} nodes:"
    figures = {
        "joined": ("all registered (50 at a time)", "s", [joined_s]),
        "joining": ("etcd CPU of a registration", "ms", [joining_s * 1e3 / nodes]),
        "cpu": ("etcd CPU, steady", "%", [steady.etcd_cpu * 100]),
        "idle": ("etcd CPU with nobody there", "%", [idle * 100]),
        "per node": ("etcd CPU a node, steady", "us/s", [(steady.etcd_cpu - idle) * 1e6 / nodes]),
        "calls": ("calls a node, steady", "1/s", [steady.calls / nodes]),
        "agents": ("CPU of all agents' clients, steady", "%", [steady.agents_cpu * 100]),
        "memory": ("etcd memory", "MB", [memory_mb]),
        "job": ("size of the job state", "KB", [crowd.sight.job_bytes / 1e3]),
        "end": ("report -> end seen by all", "s", [r.end_seen_s for r in restarts]),
        "made": ("report -> start decided, seen by the first", "s", [r.start_made_s for r in restarts]),
        "start": ("report -> next cycle seen by all", "s", [r.start_seen_s for r in restarts]),
        "slowest": ("slowest call of a bystander in it", "s", slowest),
        "restart": ("etcd CPU of a restart", "s", [r.etcd_cpu_s for r in restarts]),
        "sent": ("etcd sends in a restart", "MB", [r.sent_mb for r in restarts]),
        "governor": ("controller CPU, all in all", "s", [governor_s]),
    }
    return {key: results.add(f"{at} {name}", unit, values) for key, (name, unit, values) in figures.items()}


def slowest_ping_s(pings: Path, restart: Restart) -> float:
    """The longest that the bystander waited for an answer while the agents were busy with a restart."""
    lines = [line.split() for line in pings.read_text().splitlines(keepends=True) if line.endswith("\n")]
    end_ns = restart.began_ns + int(restart.start_seen_s * 1e9)
    return max((float(took_s) for asked_ns, took_s in lines if restart.began_ns - 1e9 < int(asked_ns) < end_ns), default=0.0)


class Helper:
    """A script in a process of its own."""

    def __init__(self, script: str, *args: object) -> None:
        self._command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(SCRIPTS / script), *map(str, args)]

    def __enter__(self) -> Helper:
        self._process = subprocess.Popen(self._command, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """CPU time used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)


def extrapolate(results: Results, smaller: dict[str, Figure | None], larger: dict[str, Figure | None], sizes: tuple[int, int]) -> None:
    """What ASKED nodes would need: calls and registrations grow with the nodes, what a restart sends with nodes times the job state, whose size grows with the nodes."""
    few, many = sizes

    def value(found: dict[str, Figure | None], key: str) -> float:
        figure = found[key]
        assert figure is not None
        return figure.median

    def growth(key: str) -> str:
        return f"{few} -> {many} nodes gave x{value(larger, key) / value(smaller, key):.2f}"

    per_node = max(value(smaller, "per node"), value(larger, "per node"))
    share, grown, restart = per_node * ASKED / 1e6, ASKED / many, value(larger, "restart")
    results.notes += [
        f"{ASKED} nodes: steady etcd CPU {100 * share:.0f} % of a core, at the dearer cost of a node of the two sizes ({growth('per node')})",
        f"{ASKED} nodes, from {many}: a restart sends {value(larger, 'sent') * grown**2:.0f} MB, as nodes x size of the job state ({growth('sent')})",
        f"{ASKED} nodes, from {many}: etcd CPU of a restart {restart * grown:.1f} s if linear, {restart * grown**2:.1f} s if squared ({growth('restart')})",
    ]


def measure(options: Options, folder: Path) -> Results:
    """All sizes."""
    results = Results("store")
    be_patient()
    sizes = QUICK_SIZES if options.quick else SIZES
    found = [asyncio.run(crowd_of(nodes, options, folder, results)) for nodes in sizes]
    if len(found) > 1:
        extrapolate(results, found[0], found[-1], (sizes[0], sizes[-1]))
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, (FT,)), measure))
