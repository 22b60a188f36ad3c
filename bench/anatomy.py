"""Where the time of one ft-launch recovery goes: the launcher's journal and the ranks' stamps on one clock.

    python bench/anatomy.py [--runs 10] [--json FILE]

Every stage ends at a moment that somebody wrote down (journal: `ended`, `job`, `started`; ranks: `scripts/steps.py`), so the stages add up to the whole. Not part of
`bench/run.py`: it has no target, it tells what to work on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from _common.contestants import FT, SCRIPTS, Plan, launch
from _common.figures import Options, Results, parse, run
from _common.outage import RECOVERY_LIMIT_S, START_LIMIT_S, settle
from _common.processes import Job, kill_rank
from _common.stamps import Stamps

WRITTEN_LIMIT_S = 10.0


def recoveries(runs: int, folder: Path) -> Iterator[dict[str, float]]:
    """One job, `runs` kills: stage -> milliseconds, in order."""
    job, stamps = launch(FT, Plan(SCRIPTS / "steps.py", tp=2), folder)
    with job:
        job.wait_for(lambda: stamps.first_on_all("step") is not None, "first step of all ranks", START_LIMIT_S)
        for cycle in range(runs):
            settle(job, stamps)
            yield _one(job, stamps, folder, cycle)


def _one(job: Job, stamps: Stamps, folder: Path, cycle: int) -> dict[str, float]:
    victim = cycle % stamps.world
    known = frozenset(moment.pid for moments in stamps.read().values() for moment in moments)
    fault_ns = kill_rank(stamps.pids()[victim])
    job.wait_for(lambda: stamps.first_on_all("step", fault_ns, known) is not None, "new step of all ranks", RECOVERY_LIMIT_S)
    job.wait_for(lambda: any(e["kind"] == "started" for e in _journal(folder, cycle + 1)), "journal", WRITTEN_LIMIT_S)
    moments = {"the kill": fault_ns, **_launcher(folder, cycle, victim), **_ranks(stamps, fault_ns, known)}
    whole = {"kill -> first new step on all ranks": (moments["first step done, all ranks"] - fault_ns) / 1e6}
    return {f"-> {name}": (at - before) / 1e6 for (_, before), (name, at) in pairwise(moments.items())} | whole


def _launcher(folder: Path, cycle: int, victim: int) -> dict[str, int]:
    """What the journal says of the end of `cycle` and the start of the next one."""
    old, new = _journal(folder, cycle), _journal(folder, cycle + 1)
    ended = {e["rank"]: e for e in old if e["kind"] == "ended"}
    ending = next(e for e in old if e["kind"] == "job" and e["job"]["phase"] == "ending")
    starting = next(e for e in new if e["kind"] == "job" and e["job"]["phase"] == "running")
    return {
        "zygote has seen the death": ended[victim]["at_ns"],
        "agent knows": ended[victim]["mono_ns"],
        "end committed": ending["mono_ns"],
        "all other ranks dead": max(e["at_ns"] for e in ended.values()),
        "agent knows all are dead": max(e["mono_ns"] for e in ended.values()),
        "start committed (reaped, last words read)": starting["mono_ns"],
        "fork asked of the zygote": next(e for e in new if e["kind"] == "started")["mono_ns"],
    }


def _ranks(stamps: Stamps, fault_ns: int, known: frozenset[int]) -> dict[str, int]:
    firsts = {kind: stamps.firsts(kind, fault_ns, known) for kind in ("line", "torch", "group", "step")}
    return {
        "first line, first rank": min(firsts["line"].values()),
        "first line, all ranks": max(firsts["line"].values()),
        "torch imported, all ranks": max(firsts["torch"].values()),
        "process group, all ranks": max(firsts["group"].values()),
        "first step done, all ranks": max(firsts["step"].values()),
    }


def _journal(folder: Path, cycle: int) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("logs/*/journal.*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["cycle"] == cycle]


def measure(options: Options, folder: Path) -> Results:
    """Medians of every stage."""
    results = Results("anatomy")
    seen = list(recoveries(options.runs, folder / "ft"))
    for stage in seen[0]:
        results.add(stage, "ms", [recovery[stage] for recovery in seen])
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, (FT,), runs=10), measure))
