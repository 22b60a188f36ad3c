"""Hangs of real ranks in lock-step: the culprit in summary.json is the rank that stood still, not the one whose timeout ran out first."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.launch import Launch

pytest.importorskip("torch")
WORKER = Path(__file__).with_name("hang_worker.py")
TIMEOUTS = "setup=40,step=1.5,checkpointing=1.5"


def hang(launch: Launcher, marks: Path, rank: int, do: str, *options: str, timeouts: str = TIMEOUTS, out: str = "3") -> Launch:
    conf = {"rank": rank, "at": 3, "do": do, "steps": 6, "marks": str(marks)}
    settings = ["--timeouts", timeouts, "--out-of-section", out, "--preload", "torch", "--tee", "none", *options]
    return launch(*settings, script=[str(WORKER), json.dumps(conf)], env={"GLOO_SOCKET_IFNAME": "lo"})


def only_incident(job: Launch) -> dict[str, Any]:
    assert job.wait(120) == 0, job.said()
    (incident,) = job.incidents()
    assert incident["cause"] == "hang"
    return incident


def stacks(job: Launch, name: str) -> str:
    (path,) = job.run_folder.glob(f"incidents/*/stacks/{name}.txt")
    return path.read_text()


@pytest.mark.parametrize("rank", range(4))
def test_a_hang_in_a_step_while_the_others_wait_in_an_all_reduce(launch: Launcher, marks: Path, rank: int) -> None:
    job = hang(launch, marks, rank, "sleep")
    incident = only_incident(job)
    assert incident["culprit"]["rank"] == rank, incident["reason"]
    assert incident["culprit"]["coords"] == {"tp": rank % 2, "cp": 0, "dp": rank // 2, "pp": 0}
    assert "hang_worker.py:stand_still" in incident["culprit"]["why"]
    assert "the other 3 ranks wait in all_reduce" in incident["culprit"]["why"]
    assert "3 other ranks stood still because of it" in incident["reason"]
    view = stacks(job, "summary")
    assert "4 of 4 ranks dumped their stacks; 2 different ones" in view
    assert f"outliers: rank {rank}\n" in view
    assert re.search(r'hang_worker.py", line \d+ in stand_still', stacks(job, f"rank_{rank:05d}"))
    other = stacks(job, f"rank_{(rank + 1) % 4:05d}")
    assert "in all_reduce" in other
    assert re.search(r"-- ft-launch: process \d+: state [SR], waits in ", other)
    left = [path for path in (job.run_folder / "cycle_0001").glob("*.stacks") if not path.stat().st_size]
    assert not left, "files of ranks that were never asked are gone"


def test_hang_action_log_names_the_same_culprit_once_and_ends_nothing(launch: Launcher, marks: Path) -> None:
    job = hang(launch, marks, 2, "sleep", "--hang-action", "log")
    job.wait_for(lambda: "only said, --hang-action log" in job.said(), "a word about the hang")
    job.wait_for(lambda: len({e["rank"] for e in job.events("finding-hung")}) == 4, "all ranks are beyond their limit")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: "passed on to all ranks" in job.said(), "the signal")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    (line,) = [line for line in job.said().splitlines() if "only said" in line]
    assert "rank 2 (tp=0,cp=0,dp=1,pp=0; node " in line
    assert "hang_worker.py:stand_still" in line
    assert "the other 3 ranks wait in all_reduce" in line
    assert job.verdict()["cycles"] == 1
    assert not job.incidents()


@pytest.mark.parametrize(("rank", "do"), [(2, "stop"), (1, "spin"), (3, "queue"), (0, "talk"), (2, "save"), (0, "save")])
def test_the_culprit_is_named(launch: Launcher, marks: Path, rank: int, do: str) -> None:
    incident = only_incident(hang(launch, marks, rank, do))
    assert incident["culprit"]["rank"] == rank, incident["reason"]
    why = {
        "stop": "is stopped (process state T)",
        "spin": "is in user code",
        "queue": "waits for data in queue.get",
        "talk": "is in user code",
    }
    assert why.get(do, "in section 'checkpointing'") in incident["culprit"]["why"]


def test_a_hang_before_the_first_section(launch: Launcher, marks: Path) -> None:
    incident = only_incident(hang(launch, marks, 3, "setup", timeouts="setup=4,step=20,checkpointing=20", out="20"))
    assert incident["culprit"]["rank"] == 3, incident["reason"]
    assert "before any section" in incident["culprit"]["why"] or "out of section" in incident["culprit"]["why"]


def test_a_hang_between_sections_whose_own_timeout_is_far_away(launch: Launcher, marks: Path) -> None:
    incident = only_incident(hang(launch, marks, 1, "between", out="600"))
    assert incident["culprit"]["rank"] == 1, incident["reason"]
    assert "out of section" in incident["culprit"]["why"]


def test_a_hang_at_exit_after_the_last_section(launch: Launcher, marks: Path) -> None:
    incident = only_incident(hang(launch, marks, 2, "exit", out="2"))
    assert incident["culprit"]["rank"] == 2, incident["reason"]
    assert "while the other 3 ranks wait in barrier" in incident["culprit"]["why"]


def test_when_all_wait_nobody_is_named(launch: Launcher, marks: Path) -> None:
    incident = only_incident(hang(launch, marks, 1, "mismatch"))
    assert incident["culprit"] is None
    assert (
        "the culprit cannot be told: all 4 ranks wait, in 2 different calls: rank 1 in recv; ranks 0,2-3 in all_reduce"
        in incident["reason"]
    )


def test_the_culprit_is_in_ft_state_and_in_the_verdict(launch: Launcher, marks: Path) -> None:
    job = hang(launch, marks, 1, "sleep", "--max-restarts", "0")
    assert job.wait(120) == 1
    assert job.verdict()["first_cause"]["rank"] == 1
    assert job.verdict()["first_cause"]["cause"] == "hang"
    state = json.loads((job.folder / "ft_logs" / "ft_state.json").read_text())
    assert state["cycles"][-1]["culprit"]["rank"] == 1
