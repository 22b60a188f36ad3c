"""Figures with their spread, targets, the table, and the JSON line that ends every benchmark's output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _common.contestants import versions
from _common.processes import become_subreaper, kill_below


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured values of one thing, all in `unit`."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Check:
    """A target: `value` must be at most `limit`."""

    name: str
    value: float
    limit: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.limit


@dataclass(slots=True)
class Results:
    """What one benchmark found; `notes` are sentences that belong below the table (what is included, what failed)."""

    bench: str
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, values: Sequence[float]) -> Figure | None:
        """Add a figure; nothing where nothing was measured."""
        if not values:
            return None
        figure = Figure(name, unit, tuple(values))
        self.figures.append(figure)
        return figure

    def check(self, name: str, figure: Figure | None, limit: float) -> None:
        """The median of `figure` must be at most `limit`, in its unit; nothing where nothing was measured."""
        if figure is not None:
            self.checks.append(Check(name, figure.median, limit, figure.unit))

    def check_ratio(self, name: str, ours: Figure | None, theirs: Figure | None, limit: float) -> None:
        """Our median divided by theirs must be at most `limit`."""
        if ours is not None and theirs is not None:
            self.checks.append(Check(name, ours.median / theirs.median, limit, "x"))

    def table(self) -> str:
        """For people."""
        lines = [f"== {self.bench} ==", f"{'':58} {'median':>10} {'min':>10} {'max':>10}  runs"]
        for f in self.figures:
            spread = f"{_short(f.median):>10} {_short(min(f.values)):>10} {_short(max(f.values)):>10}"
            lines.append(f"{f.name[:52]:52} {f.unit:>5} {spread}  {len(f.values)}")
        for c in self.checks:
            lines.append(
                f"{'ok  ' if c.passed else 'MISS'} {c.name}: {_short(c.value)}{c.unit and ' ' + c.unit} (target <= {_short(c.limit)})"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """For programs: medians beside all values, targets with their outcome."""
        figures = [asdict(f) | {"median": f.median} for f in self.figures]
        checks = [asdict(c) | {"passed": c.passed} for c in self.checks]
        return {"bench": self.bench, "figures": figures, "checks": checks, "notes": self.notes}


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}"


def machine() -> dict[str, Any]:
    """Where and when this was measured; the load is that of the last one, five and fifteen minutes."""
    cores = len(os.sched_getaffinity(0))
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": cores,
        "cpu": names[0] if names else platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": versions(),
    }


@dataclass(frozen=True, slots=True)
class Options:
    """Every benchmark's command line. `quick`: one short run, to see that it works; its figures mean nothing."""

    runs: int
    quick: bool
    json: Path | None
    contestants: tuple[str, ...]
    strict: bool


def parse(doc: str, contestants: Sequence[str], argv: Sequence[str] | None = None, runs: int = 5) -> Options:
    """Read the command line; `doc` is what --help says first."""
    parser = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    parser.add_argument("--runs", type=_at_least_one, default=runs, help=f"measurements of each contestant (default {runs})")
    parser.add_argument("--quick", action="store_true", help="one short run, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there as well")
    parser.add_argument(
        "--contestants", type=lambda text: _known(text, contestants), default=tuple(contestants), metavar=",".join(contestants)
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    found = parser.parse_args(argv)
    return Options(1 if found.quick else found.runs, found.quick, found.json, found.contestants, found.strict)


def run(options: Options, measure: Callable[[Options, Path], Results]) -> int:
    """Measure in a temporary folder, print table and JSON line, leave nothing behind; the exit code."""
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the clean-up below happens
    before = machine()
    folder = Path(tempfile.mkdtemp(prefix="ftb"))
    try:
        results = measure(options, folder)
    finally:
        kill_below()
        shutil.rmtree(folder, ignore_errors=True)
    print(results.table())
    body = results.to_json() | {"runs": options.runs, "machine": before | {"load_after": machine()["load"]}}
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body), flush=True)
    return 1 if options.strict and not all(c.passed for c in results.checks) else 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} runs: 1 or more")
    return number


def _known(text: str, contestants: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = sorted(set(names) - set(contestants))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(contestants)}")
    return names


def progress(text: str) -> None:
    """One line for whoever waits."""
    print(text, file=sys.stderr, flush=True)
