"""Wrong numbers on one node with real processes: the suspect changes slots, everybody moves when nobody knows whose result it is, and verdicts are acted upon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import Launch

WORKER = Path(__file__).with_name("worker.py")
Start = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*options, kind=, rank=, ...)`: four ranks on node n0; a second call is the next run over the same files."""
    started: list[Launch] = []

    def build(*options: str, args: tuple[str, ...] = (), **conf: Any) -> Launch:
        work = tmp_path / f"work{len(started)}"
        work.mkdir()
        told = {"folder": str(work), "steps": 12, "at": 5, "device": "n0/2", "kind": "persistent", "rank": 2, **conf}
        defaults = ["--nproc-per-node", "4", "--tp", "2", "--preload", "json", "--node-id", "n0", "--run-id", f"run{len(started)}"]
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        job = Launch(folder, *defaults, *options, script=[str(WORKER), json.dumps(told), *args])
        started.append(job)
        return job

    yield build
    for job in started:
        job.kill()


def state(job: Launch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / "ft_logs" / "ft_state.json").read_text())
    return found


def decisions(job: Launch) -> list[tuple[int, str]]:
    return [(e["rule"], e["decision"]) for e in job.events("decision")]


def verdict(job: Launch, run: str = "run0") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / "ft_logs" / f"{run}.0" / "verdict.json").read_text())
    return found


def placed(job: Launch, cycle: int) -> dict[int, int]:
    """rank -> slot in that cycle."""
    (doc,) = {
        json.dumps(e["job"]["placement"]["slots"])
        for e in job.events("job")
        if e["job"]["cycle"] == cycle and e["job"]["phase"] == "running"
    }
    slots = json.loads(doc).get("n0", [0, 1, 2, 3])
    return dict(enumerate(slots))


@pytest.mark.parametrize(
    "how",
    [{}, {"late": 0.3}, {"dying": 0}, {"report": "file"}],
    ids=["at once", "one by one", "one by a signal", "told by the tracker file"],
)
def test_persistent_fault_swap_verdict_quarantine_and_a_good_end(start: Start, tmp_path: Path, how: dict[str, Any]) -> None:
    tracker = str(tmp_path / "rejected.txt")
    job = start(args=("--result-rejected-tracker-filename", tracker), tracker=tracker, **how)
    assert job.wait() == 0, job.said()
    assert decisions(job) == [(3, "restart"), (4, "restart"), (6, "finish")]
    moved = placed(job, 1)
    assert moved[2] != 2
    assert sorted(moved.values()) == [0, 1, 2, 3]
    assert sum(slot != rank for rank, slot in moved.items()) == 2, "only the suspect and whoever it changes with"
    assert placed(job, 2) == moved, "the job goes on where it is"
    known = state(job)["hardware"]
    assert list(known) == ["n0/2"]
    assert known["n0/2"]["quarantine_until"] is not None
    assert known["n0/2"]["rank"] == 2
    assert state(job)["budgets"]["restarts"]["used"] == 0
    log = (job.run_folder / "cycle_0002" / "rank_00002.log").read_text()
    assert "after verdict persistent" in log
    assert "is quarantined" in job.said()


def test_the_next_run_keeps_the_rank_off_the_quarantined_device(start: Start) -> None:
    assert start().wait() == 0
    again = start("--fixed-timeouts")
    assert again.wait() == 0, again.said()
    slots = [e["job"]["placement"]["slots"] for e in again.events("job") if e["job"]["run_id"] == "run1" and e["job"]["phase"] == "running"]
    assert slots[0]["n0"][2] != 2, "from its first cycle"
    assert len(slots) == 1, "and so nothing had to be moved"


def test_unknown_suspect_rotates_all_slots_and_the_tracker_less_verdict_is_not_guessed(start: Start) -> None:
    job = start(report="none")
    assert job.wait() == 17, job.said()
    assert decisions(job) == [(3, "restart"), (4, "stop")]
    assert placed(job, 1) == {0: 1, 1: 2, 2: 3, 3: 0}
    assert "no record says" in verdict(job)["reason"]


def test_a_correct_result_stops_with_17_and_names_the_application(start: Start) -> None:
    job = start(kind="application")
    assert job.wait() == 17, job.said()
    assert verdict(job)["outcome"] == "result_rejected"
    assert "the application is the cause" in verdict(job)["reason"]
    assert state(job)["hardware"]["n0/2"]["quarantine_until"] is None
    assert state(job)["hardware"]["n0/2"]["suspicions"] == 0


def test_transient_faults_restart_in_place_until_the_device_is_quarantined(start: Start) -> None:
    job = start("--quarantine-after", "2", kind="transient", times=2)
    assert job.wait() == 0, job.said()
    assert decisions(job) == [(4, "restart"), (4, "restart"), (6, "finish")]
    assert placed(job, 1)[2] == 2
    assert placed(job, 2)[2] != 2
    known = state(job)["hardware"]["n0/2"]
    assert known["suspicions"] == 2
    assert known["quarantine_until"] is not None


def test_everywhere_wrong_ends_with_16_and_names_what_to_exclude(start: Start) -> None:
    job = start("--nproc-per-node", "2", kind="persistent", device="n0/1", rank=1, crash={"cycle": 1})
    assert job.wait() == 0, job.said()
    assert [rule for rule, _ in decisions(job)] == [3, 10, 4, 6], "a second fault during the rerun moves nobody and loses nothing"
    assert state(job)["budgets"]["restarts"]["used"] == 1


def test_no_other_device_is_exit_16_with_the_machine_to_exclude(start: Start) -> None:
    job = start("--nproc-per-node", "1", "--tp", "1", rank=0, device="n0/0")
    assert job.wait() == 16, job.said()
    found = verdict(job)
    assert found["outcome"] == "rerun_elsewhere"
    assert found["first_cause"]["node"] == "n0"
    assert [(d["node"], d["slot"]) for d in found["exclude"]] == [("n0", 0)]
