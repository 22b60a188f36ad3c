"""All benchmarks, one after the other, and one table of targets at the end: what `make bench` runs. Each is a file of its own that can be run alone.

    python bench/run.py [--quick] [--runs 5] [--only recovery,hang] [--json FILE]

The last line is JSON: every benchmark's own, under its name. A benchmark that fails is said to have failed and does not keep the others from running;
then the exit code is 1. With --quick each makes one short run, to see that it works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common.figures import machine

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Bench:
    """`file` below bench/. `shared`: takes --runs, --quick and reports targets; else only `quick_args` make it short. `args`: given always."""

    name: str
    file: str
    shared: bool = True
    quick_args: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


# A new benchmark takes its place here: a file beside this one whose main is `_common.figures.run(options, measure)`, or any that ends with a line of JSON with its `checks`.
BENCHES = (
    Bench("recovery", "recovery.py"),
    Bench("megatron_gpt", "megatron_gpt.py", args=("--contestants", "ft-launch,torchrun,NVRx")),
    Bench("start", "start.py"),
    Bench("sections", "sections.py"),
    Bench("section_cost", "section_cost.py", shared=False, quick_args=("--batches", "5")),
    Bench("overhead", "overhead.py"),
    Bench("nvrx_sections", "nvrx_sections.py"),
    Bench("hang", "hang.py", args=("--contestants", "ft-launch,NVRx,NVRx-1s")),
    Bench("timeouts", "timeouts.py", shared=False, quick_args=("--quick",)),
    Bench("nodes", "nodes.py"),
    Bench("store", "store.py"),
    Bench(
        "sim", "sim.py", args=("--contestants", "decisions,worlds")
    ),  # the goodput table takes minutes and measures nothing of the machine
)


def run_one(bench: Bench, runs: int, quick: bool) -> dict[str, Any] | None:
    """Run it, show its table, and return its JSON; None when it failed."""
    shared = ["--quick"] if quick else ["--runs", str(runs)]
    args = [*bench.args, *(shared if bench.shared else bench.quick_args if quick else ())]
    with subprocess.Popen([sys.executable, str(HERE / bench.file), *args], stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # it cleans up after itself
            process.wait()
            raise
    lines = output.splitlines()
    body = _parsed(lines[-1]) if lines else None
    print("\n".join(lines[:-1] if body is not None else lines), flush=True)
    if process.returncode != 0 or body is None:
        print(f"FAILED {bench.name}: exit code {process.returncode}", flush=True)
        return None
    return body


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        body = json.loads(line)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def targets(found: dict[str, dict[str, Any] | None]) -> list[str]:
    """A line for each target of all benchmarks."""
    lines = []
    for name, body in found.items():
        if body is None:
            lines.append(f"FAILED  {name}")
            continue
        for check in body.get("checks", []):
            word = "ok" if check["passed"] else "MISS"
            lines.append(f"{word:6}  {check['name']}: {check['value']:.3g} {check.get('unit', '')} (target <= {check['limit']:.3g})")
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, metavar=",".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.only) - set(names))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(names)}")
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: 1 or more")
    return options


def main() -> int:
    """Run them all."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the benchmark of the moment is ended, too
    began, before = time.monotonic(), machine()
    found = {bench.name: run_one(bench, options.runs, options.quick) for bench in BENCHES if bench.name in options.only}
    print("\n== targets ==", *targets(found), sep="\n")
    after = machine()["load"]
    print(
        f"{time.monotonic() - began:.0f} s on {before['cores']} cores ({before['cpu']}); load {before['load'][0]} before, {after[0]} after"
    )
    body = {"bench": "all", "machine": before | {"load_after": after}, "benches": found}
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body), flush=True)
    return 0 if all(body is not None for body in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
