"""Timeouts learned by real jobs: used at once, kept whatever ends the run, and there from the next run's first second."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Launcher
from tests.e2e.launch import Launch


def learned_step(job: Launch) -> dict[str, Any] | None:
    """The journal's last word on the step's timeout."""
    found = [e for e in job.events("timeout") if e["section"] == "step"]
    return found[-1] if found else None


def state_of(folder: Path) -> dict[str, Any]:
    doc: dict[str, Any] = json.loads((folder / "ft_logs" / "ft_state.json").read_text())
    return doc


def test_a_hang_is_found_by_the_learned_timeout_not_by_the_fixed_one(launch: Launcher) -> None:
    job = launch("--timeouts", "step=500", steps=120, resume=True, plan=[{"rank": 1, "cycle": 0, "at": 100, "do": "hang"}])
    assert job.wait() == 0, job.said()
    step = learned_step(job)
    assert step is not None
    assert step["hard_s"] < 60
    assert "occurrences" in step["reason"]
    (incident,) = job.incidents()
    assert (incident["cause"], incident["culprit"]["rank"]) == ("hang", 1)
    section = state_of(job.folder)["sections"]["step"]
    assert section["learned"]
    assert section["distribution"]["count"] >= 16
    assert len(section["history"]) >= 1


def test_what_was_learned_survives_a_kill_and_serves_the_next_run(launch: Launcher, tmp_path: Path) -> None:
    state = tmp_path / "shared_state.json"
    first = launch("--ft-state", str(state), steps=100_000)
    first.wait_for(lambda: state.exists() and json.loads(state.read_text())["sections"]["step"].get("learned"), "a learned timeout on disk")
    first.process.send_signal(signal.SIGKILL)
    first.wait()
    again = launch("--ft-state", str(state), script=first_script(first), steps=100_000)
    entry = again.wait_for(lambda: learned_step(again), "the step's timeout in the journal")
    assert entry["cycle"] is None, "before the first cycle began"
    assert entry["hard_s"] < 60
    again.process.send_signal(signal.SIGTERM)
    again.wait()


def first_script(job: Launch) -> list[str]:
    """The very same script and arguments."""
    args = job.process.args
    assert isinstance(args, list)
    at = next(i for i, word in enumerate(args) if str(word).endswith("worker.py"))
    return [str(word) for word in args[at:]]


def test_another_script_or_argument_starts_from_the_fixed_values(launch: Launcher, tmp_path: Path) -> None:
    state = tmp_path / "shared_state.json"
    assert launch("--ft-state", str(state), steps=150).wait() == 0
    assert json.loads(state.read_text())["sections"]["step"]["learned"]
    other = launch("--ft-state", str(state), steps=3)
    assert other.wait() == 0
    assert learned_step(other) is None
    assert len(json.loads(state.read_text())["learning"]) >= 1, "what the other job learned is kept"


def test_fixed_timeouts_stay_fixed(launch: Launcher) -> None:
    job = launch("--fixed-timeouts", steps=150)
    assert job.wait() == 0
    assert learned_step(job) is None
    assert state_of(job.folder)["sections"]["step"]["hard_s"] == 180
