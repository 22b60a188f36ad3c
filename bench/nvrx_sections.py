"""What a section costs a script that uses NVRx's client: the same unmodified client under ft-launch and under NVRx's own launcher, one after the other.

    python bench/nvrx_sections.py [--runs 5] [--json FILE]

A run is one job of one rank; its figure is the median over batches of the mean in a batch of open + close. The client of 0.4.1 waits for an answer to each of the
two, so this is two round trips: to the agent here, to the rank's monitor process there. `bench/sections.py` has the native client, which makes none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from _common.contestants import FT, NVRX, SCRIPTS, Plan, launch
from _common.figures import Options, Results, parse, run

PER_BATCH, BATCHES = 10, 301
LIMIT_S = 120.0
RATIO = 1.0
"""Not slower than with NVRx's own server."""


def use_once(name: str, folder: Path) -> float:
    """Microseconds for one open and close."""
    result = folder / "result.json"
    plan = Plan(SCRIPTS / "sections.py", ("nvrx", str(result), str(BATCHES), str(PER_BATCH)), world=1, preload="none")
    job, _ = launch(name, plan, folder)
    with job:
        job.wait_for(result.exists, "result", LIMIT_S)
        return float(json.loads(result.read_text())["median_us"])


def measure(options: Options, folder: Path) -> Results:
    """Both in turn."""
    results = Results("nvrx_sections")
    found: dict[str, list[float]] = {name: [] for name in options.contestants}
    for turn in range(options.runs):
        for name in options.contestants:
            found[name].append(use_once(name, folder / f"{turn}{name[:2]}"))
    figures = {name: results.add(f"{name}: NVRx's client, section open + close", "us", values) for name, values in found.items()}
    results.check_ratio("NVRx's client under ft-launch against NVRx", figures.get(FT), figures.get(NVRX), RATIO)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, (FT, NVRX)), measure))
