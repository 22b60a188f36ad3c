"""SIGKILL of one rank of four -> first new step on all four: ft-launch, no launcher at all (the floor), torchrun and NVRx.

    python bench/recovery.py [--runs 5] [--json FILE] [--contestants ft-launch,floor]

The script (`scripts/steps.py`) uses gloo and steps of 20 ms. The launcher's share is the time from the kill to the first Python statement on all
ranks. The floor includes what any restart must do: noticing the death (waitpid), killing and collecting the other three ranks, a new TCPStore,
forking four ranks from a process that has torch, gloo's initialisation and one step. It excludes everything else that a launcher does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _common.contestants import EVERYONE, FLOOR, FT, NVRX, SCRIPTS, TORCHRUN, Plan
from _common.figures import Figure, Options, Results, parse, run
from _common.outage import Outage, alternate

KILLS_A_JOB = {FT: 3, FLOOR: 3, TORCHRUN: 2, NVRX: 2}  # more of what is quick: the ratio nearest to its target rests on more values
STEP_S = 0.02
SHARE_LIMIT_MS = 100.0


def report(results: Results, found: Mapping[str, Sequence[Outage]]) -> dict[str, Figure | None]:
    """Figures of every contestant, in milliseconds; contestant -> its recovery."""
    recovery = {}
    for name, seen in found.items():
        recovery[name] = results.add(f"{name}: kill -> first new step on all ranks", "ms", [o.step_s * 1e3 for o in seen])
        results.add(f"{name}:   kill -> first Python line on all ranks", "ms", [o.line_s * 1e3 for o in seen])
        results.add(f"{name}:   first line -> torch imported", "ms", [(o.torch_s - o.line_s) * 1e3 for o in seen if o.torch_s])
        results.add(
            f"{name}:   torch imported -> process group", "ms", [(o.group_s - o.torch_s) * 1e3 for o in seen if o.group_s and o.torch_s]
        )
        results.add(f"{name}:   process group -> first step", "ms", [(o.step_s - o.group_s) * 1e3 for o in seen if o.group_s])
    return recovery


def measure(options: Options, folder: Path) -> Results:
    """All contestants, one after the other, `options.runs` times."""
    results = Results("recovery")
    found = alternate(options.contestants, Plan(SCRIPTS / "steps.py", tp=2), folder, options.runs, KILLS_A_JOB)
    medians = report(results, found)
    ours = medians.get(FT)
    for name in (TORCHRUN, NVRX):
        results.check_ratio(f"recovery, ft-launch / {name}", ours, medians.get(name), 1 / 20)
    results.check_ratio("recovery, ft-launch / floor", ours, medians.get(FLOOR), 2.0)
    share = next((f for f in results.figures if f.name.startswith(FT) and "first Python line" in f.name), None)
    results.check("launcher's share (kill -> first line on all ranks), ft-launch", share, SHARE_LIMIT_MS)
    floor = medians.get(FLOOR)
    if ours is not None and floor is not None:
        without = (ours.median - STEP_S * 1e3) / (floor.median - STEP_S * 1e3)
        results.notes.append(f"a step sleeps {STEP_S * 1e3:.0f} ms; without these, ft-launch / floor is {without:.2f}")
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, EVERYONE), measure))
