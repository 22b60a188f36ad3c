"""A launcher that is gone must not look like one whose run is quiet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.dashboard import watch
from ft_launcher.dashboard.heard import SILENT_AFTER_S, silence
from ft_launcher.dashboard.losses import seconds_of
from ft_launcher.dashboard.source import Source
from tests.dashboard.runs import storied
from tests.e2e.launch import gone

PATIENCE_S = 60.0
FREQUENT = """
import ft_launcher.shell.controller, ft_launcher.state.document
ft_launcher.shell.controller.NAG_S = ft_launcher.state.document.STATED_EVERY_S = 0.1
from ft_launcher.cli import main
main()
"""
"""A launcher that does every 0.1 s what others do every 15 s."""


def at(written: str) -> dict[str, Any]:
    return {"run": {"written": written}}


def test_who_has_spoken_lately_or_is_over_is_not_silent() -> None:
    written = "2026-03-01T08:00:00Z"
    began = seconds_of(written)
    assert began is not None
    assert silence(at(written), False, began + SILENT_AFTER_S - 1) is None
    assert silence(at(written), True, began + 1e6) is None
    assert silence(at(written), False, began - 1e6) is None, "a clock that goes wrong is no death"
    assert silence({"run": None}, False, began) is None
    assert silence(at("yesterday"), False, began) is None
    said = silence(at(written), False, began + SILENT_AFTER_S)
    assert said is not None
    assert written in said


def test_the_page_and_the_alert_have_the_same_patience() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f"const SILENT_S = {SILENT_AFTER_S:.0f};" in (root / "ft_launcher/dashboard/page/main.js").read_text()
    assert f"ft_state_age_seconds > {SILENT_AFTER_S:.0f} " in (root / "examples/prometheus/ft-launcher.rules.yml").read_text()


def test_show_and_watch_say_so(tmp_path: Path) -> None:
    run = storied(tmp_path)
    shown = subprocess.run(
        [sys.executable, "-m", "ft_launcher.dashboard.cli", "show", str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert re.search(r"^but +no word of the launcher since 2026-03-01T", shown.stdout, re.MULTILINE)
    assert "no word of the launcher since 2026-03-01T" in watch.summary(Source(tmp_path).look())
    run.conclude("failed", 1, "restarts are used up")
    run.save()
    shown = subprocess.run(
        [sys.executable, "-m", "ft_launcher.dashboard.cli", "show", str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "no word" not in shown.stdout
    assert "no word" not in watch.summary(Source(tmp_path).look())


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks that tell nobody anything."""
    (tmp_path / "quiet.py").write_text("import time\ntime.sleep(600)\n")
    options = ["--nproc-per-node", "2", "--preload", "json", "quiet.py"]
    with (tmp_path / "said.txt").open("wb") as said:
        child = subprocess.Popen(
            [sys.executable, "-c", FREQUENT, *options],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=dict(os.environ),
        )
    yield child
    child.kill()
    child.wait()


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.serial
def test_a_quiet_run_states_its_position_and_a_killed_launcher_does_not(launched: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "ft_logs/ft_state.json"

    def position() -> dict[str, Any]:
        run: dict[str, Any] = json.loads(path.read_text())["run"]
        return run

    wait_for(path.exists)
    wait_for(lambda: position()["phase"] == "running")
    first = position()
    wait_for(lambda: position()["written"] > first["written"])
    second = position()
    wait_for(lambda: position()["written"] > second["written"])
    assert {**position(), "written": None, "spares": 0} == {**first, "written": None, "spares": 0}, "nothing else has changed"
    launched.kill()
    launched.wait()
    assert gone([launched.pid])
    last = seconds_of(position()["written"])
    assert last is not None
    assert silence(json.loads(path.read_text()), False, last + SILENT_AFTER_S) is not None
