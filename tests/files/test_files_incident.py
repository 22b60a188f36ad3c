from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ft_launcher.shell.incident import (
    LANE,
    FirstCause,
    Incident,
    IncidentJob,
    RankAtIncident,
    Verdict,
    incident_folders,
    submit_verdict,
    write_verdict,
)
from ft_launcher.shell.writer import Keep, Writer
from ft_launcher.state import atomic
from ft_launcher.state.document import Culprit

GENEROUS_S = 60.0
WHO = Culprit(3, {"tp": 1, "cp": 0, "dp": 0, "pp": 1}, "node-a", 3, "killed by SIGKILL first")


def incident(cycle: int = 2, **more: object) -> Incident:
    ranks = {3: RankAtIncident(17, "step", 0.5, -9), 0: RankAtIncident(17, None, None, None)}
    return Incident(cycle, "crash", "rank 3 was killed by SIGKILL", "restart in place", WHO, ranks, **more)


def record(writer: Writer, run_folder: Path, made: Incident) -> None:
    writer.submit(LANE, IncidentJob(run_folder / "incidents", made), Keep.ALWAYS)


@pytest.fixture
def writer():
    made = Writer(lambda line: None)
    made.start()
    yield made
    made.close(5.0)


def test_an_incident_is_a_folder_with_everything_in_it(writer: Writer, tmp_path: Path) -> None:
    log = tmp_path / "rank_00003.log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(200)) + b"Traceback \xff")
    progress = {0: {"iteration": 17, "sections": ["step"]}, 3: {"iteration": float("nan")}}
    made = incident(
        progress=progress, stacks={3: "Thread 1\n  ü \ud800"}, logs={3: log, 0: tmp_path / "missing"}, extra={"cycle": "not this"}
    )
    record(writer, tmp_path, made)
    assert writer.flush(GENEROUS_S)
    folder = tmp_path / "incidents" / "0001"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {
        "cycle": 2,
        "cause": "crash",
        "reason": "rank 3 was killed by SIGKILL",
        "decision": "restart in place",
        "culprit": {
            "rank": 3,
            "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 1},
            "node": "node-a",
            "slot": 3,
            "why": "killed by SIGKILL first",
        },
        "ranks": {
            "0": {"iteration": 17, "section": None, "since_s": None, "exit": None},
            "3": {"iteration": 17, "section": "step", "since_s": 0.5, "exit": -9},
        },
    }
    assert json.loads((folder / "progress.json").read_text()) == {"0": {"iteration": 17, "sections": ["step"]}, "3": {"iteration": None}}
    assert (folder / "stacks" / "rank_00003.txt").read_text("utf-8") == "Thread 1\n  ü \\ud800"
    last = (folder / "last_lines" / "rank_00003.txt").read_text("utf-8").splitlines()
    assert last[-1] == "Traceback �"
    assert last[0] == "line 151"
    assert (folder / "last_lines" / "rank_00000.txt").read_text() == ""


def test_no_culprit_is_null(writer: Writer, tmp_path: Path) -> None:
    IncidentJob(tmp_path, Incident(0, "node_lost", "why", "what", None, {}))()
    assert json.loads((tmp_path / "0001" / "summary.json").read_text())["culprit"] is None


def test_numbers_go_on_after_a_restart_of_the_launcher_and_beyond_what_is_there(writer: Writer, tmp_path: Path) -> None:
    for expected in ("0001", "0002"):
        record(writer, tmp_path, incident())
        assert writer.flush(GENEROUS_S)
        assert incident_folders(tmp_path)[-1].name == expected
    (tmp_path / "incidents" / "9999").mkdir()
    (tmp_path / "incidents" / "notes.txt").write_text("an operator's")
    record(writer, tmp_path, incident())
    assert writer.flush(GENEROUS_S)
    assert [path.name for path in incident_folders(tmp_path)] == ["0001", "0002", "9999", "10000"]


def test_two_controllers_never_share_a_number(tmp_path: Path) -> None:
    jobs = [IncidentJob(tmp_path, incident(cycle=n)) for n in range(24)]
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS_S)
    assert sorted(json.loads((path / "summary.json").read_text())["cycle"] for path in tmp_path.iterdir()) == list(range(24))
    assert len({job.folder for job in jobs}) == 24


def test_a_job_that_failed_half_way_completes_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = IncidentJob(tmp_path, incident(stacks={3: "stack"}))
    (tmp_path / "0001").mkdir()
    real, writes = atomic.stage, []

    def full_at_the_second(path: Path, data: bytes) -> Path:
        writes.append(path)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(atomic, "stage", full_at_the_second)
    with pytest.raises(OSError, match="No space"):
        job()
    job()
    assert sorted(os.listdir(tmp_path)) == ["0001", "0002"]
    assert (tmp_path / "0002" / "stacks" / "rank_00003.txt").read_text() == "stack"
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []


def test_the_verdict_has_exactly_the_named_keys(writer: Writer, tmp_path: Path) -> None:
    cause = FirstCause(3, WHO.coords, "node-a", 3, "crash", 1, "ValueError: x", "Traceback ...")
    submit_verdict(writer, tmp_path, Verdict("failed", 1, "max restarts reached", 4, cause))
    assert writer.flush(GENEROUS_S)
    assert json.loads((tmp_path / "verdict.json").read_text()) == {
        "outcome": "failed",
        "exit_code": 1,
        "reason": "max restarts reached",
        "cycles": 4,
        "first_cause": {
            "rank": 3,
            "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 1},
            "node": "node-a",
            "slot": 3,
            "cause": "crash",
            "exit": 1,
            "error": {"message": "ValueError: x", "traceback": "Traceback ..."},
        },
    }
    assert write_verdict(tmp_path, Verdict("done", 0, "all ranks finished", 1)) == tmp_path / "verdict.json"
    assert json.loads((tmp_path / "verdict.json").read_text())["first_cause"] is None
    no_error = Verdict("failed", 137, "r", 1, FirstCause(0, None, None, None, "signal", -9))
    write_verdict(tmp_path, no_error)
    assert json.loads((tmp_path / "verdict.json").read_text())["first_cause"]["error"] is None
