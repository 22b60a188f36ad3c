"""The toy on real ranks: the same promises as the Megatron example, in a tenth of the code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_ranks import DEADLINE_S, TOY, Nursery, losses, reached, running, until

SABOTAGE = Path(__file__).with_name("sabotage.py")
STEPS = 24


def toy(folder: Path, *more: object) -> list[object]:
    return [TOY, "--steps", STEPS, "--save-every", 5, "--save", folder / "save", "--log", folder / "log.jsonl", *more]


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("toy")
    output = nursery.start(toy(folder), folder / "logs").succeed()
    assert output.startswith("iteration 1 loss ") and len(output.splitlines()) == STEPS
    return losses(folder / "log.jsonl")


def resume(nursery: Nursery, folder: Path, undisturbed: dict[int, str]) -> None:
    output = nursery.start(toy(folder), folder / "again").succeed()
    assert losses(folder / "log.jsonl") == undisturbed, output
    assert not list((folder / "save").glob(".tmp-*"))
    assert len(list((folder / "save").glob("step_*"))) <= 3


@pytest.mark.parametrize("rank", [0, 2])
def test_killed_in_a_step(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str], rank: int) -> None:
    with running(nursery.start(toy(tmp_path, "--step-ms", 10), tmp_path / "logs")) as run:
        until(reached(tmp_path / "log.jsonl", 13), run.output)
        run.kill([rank])
    resume(nursery, tmp_path, undisturbed)


@pytest.mark.parametrize("point", ["fsync@2", "rename@2", "commit@2", "committed@2"])
def test_killed_at_each_point_of_a_save(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str], point: str) -> None:
    with running(nursery.start([SABOTAGE, point, *toy(tmp_path)], tmp_path / "logs")) as run:
        until(lambda: nursery.ended(run.pids[0]) is not None, run.output)
        run.kill()
    assert run.statuses[0] == -signal.SIGKILL, run.output()
    resume(nursery, tmp_path, undisturbed)


def test_a_damaged_checkpoint_is_passed_over(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    nursery.start([*toy(tmp_path), "--steps", 15], tmp_path / "logs").succeed()
    newest = sorted((tmp_path / "save").glob("step_*"))[-1]
    assert newest.name == "step_0000015.f0001"
    os.truncate(newest, newest.stat().st_size - 1)
    resume(nursery, tmp_path, undisturbed)
    assert (tmp_path / "log.jsonl").read_text().count('"iteration": 11,') == 2, "it resumed from step 10"


def test_an_older_start_that_wakes_up_cannot_commit(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with running(nursery.start(toy(tmp_path, "--step-ms", 50), tmp_path / "logs")) as old:
        until(reached(tmp_path / "log.jsonl", 7), old.output)
        old.signal(signal.SIGSTOP)
        resume(nursery, tmp_path, undisturbed)
        kept = {path.name for path in (tmp_path / "save").glob("*.f0002")}
        old.signal(signal.SIGCONT)
        statuses = old.wait()
    assert 0 not in statuses and "FenceLost" in old.output()
    assert {path.name for path in (tmp_path / "save").glob("*.f0002")} == kept


def test_without_leave_nothing_is_committed(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    nursery.start([SABOTAGE, "refuse", *toy(tmp_path)], tmp_path / "logs").succeed()
    assert not list((tmp_path / "save").glob("step_*"))
    assert losses(tmp_path / "log.jsonl") == undisturbed


def test_under_torchrun(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """No launcher of ours: sections do nothing, the fence still holds, the numbers are the same."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *map(str, toy(tmp_path))]
    command[command.index("--log")] = "--loss-log"  # torchrun takes --log for one of its own
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "log.jsonl") == undisturbed
    assert (tmp_path / "save" / "fence.1").exists()
