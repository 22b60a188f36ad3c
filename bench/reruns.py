"""A wrong number in the Megatron example: from the first rank that leaves with it to the verdict, and until training goes on.

    python bench/reruns.py [--runs 5] [--json FILE] [--contestants ours,megatron]

TP2 x PP2 on one node; rank 1's gradients are spoiled in iteration 6, once (transient) or for as long as it runs on that device (persistent). The contestants are the two
rerun machines: this project's and Megatron's own, unmodified. No other launcher gives a rank another device within the job, so there is none to compare with.
Times are differences within the journal of one node.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from _common.figures import Options, Results, parse, run
from _common.processes import BenchError

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "megatron_gpt" / "train.py"
SIZES = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "2"]
SIZES += ["--global-batch-size", "4", "--eval-interval", "0", "--sample-bytes", "0", "--train-iters", "12", "--save-interval", "4"]
LIMIT_S = 240.0


def story(kind: str, machine: str, folder: Path) -> list[dict[str, Any]]:
    """One run; its journal."""
    folder.mkdir(parents=True)
    launcher = ["-m", "ft_launcher", "--nproc-per-node", "4", "--tp", "2", "--pp", "2", "--preload", "torch,megatron.core", "--tee", "none"]
    script = [str(EXAMPLE), *SIZES, "--save", "save", "--rerun", machine, "--inject", kind, "--at", "6", "--on", "1"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, *script], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"{kind} fault, {machine}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    (journal,) = folder.glob("ft_logs/*/journal.*.jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()]


def times(journal: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds from the first exit with 16 or 17 to the verdict (rule 4), and to the first step of all ranks after it."""
    left = next(e for e in journal if e["kind"] == "ended" and e.get("code") in (16, 17))
    verdict = next(e for e in journal if e["kind"] == "decision" and e["rule"] == 4)
    again = next(e for e in _after(journal, verdict) if e["kind"] == "recovered")
    began = _at(left)
    return {"verdict": _at(verdict) - began, "training again": _at(again) - began}


def _after(journal: list[dict[str, Any]], event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return iter(journal[journal.index(event) + 1 :])


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["t"]).timestamp()


def measure(options: Options, folder: Path) -> Results:
    """Each kind with each machine, in turn."""
    results = Results("reruns")
    found: dict[tuple[str, str, str], list[float]] = {}
    runs = itertools.product(range(options.runs), options.contestants, ("transient", "persistent"))
    for turn, machine, kind in runs:
        for what, seconds in times(story(kind, machine, folder / f"{turn}{machine}{kind}")).items():
            found.setdefault((machine, kind, what), []).append(seconds)
    for (machine, kind, what), values in found.items():
        results.add(f"{machine}: {kind}, first exit -> {what}", "s", values)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, ("ours", "megatron"), runs=3), measure))
