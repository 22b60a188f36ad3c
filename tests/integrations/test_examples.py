"""The examples of examples/lightning and examples/nemo, run for real where their packages are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import Launch

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.serial
TOY = """\
import os, signal, sys, time
from monitors.client import attach
mon = attach()
print("argv", sys.argv[1:], "coords", os.environ["FT_COORDS"], flush=True)
for i in range(8):
    with mon.section("step", iteration=i):
        time.sleep(0.02)
        if i == 5 and os.environ["FT_CYCLE"] == "0" and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
print("done", flush=True)
"""


def test_lightning_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
        pytest.skip("no PyTorch Lightning is installed")
    example = [str(ROOT / "examples" / "lightning" / "train.py"), "--epochs", "40", "--save", "checkpoints"]
    job = Launch(
        tmp_path,
        "--nproc-per-node",
        "2",
        "--timeouts",
        "setup=120,step=60",
        script=example,
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        job.wait_for(lambda: "epoch 5 " in job.out.read_text(), "the fifth epoch")
        os.kill(job.rank_pid(1), signal.SIGKILL)
        assert job.wait(120) == 0, job.said()
    finally:
        job.kill()
    steps = [int(line.split()[4]) for line in job.out.read_text().splitlines() if line.startswith("[r0] epoch")]
    (incident,) = job.incidents()
    assert incident["ranks"]["1"]["iteration"] >= 40, "its steps were seen"
    again = next(i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1)
    assert steps[again] % 8 == 0 and steps[again] >= 40 and steps[-1] == 319, "resumed at an epoch's end, and finished"


def run_recipe(folder: Path, *args: str) -> str:
    if importlib.util.find_spec("nemo_run") is None:
        pytest.skip("nemo_run is not installed")
    env = {
        **os.environ,
        "NEMORUN_HOME": str(folder / "nemo"),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, str(ROOT / "examples" / "nemo" / "recipe.py"), *args]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_nemo_experiment_runs_under_the_launcher_and_survives_a_killed_rank(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    said = run_recipe(tmp_path, "--preload", "json", str(tmp_path / "toy.py"), "two words")
    assert "SUCCEEDED" in said
    (verdict,) = (tmp_path / "nemo" / "experiments").glob("**/verdict.json")
    doc = json.loads(verdict.read_text())
    assert (doc["outcome"], doc["cycles"]) == ("finished", 2)
    logs = [path.read_text() for path in sorted(verdict.parent.glob("cycle_0001/rank_*.log"))]
    assert len(logs) == 4 and all("argv ['two words']" in log and "done" in log for log in logs)
    assert verdict.parent.parent.name == "ft_logs" and verdict.parent.parent.parent.name == "train", (
        "in the task's folder of the experiment"
    )


def test_the_same_recipe_for_slurm_is_shown_and_not_submitted(tmp_path: Path) -> None:
    said = " ".join(run_recipe(tmp_path, "--slurm", "--dryrun").split())
    assert "--kill-on-bad-exit=1 --no-kill --wait=0 --kill-on-bad-exit=0" in said
    assert "after-run" in said
