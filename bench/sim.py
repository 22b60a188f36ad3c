"""How fast decisions and the simulated world are, and the goodput that published failure rates leave.

    python bench/sim.py [--contestants decisions,worlds,goodput] [--runs 5] [--quick] [--json FILE]

`decisions`: the slowest answer of the production job machine at 10,000 ranks on 1,250 nodes, when the last node has acknowledged and the cycle is settled. `worlds`: CPU seconds of simulated
days. `goodput`: the table of docs/simulation.md; every assumption is a constant of this file. All of it is single-threaded and computes only; times are CPU time of this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _common.figures import Options, Results, parse, progress, run

from ft_launcher.config import SimulateOptions
from ft_launcher.core import state as core
from ft_launcher.core.events import JobEvent, NodeJoined, ReportReceived
from ft_launcher.core.evidence import Address, Hang, NodeInfo, NodeReport, RankExit, RankProgress
from ft_launcher.core.job import JobMachine
from ft_launcher.core.topology import Topology
from ft_launcher.sim.main import goodput
from ft_launcher.sim.setting import Setting, setting_of
from ft_launcher.sim.world import World
from monitors.attribution import attribute

PARTS = ("decisions", "worlds", "goodput")
NODES, NPROC = 1250, 8
DECISION_MS, DAY_S = 50.0, 1.5
KINDS = ("one crash, all others killed", "one crash, all others tell of a lost peer", "all hang")

INTERRUPTIONS, PLANNED, DAYS, GPUS = 466, 47, 54, 16_384
"""Llama 3 405B (The Llama 3 Herd of Models, 2024, section 3.3.4): 466 interruptions in 54 days on 16,384 GPUs, 419 of them unexpected."""
SHARES = {"crash": 0.69, "node": 0.29, "hang": 0.02}
"""Our assumption of what the unexpected ones are: a rank dies and its device works again; a machine is gone, silently or not, for good or for a while; a rank stands still."""
SCRIPT = {"step_s": 5.0, "save_every": 100, "save_s": 2.0, "load_s": 60.0}
"""Our assumption of the training: a step of 5 s, every 100 steps (8.4 minutes) a save that stops it for 2 s, 60 s to load and begin again."""
OTHERS = {"standard restart": 390.0, "MegaScale's bound": 900.0}
"""Published, in seconds from the fault until training goes on: 6.5 minutes; `less than 15 minutes` (Jiang et al., NSDI 2024), here taken as 15."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`store_s`: a one-way delay of the store with which a restart costs this launcher `own_s` of its own (docs/benchmarks.md)."""

    gpus: int
    days: float
    own_s: float

    @property
    def store_s(self) -> float:
        """A restart crosses the store some twelve times, each taking 5/8 of the usual on average."""
        return self.own_s / (12 * 0.625)


CLUSTERS = (Cluster(1_024, 54, 0.8), Cluster(16_384, 3, 6.0))
"""Own costs: 0.76 s measured at 500 nodes; 2.8 s at 1,000, from which 6 s at 2,048 are extrapolated. Both on two shared cores for all agents and etcd: upper bounds."""


# -- decisions --------------------------------------------------------------------------------------------------------------------------


def _report(node: str, number: int, kind: str, done: bool) -> NodeReport:
    """What a node says when its first rank has failed, and (`done`) when it has cleared everything."""
    ranks = range(number * NPROC, (number + 1) * NPROC)
    first = number == 3
    stamp = "RuntimeError: Connection closed by peer" if kind == KINDS[1] else None
    ended = {r: RankExit(r, 1 if stamp else None, None if stamp else 9, r, r % NPROC, ended=not stamp, stamp=stamp) for r in ranks}
    exits = ended if done else {}
    hangs = {r: Hang(r, "step", 200.0, 180.0, 100, "no step for 200 s") for r in ranks} if kind == KINDS[2] else {}
    if first and not hangs:
        exits = {**exits, ranks[0]: RankExit(ranks[0], None, 9, 0, 0)}
    where = {r: RankProgress(100, 100, "step", 200.0, True, True, 101, True, 200.0) for r in ranks} if done else {}
    return NodeReport(node, 0, 0, 4 if done else 3, True, exits, hangs, where, reaped=done, standby=Address(node, 2), incarnation=node)


def _decision_ms(kind: str) -> tuple[float, float]:
    """(slowest answer, mean answer) over a launch and a restart, milliseconds."""
    options = core.Options(nodes_wanted=NODES, nproc=NPROC, can_join=True, attribute=attribute)
    machine = JobMachine(core.JobState("bench", 0), Topology.build(world=NODES * NPROC, tp=NPROC), options)
    machine.begin(0.0)
    names, took = [f"n{i}" for i in range(NODES)], list[float]()

    def tell(now: float, event: JobEvent) -> None:
        began = time.process_time()
        machine.handle(now, event)
        took.append(time.process_time() - began)

    for i, name in enumerate(names):
        tell(0.0, NodeJoined(NodeInfo(name, name, NPROC, 0, order=i, incarnation=name)))
    for name in names:
        tell(1.0, ReportReceived(NodeReport(name, 0, -1, 1, reaped=True, standby=Address(name, 1), incarnation=name)))
    for name in names:
        tell(2.0, ReportReceived(NodeReport(name, 0, 0, 2, started=True, incarnation=name)))
    tell(500.0, ReportReceived(_report(names[3], 3, kind, done=False)))
    for i, name in enumerate(names):
        tell(501.0, ReportReceived(_report(name, i, kind, done=True)))
    if machine.state.cycle != 1:
        raise SystemExit(f"the restart did not happen: {machine.state.reason}")
    return max(took) * 1e3, sum(took) / len(took) * 1e3


def decisions(results: Results, options: Options) -> None:
    """The slowest and the mean answer."""
    for kind in KINDS:
        progress(f"decision at {NODES * NPROC} ranks: {kind}")
        found = [_decision_ms(kind) for _ in range(options.runs)]
        worst = results.add(f"slowest decision: {kind}", "ms", [slowest for slowest, _ in found])
        results.add(f"mean decision: {kind}", "ms", [mean for _, mean in found])
        results.check(f"decision at 10,000 ranks ({kind})", worst, DECISION_MS)


# -- worlds -----------------------------------------------------------------------------------------------------------------------------


def _ran(setting: Setting) -> tuple[World, float]:
    began = time.process_time()
    world = World(setting)
    world.run()
    if world.violations:
        raise SystemExit(f"seed {setting.seed}: {world.violations[0]}")
    return world, time.process_time() - began


def worlds(results: Results, options: Options) -> None:
    """CPU seconds a seed, and events a second."""
    sizes = ((128, 24.0, 1),) if options.quick else ((128, 24.0, 2 * options.runs), (10_000, 6.0, min(3, options.runs)))
    for ranks, hours, seeds in sizes:
        progress(f"{seeds} seeds of {ranks} ranks x {hours:g} h")
        found = [_ran(setting_of(SimulateOptions(ranks=ranks, hours=hours, seed=seed))) for seed in range(seeds)]
        took = results.add(f"{hours:g} h of {ranks:,} ranks, a seed", "s", [took_s for _, took_s in found])
        results.add(f"{ranks:,} ranks: events a second", "1/s", [world.trace.count / took_s for world, took_s in found])
        if ranks == 128:
            results.check("24 simulated hours, 128 ranks, a seed", took, DAY_S)


# -- goodput ----------------------------------------------------------------------------------------------------------------------------


def _rates() -> str:
    """The published interruptions as faults per 1,000 node-hours."""
    node_hours = DAYS * 24 * GPUS / NPROC
    unexpected = (INTERRUPTIONS - PLANNED) / node_hours * 1000
    rates = {kind: unexpected * share for kind, share in SHARES.items()} | {"drain": PLANNED / node_hours * 1000}
    return ",".join(f"{kind}={rate:.6f}" for kind, rate in rates.items())


def _setting(cluster: Cluster, days: float, seed: int) -> Setting:
    setting = setting_of(SimulateOptions(ranks=cluster.gpus, hours=24 * days, seed=seed, faults=_rates()))
    return replace(setting, script=replace(setting.script, **SCRIPT), platform=replace(setting.platform, store_s=cluster.store_s))  # type: ignore[arg-type]


def _row(cluster: Cluster, days: float, seeds: Sequence[int]) -> tuple[list[float], float, float]:
    """(goodput of each seed, restarts a day, median seconds from fault to the first new step)."""
    found = [_ran(_setting(cluster, days, seed))[0] for seed in seeds]
    recoveries = sorted(s for world in found for s in world.tally.recovery_s)
    return [goodput(w) for w in found], sum(w.tally.restarts for w in found) / days / len(found), recoveries[len(recoveries) // 2]


def goodput_table(results: Results, options: Options) -> None:
    """Ours by simulation; the others by the same course, each restart taking theirs."""
    best = SCRIPT["save_every"] * SCRIPT["step_s"] / (SCRIPT["save_every"] * SCRIPT["step_s"] + SCRIPT["save_s"])
    for cluster in CLUSTERS[:1] if options.quick else CLUSTERS:
        days = 14 if options.quick else cluster.days
        progress(f"{cluster.gpus:,} GPUs for {days:g} days")
        ours, restarts, recovery_s = _row(cluster, days, range(1 if options.quick else min(3, options.runs)))
        results.add(f"{cluster.gpus:,} GPUs: goodput, ft-launch", "%", [100 * share for share in ours])
        for name, restart_s in OTHERS.items():
            lost = restarts * (restart_s - recovery_s) / 86_400
            results.add(f"{cluster.gpus:,} GPUs: goodput, {name}", "%", [100 * (share - lost) for share in ours])
        results.add(f"{cluster.gpus:,} GPUs: restarts a day", "1", [restarts])
        results.add(f"{cluster.gpus:,} GPUs: fault to first step, ft-launch", "s", [recovery_s])
    results.notes.append(f"without any fault the saves alone leave {best:.2%}; rates: {_rates()} per 1,000 node-hours")


def measure(options: Options, folder: Path) -> Results:
    """All parts that were asked for."""
    results = Results("sim")
    for name, part in (("decisions", decisions), ("worlds", worlds), ("goodput", goodput_table)):
        if name in options.contestants:
            part(results, options)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__ or "", PARTS, runs=3), measure))
