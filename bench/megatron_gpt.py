"""SIGKILL of one rank of the Megatron example (TP2 x PP2) -> first new step on all four ranks: ft-launch, the floor, torchrun and NVRx.

    python bench/megatron_gpt.py [--runs 5] [--json FILE] [--contestants ft-launch,floor]

`examples/megatron_gpt/train.py` unchanged, without checkpoints and evaluation: what is measured is the way back to training, not the reading of a
checkpoint. It is run through `scripts/stamped.py`, which stamps the end of each step. ft-launch and the floor preload `torch` and `megatron.core`;
the others have nothing of the kind.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _common.contestants import EVERYONE, FT, NVRX, SCRIPTS, TORCHRUN, Plan
from _common.figures import Options, Results, parse, run
from _common.outage import alternate
from recovery import report

TRAIN = Path(__file__).resolve().parents[1] / "examples" / "megatron_gpt" / "train.py"
SIZES = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--train-iters": 1_000_000,
    "--eval-interval": 0,
    "--sample-bytes": 0,
}
SMALL = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--seq-length": 32,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--step-delay-ms": 20,
}


def measure(options: Options, folder: Path) -> Results:
    """All contestants in turn."""
    results = Results("megatron_gpt")
    arguments = [str(part) for pair in {**SIZES, **SMALL}.items() for part in pair]
    plan = Plan(SCRIPTS / "stamped.py", (str(TRAIN), *arguments), tp=2, pp=2, preload="torch,megatron.core")
    # Several kills a job, for starting one of these takes longer than most recoveries; but two: nothing is saved here, so a third in a row without progress would meet ft-launch's backoff.
    medians = report(results, alternate(options.contestants, plan, folder, options.runs, dict.fromkeys(EVERYONE, 2)))
    for name in (TORCHRUN, NVRX):
        results.check_ratio(f"Megatron TP2 x PP2 recovery, ft-launch / {name}", medians.get(FT), medians.get(name), 1 / 15)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, EVERYONE), measure))
