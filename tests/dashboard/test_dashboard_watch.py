"""`ft-state watch`: on a terminal, into a pipe, once; while the file comes, goes and comes back."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ft_launcher.dashboard import source, watch
from ft_launcher.dashboard.source import Source
from tests.dashboard.runs import Run, standing, storied

PATIENCE_S = 60.0
ENV = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "ft_launcher.dashboard.cli", "watch", *map(str, args)]


@pytest.mark.serial
def test_once(tmp_path: Path) -> None:
    missing = subprocess.run(command("--once", tmp_path), capture_output=True, text=True, timeout=120, check=False, env=ENV)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == f"ft-state: {tmp_path}/ft_state.json: no such file yet\n"
    run = storied(tmp_path)
    standing(run, 5)
    shown = subprocess.run(command("--once", tmp_path), capture_output=True, text=True, timeout=120, check=False, env=ENV)
    assert (shown.returncode, shown.stderr) == (0, "")
    for part in (
        "8 hung",
        "cycle 1, hang: rank 5",
        "training again after 630 ms",
        "96.7%",
        "Timeouts",
        "Cycles",
        "for 9.6 s; its limit is 9.3 s",
    ):
        assert part in shown.stdout, part


@pytest.mark.serial
def test_into_a_pipe_each_change_is_one_line(tmp_path: Path) -> None:
    child = subprocess.Popen(command("--every", "0.1", tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    assert child.stdout is not None
    try:
        assert child.stdout.readline().endswith("no such file yet\n")
        run = Run(tmp_path, now=datetime.now(UTC))
        run.start_cycle(iteration=0)
        run.save()
        said = ""
        while "running, iteration" not in said or "8 running" not in said:
            said = child.stdout.readline()
        assert re.match(r"\d{4}-\d\d-\d\dT\S+ gpt-8b: cycle 0 running, iteration \S+; 8 running$", said), said
        run.find("hung", 5, 9.6, 9.3)
        assert "7 running, 1 hung" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, err) == (0, "")
    finally:
        child.kill()
        child.wait()


class Screen:
    """`watch` on a pseudo-terminal."""

    def __init__(self, path: Path) -> None:
        self.leader, follower = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "60"}
        self.child = subprocess.Popen(
            command("--every", "0.1", path), stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.PIPE, env=env
        )
        os.close(follower)
        os.set_blocking(self.leader, False)
        self.seen = b""

    def wait_for(self, part: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while part.encode() not in self.seen:
            assert time.monotonic() < deadline, (part, self.seen[-3000:])
            self.read()
            time.sleep(0.02)

    def read(self) -> None:
        try:
            while data := os.read(self.leader, 65536):
                self.seen += data
        except OSError:
            return

    def forget(self) -> None:
        self.read()
        self.seen = b""


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    made = Screen(tmp_path)
    yield made
    made.child.kill()
    made.child.wait()
    os.close(made.leader)


@pytest.mark.serial
def test_on_a_terminal_while_the_file_comes_goes_and_comes_back(screen: Screen, tmp_path: Path) -> None:
    screen.wait_for("no such file yet")
    run = storied(tmp_path)
    screen.wait_for("last incident")
    screen.wait_for("8 running")
    run.find("hung", 5, 9.6, 9.3)
    screen.wait_for("7 running")
    kept = [(path, path.read_bytes()) for path in (tmp_path / "ft_state.json", tmp_path / "ft_state.json.bak")]
    screen.forget()
    for path, _ in kept:
        path.unlink()
    screen.wait_for("no such file yet")
    screen.forget()
    kept[0][0].write_bytes(kept[0][1][:50])
    screen.wait_for("torn")
    screen.forget()
    kept[0][0].write_bytes(kept[0][1])
    screen.wait_for("last incident")
    screen.child.send_signal(signal.SIGINT)
    assert screen.child.wait(PATIENCE_S) == 0
    screen.read()
    assert b"\x1b[?1049h" in screen.seen or b"\x1b[?1049l" in screen.seen
    assert screen.seen.rstrip().endswith((b"\x1b[?25h", b"\x1b[?1049l")), "the terminal is as it was"
    assert screen.child.stderr is not None
    assert screen.child.stderr.read() == b""


class CountingScreen:
    """What `rich.live.Live` is to `watch`, without a terminal."""

    def __init__(self) -> None:
        self.console = Console(width=100, height=40)
        self.updates = 0

    def update(self, what: Any, refresh: bool) -> None:
        self.updates += refresh


def test_nothing_new_nothing_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "AGAIN_S", 0.0)
    run, counting, naps = storied(tmp_path), CountingScreen(), [0]

    def nap(seconds: float) -> None:
        naps[0] += 1
        if naps[0] == 10:
            run.find("suspect", 2, 6.0, 9.0)
        if naps[0] == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        watch._follow(Source(tmp_path), 0.5, counting)  # type: ignore[arg-type]
    assert (naps[0], counting.updates) == (20, 2)
