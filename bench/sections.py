"""What opening and closing a section costs the training process: ft-launch's own client beside NVRx's client, each under its own launcher, watched while
it runs.

    python bench/sections.py [--runs 5] [--json FILE]

A run is one job of one rank; its figure is the median over batches of the mean in a batch. ft-launch's agent reads the page 20 times a second
meanwhile; NVRx's client talks to its monitor process. `bench/section_cost.py` looks closer at the native client alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from _common.contestants import FT, NVRX, SCRIPTS, Plan, launch
from _common.figures import Options, Results, parse, run

CLIENTS = {FT: "native", NVRX: "nvrx"}
PER_BATCH = {FT: 200, NVRX: 10}  # short, so that being interrupted spoils few batches and not the median
BATCHES = 1001
LIMIT_US = 2.0
LIMIT_S = 120.0


def use_once(name: str, folder: Path) -> float:
    """Microseconds for one open and close."""
    result = folder / "result.json"
    plan = Plan(SCRIPTS / "sections.py", (CLIENTS[name], str(result), str(BATCHES), str(PER_BATCH[name])), world=1, preload="none")
    job, _ = launch(name, plan, folder)
    with job:
        job.wait_for(result.exists, "result", LIMIT_S)
        return float(json.loads(result.read_text())["median_us"])


def measure(options: Options, folder: Path) -> Results:
    """Both in turn."""
    results = Results("sections")
    found: dict[str, list[float]] = {name: [] for name in options.contestants}
    for turn in range(options.runs):
        for name in options.contestants:
            found[name].append(use_once(name, folder / f"{turn}{name[:2]}"))
    for name, values in found.items():
        results.add(f"{name}: section open + close", "us", values)
    ours = [f for f in results.figures if f.name.startswith(FT)]
    results.check("section open + close, native client", ours[0] if ours else None, LIMIT_US)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, tuple(CLIENTS)), measure))
