"""What a launch costs: command -> first Python line on all ranks, for 4 and 16 ranks, with and without torch.

    python bench/start.py [--runs 5] [--json FILE] [--contestants ft-launch,torchrun]

`no torch`: a script that imports nothing (ft-launch with `--preload none`). `torch`: a script that imports torch (ft-launch preloads it, so its first
line comes late but with torch already there): for 4 ranks also the time until torch is usable on all ranks, which is what training waits for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from _common.contestants import FT, LAUNCHERS, SCRIPTS, Plan, launch
from _common.figures import Figure, Options, Results, parse, run

LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of launch. `until`: the stamp that ends it."""

    world: int
    torch: bool
    until: str

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.world} ranks, {'torch' if self.torch else 'no torch'}"


CASES = (Case(4, False, "line"), Case(16, False, "line"), Case(4, True, "torch"), Case(16, True, "line"))


def launch_once(name: str, case: Case, folder: Path) -> dict[str, float]:
    """Stamp -> seconds from the command until all ranks had made it."""
    plan = Plan(SCRIPTS / "hello.py", ("torch",) if case.torch else (), world=case.world, preload="torch" if case.torch else "none")
    job, stamps = launch(name, plan, folder)
    with job:
        job.wait_for(lambda: stamps.first_on_all(case.until) is not None, f"{case.until} of {case.world} ranks", LIMIT_S)
        seen = {kind: stamps.first_on_all(kind) for kind in ("line", case.until)}
        return {kind: (at_ns - job.started_ns) / 1e9 for kind, at_ns in seen.items() if at_ns is not None}


def measure(options: Options, folder: Path) -> Results:
    """Every case: all contestants in turn, `options.runs` times."""
    results = Results("start")
    for case in CASES[:1] if options.quick else CASES:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants}
        for turn in range(options.runs):
            for name in options.contestants:
                found[name].append(launch_once(name, case, folder / f"{case.world}{case.torch:d}{turn}{name[:2]}"))
        _report(results, case, found)
    return results


def _report(results: Results, case: Case, found: dict[str, list[dict[str, float]]]) -> None:
    ours: Figure | None = None
    for name, seen in found.items():
        figure = results.add(f"{name}: {case.name}, command -> first line", "s", [s["line"] for s in seen])
        if case.until != "line":
            figure = results.add(f"{name}: {case.name}, command -> {case.until} usable", "s", [s[case.until] for s in seen])
        ours = figure if name == FT else ours
        if name != FT and ours is not None and figure is not None:
            results.notes.append(f"{case.name}: {name} takes {figure.median / ours.median:.1f} x ft-launch's time")


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, LAUNCHERS), measure))
