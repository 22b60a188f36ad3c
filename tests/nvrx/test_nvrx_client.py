"""The unmodified client of the installed nvidia_resiliency_ext, in real ranks under `ft-launch`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.shell.private_folder import sweep
from tests.e2e.launch import Launch

Nvrx = Callable[..., Launch]


def read(marks: Path, name: str) -> Any:
    return json.loads((marks / name).read_text())


def rank_log(job: Launch, rank: int, cycle: int = 0) -> str:
    return (job.run_folder / f"cycle_{cycle:04d}" / f"rank_{rank:05d}.log").read_text()


def test_sections_under_way(nvrx: Nvrx, marks: Path) -> None:
    job = nvrx("--timeouts", "step=20,+other=7", "--out-of-section", "33")
    assert job.wait() == 0, job.said() + rank_log(job, 0)
    sections, out, state = read(marks, "config.0.0")
    assert sections == {"setup": 600.0, "step": 20.0, "checkpointing": 420.0, "other": 7.0}
    assert out == 33.0
    assert state == {"current_timeouts": {}}
    assert len(list(marks.glob("done.*"))) == 2
    assert "NVRx" not in job.said()
    assert not list(job.events("finding-silent")), "the client is seen"


@pytest.mark.parametrize(
    ("style", "at", "options", "section", "limit_s"),
    [
        ("sections", 4, ("--timeouts", "step=1"), "step", 1.0),
        ("sections", "after 4", ("--out-of-section", "1"), None, 1.0),
        ("sections", "setup", ("--timeouts", "setup=3"), "setup", 3.0),
        ("heartbeats", 4, ("--timeouts", "+heartbeat=1"), "heartbeat", 1.0),
        ("megatron", "save 5", ("--timeouts", "checkpointing=1"), "checkpointing", 1.0),
    ],
)
def test_a_hang_is_found_and_the_job_goes_on(
    nvrx: Nvrx, marks: Path, style: str, at: object, options: tuple[str, ...], section: str | None, limit_s: float
) -> None:
    job = nvrx(
        *options,
        style=style,
        plan=[{"rank": 1, "cycle": 0, "at": at, "do": "hang"}, {"rank": 0, "cycle": 0, "at": 9, "do": "sleep", "value": 0.5}],
    )
    assert job.wait() == 0, job.said() + rank_log(job, 1)
    (incident,) = job.incidents()
    assert (incident["cause"], incident["culprit"]["rank"]) == ("hang", 1)
    found = next(f for f in job.events("finding-hung") if f["rank"] == 1)
    assert (found["section"], found["limit_s"]) == (section, limit_s)
    assert found["since_s"] < limit_s + 5
    assert len(list(marks.glob("done.*.1"))) == 2


def test_the_clients_own_timeouts_hold_and_are_loaded_in_the_next_cycle(nvrx: Nvrx, marks: Path) -> None:
    """As Megatron does it: calculated after a save, kept by rank 0 in a file, loaded at the next start. The hang of 60 s is found by them, not by the launch's 120 s."""
    plan = [{"rank": 1, "cycle": 1, "at": 19, "do": "hang"}, {"cycle": 0, "at": 12, "do": "exit", "value": 3}]
    job = nvrx("--timeouts", "step=120", style="megatron", steps=20, save_at=10, plan=plan)
    assert job.wait() == 0, job.said() + rank_log(job, 0)
    calculated = read(marks, "calculated.0.0")["current_timeouts"]["section"]
    assert calculated["calculated_sections"] == ["step"]
    assert read(marks, "timeouts.1.1")[0]["step"] == pytest.approx(calculated["section"]["step"])
    found = next(f for f in job.events("finding-hung") if f["cycle"] == 1)
    assert found["section"] == "step"
    assert 4 < found["limit_s"] < 20
    told = [e for e in job.events("nvrx-timeouts") if e["cycle"] == 0 and e["rank"] == 1]
    assert told[-1]["sections"]["step"] == pytest.approx(read(marks, "calculated.1.0")["current_timeouts"]["section"]["section"]["step"])


def test_heartbeat_timeouts_are_calculated(nvrx: Nvrx, marks: Path) -> None:
    job = nvrx(style="heartbeats", plan=[{"at": 8, "do": "calculate"}])
    assert job.wait() == 0, job.said() + rank_log(job, 0)
    assert read(marks, "calculated.1.0")["current_timeouts"]["heartbeat"]["were_calculated"] is True
    (told,) = [e for e in job.events("nvrx-timeouts") if e["rank"] == 1]
    assert 0 < told["heartbeat_s"] < 60


def test_a_request_to_shut_down_stops_the_job(nvrx: Nvrx, marks: Path) -> None:
    plan = [{"rank": 0, "at": 3, "do": "shutdown"}, {"at": 4, "do": "sleep", "value": 1000}]
    job = nvrx("--term-grace", "20", plan=plan)
    assert job.wait() == 143, job.said() + rank_log(job, 0)
    assert "asks to shut the workload down (ECC errors [2J): treated as SIGTERM" in job.said()
    assert {e["action"] for e in job.events("nvrx-request")} == {"ShutdownWorkload"}
    assert (marks / "shutdown.0.0").exists(), "it was answered"
    assert job.verdict()["outcome"] == "stopped"
    assert job.verdict()["cycles"] == 1


def test_a_request_to_exclude_the_only_node_is_said(nvrx: Nvrx) -> None:
    job = nvrx(plan=[{"rank": 1, "at": 3, "do": "exclude"}])
    assert job.wait() == 0, job.said() + rank_log(job, 1)
    assert "rank 1 asked to exclude this node (ECC errors [2J); there is no spare: the job goes on here" in job.said()


def test_a_client_that_breaks_harms_its_own_monitoring_alone(nvrx: Nvrx, marks: Path) -> None:
    """Rank 0 sends garbage in the middle of a step and goes on for longer than a step may take: nobody can know, so nobody ends it. Rank 1 hangs and is found."""
    plan = [
        {"rank": 0, "cycle": 0, "at": 3, "do": "garbage", "value": 3},
        {"rank": 0, "cycle": 0, "at": 3, "do": "hang"},
        {"rank": 1, "cycle": 0, "at": 5, "do": "sleep", "value": 0.5},
        {"rank": 1, "cycle": 0, "at": "after 5", "do": "hang"},
    ]
    job = nvrx("--timeouts", "step=1", "--out-of-section", "6", plan=plan)
    assert job.wait() == 0, job.said() + rank_log(job, 0)
    assert [f["rank"] for f in job.events("finding-hung") if f["cycle"] == 0] == [1]
    assert job.said().count("rank 0: NVRx's socket: its client's connection was closed, for it sent") == 1


def test_after_its_goodbye_a_script_is_left_alone(nvrx: Nvrx) -> None:
    job = nvrx("--timeouts", "step=1", "--out-of-section", "1", plan=[{"at": "end", "do": "sleep", "value": 3}])
    assert job.wait() == 0, job.said()
    assert not list(job.events("finding-hung"))
    assert job.verdict()["cycles"] == 1


def test_a_stranger_of_the_same_user_is_refused(nvrx: Nvrx, marks: Path) -> None:
    job = nvrx(plan=[{"rank": 0, "at": 2, "do": "strangers"}, {"rank": 1, "at": 2, "do": "sleep", "value": 1}])
    job.wait_mark(marks, "path.0.0")
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(30)
    stranger.connect(read(marks, "path.0.0"))
    assert stranger.recv(1) == b""
    stranger.close()
    (marks / "go_on").touch()
    assert job.wait() == 0, job.said()
    assert f"process {os.getpid()} is neither the rank's" in job.said()


def test_the_sockets_are_gone_at_the_end_and_swept_after_a_killed_agent(nvrx: Nvrx, marks: Path, tmp_path: Path) -> None:
    place = Path("/tmp") / f"nvrx-e2e-{os.getpid()}"
    place.mkdir()
    try:
        plan = [{"rank": 0, "at": 2, "do": "strangers"}, {"rank": 1, "at": 2, "do": "sleep", "value": 1000}]
        job = nvrx("--term-grace", "0.5", plan=plan, env={"TMPDIR": str(place)})
        job.wait_mark(marks, "path.0.0")
        assert Path(read(marks, "path.0.0")).parent.parent == place
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert not list(place.glob("ft-launch-*"))
        (marks / "path.0.0").unlink()
        killed = nvrx(plan=plan, env={"TMPDIR": str(place)})
        killed.wait_mark(marks, "path.0.0")
        killed.process.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(list(place.glob("ft-launch-*"))) <= 1
        sweep(str(place))
        assert not list(place.glob("ft-launch-*"))
    finally:
        subprocess.run([sys.executable, "-c", "import shutil, sys; shutil.rmtree(sys.argv[1])", str(place)], check=True)
