"""What a launcher costs while nothing happens: memory and CPU beside 8 ranks that train.

    python bench/overhead.py [--runs 5] [--json FILE]

A run is a window of `WINDOW_S` in one job in steady state. `agent`: the launcher process itself. `all`: every process below and including it that is
neither a rank nor a rank's child (monitors, zygote, standby store). PSS shares each common page among those who map it; RSS counts it for each. The
ranks are `scripts/steps.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from _common.contestants import FT, LAUNCHERS, SCRIPTS, Plan, launch
from _common.figures import Options, Results, parse, progress, run
from _common.outage import START_LIMIT_S, settle
from _common.processes import Job, below
from _common.stamps import Stamps

WORLD = 8
WINDOW_S = 3.0
CALM_S = 3.0
AGENT_MEGABYTES = 60.0
AGENT_PERCENT = 2.0
MEGABYTE = 1e6


@dataclass(slots=True)
class Cost:
    """One value a window."""

    agent_pss: list[float] = field(default_factory=list)
    agent_rss: list[float] = field(default_factory=list)
    all_pss: list[float] = field(default_factory=list)
    agent_cpu: list[float] = field(default_factory=list)
    all_cpu: list[float] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)


def observe(name: str, options: Options, folder: Path) -> Cost:
    """One job, `options.runs` windows."""
    cost = Cost()
    job, stamps = launch(name, Plan(SCRIPTS / "steps.py", world=WORLD, tp=2), folder)
    with job:
        job.wait_for(lambda: stamps.first_on_all("step") is not None, "first step of all ranks", START_LIMIT_S)
        settle(job, stamps)
        time.sleep(0 if options.quick else CALM_S)
        for _ in range(options.runs):
            _window(job, stamps, cost, 1.0 if options.quick else WINDOW_S)
    return cost


def _window(job: Job, stamps: Stamps, cost: Cost, seconds: float) -> None:
    agent, others = psutil.Process(job.pid), _helpers(job, stamps)
    before, began = [_cpu_s(p) for p in (agent, *others)], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    used = [(_cpu_s(p) - b) / took * 100 for p, b in zip((agent, *others), before, strict=True)]
    memory = [_memory(p.pid) for p in (agent, *others)]
    cost.agent_cpu.append(used[0])
    cost.all_cpu.append(sum(used))
    cost.agent_pss.append(memory[0][0])
    cost.agent_rss.append(memory[0][1])
    cost.all_pss.append(sum(pss for pss, _ in memory))
    cost.processes.append(len(memory))


def _helpers(job: Job, stamps: Stamps) -> list[psutil.Process]:
    """What is below the launcher, without the ranks and their children."""
    ranks = set(stamps.pids().values())
    theirs = ranks | {process.pid for pid in ranks for process in below(pid)}
    return [process for process in below(job.pid) if process.pid not in theirs]


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all its threads, to the nanosecond: the usual ticks of 10 ms are too coarse for a window of seconds."""
    total_ns = 0
    for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(stat.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
    return total_ns / 1e9


def _memory(pid: int) -> tuple[float, float]:
    """(PSS, RSS) in megabytes."""
    return _rollup(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())


def _rollup(lines: Iterable[str]) -> tuple[float, float]:
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 / MEGABYTE for line in lines if line.startswith(("Pss:", "Rss:"))}
    return found["Pss"], found["Rss"]


def measure(options: Options, folder: Path) -> Results:
    """One job of each contestant."""
    results = Results("overhead")
    for name in options.contestants:
        progress(f"overhead: {name}")
        cost = observe(name, options, folder / name[:2])
        pss = results.add(f"{name}: agent, PSS", "MB", cost.agent_pss)
        rss = results.add(f"{name}: agent, RSS", "MB", cost.agent_rss)
        cpu = results.add(f"{name}: agent, CPU (% of a core)", "%", cost.agent_cpu)
        results.add(f"{name}: all but the ranks, PSS", "MB", cost.all_pss)
        results.add(f"{name}: all but the ranks, CPU", "%", cost.all_cpu)
        results.add(f"{name}: processes beside the ranks", "", cost.processes)
        if name == FT:
            results.check("agent memory with 8 ranks (RSS, which counts shared pages in full)", rss, AGENT_MEGABYTES)
            results.check("agent memory with 8 ranks (PSS)", pss, AGENT_MEGABYTES)
            results.check("agent CPU with 8 ranks, steady", cpu, AGENT_PERCENT)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, LAUNCHERS), measure))
