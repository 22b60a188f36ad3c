"""The main job: a Megatron-core GPT at TP2 x PP2 that is hurt at several moments ends with the losses of the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.e2e.conftest import Launcher
from tests.e2e.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "megatron_gpt"
sys.path.insert(0, str(EXAMPLE))
from options import PRELOAD  # noqa: E402

ITERS = 36
SIZES = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "2"]
SIZES += ["--global-batch-size", "4", "--hidden-dropout", "0.1", "--eval-interval", "0", "--sample-bytes", "0"]


def train(launch: Launcher, tmp_path: Path, name: str, *options: str) -> Launch:
    save, log = tmp_path / f"{name}-save", tmp_path / f"{name}.jsonl"
    script = [
        str(EXAMPLE / "train.py"),
        *SIZES,
        "--train-iters",
        str(ITERS),
        "--save",
        str(save),
        "--save-interval",
        "4",
        "--log",
        str(log),
    ]
    return launch(
        "--nproc-per-node", "4", "--tp", "2", "--pp", "2", "--preload", PRELOAD, "--tee", "none", *options,
        script=script, env={"GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


def losses(tmp_path: Path, name: str) -> dict[int, str]:
    """Iteration -> loss, exact; an iteration that was repeated must repeat its loss."""
    found: dict[int, str] = {}
    path = tmp_path / f"{name}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        key = next(k for k in ("iteration", "iter", "step") if k in entry)
        loss = str(entry.get("loss_hex", entry["loss"]))
        assert found.setdefault(entry[key], loss) == loss, f"iteration {entry[key]} was not repeated exactly"
    return found


def reached(tmp_path: Path, name: str, iteration: int) -> bool:
    return max(losses(tmp_path, name), default=0) >= iteration


def test_a_hurt_run_ends_with_the_losses_of_an_undisturbed_one(launch: Launcher, tmp_path: Path) -> None:
    quiet = train(launch, tmp_path, "quiet")
    assert quiet.wait(240) == 0, quiet.said()
    hurt = train(launch, tmp_path, "hurt", "--timeouts", "step=3,checkpointing=20", "--max-restarts", "10")

    hurt.wait_for(lambda: reached(tmp_path, "hurt", 6), "iteration 6")
    os.kill(hurt.rank_pid(3), signal.SIGKILL)
    hurt.wait_for(lambda: len(hurt.incidents()) == 1 and reached(tmp_path, "hurt", 10), "iteration 10 after the first fault")

    committed = {p.name for p in (tmp_path / "hurt-save").iterdir()}
    hurt.wait_for(lambda: {p.name for p in (tmp_path / "hurt-save").iterdir()} - committed, "the beginning of a save")
    os.kill(hurt.rank_pid(0), signal.SIGKILL)
    hurt.wait_for(lambda: len(hurt.incidents()) == 2 and reached(tmp_path, "hurt", 18), "iteration 18 after the second fault")

    os.kill(hurt.rank_pid(1), signal.SIGSTOP)
    hurt.wait_for(lambda: len(hurt.incidents()) == 3, "the stopped rank to be found")
    assert hurt.wait(240) == 0, hurt.said()

    assert [i["cause"] for i in hurt.incidents()] == ["crash", "crash", "hang"]
    assert [i["culprit"]["rank"] for i in hurt.incidents()[:2]] == [3, 0]
    assert sorted(losses(tmp_path, "hurt")) == list(range(1, ITERS + 1))
    assert losses(tmp_path, "hurt") == losses(tmp_path, "quiet")
