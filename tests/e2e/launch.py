"""Start `ft-launch` for a test, watch it through its journal, and take it down whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_S = 60.0


class Launch:
    """One `ft-launch` in `folder`. Output goes to files; `wait_for` polls the journal with a generous deadline."""

    def __init__(self, folder: Path, *options: str, script: list[str], env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        command = [sys.executable, "-m", "ft_launcher", *options, *script]
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **(env or {})}
            )

    @property
    def run_folder(self) -> Path:
        (found,) = [p for p in (self.folder / "ft_logs").iterdir() if p.is_dir()] if (self.folder / "ft_logs").is_dir() else []
        return found

    def journal(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for path in sorted((self.folder / "ft_logs").glob("*/journal.*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    continue
        return lines

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        return (e for e in self.journal() if e["kind"] == kind)

    def wait_for(self, what: Callable[[], Any], why: str = "the condition") -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := what():
                return found
            if self.process.poll() is not None and not what():
                raise AssertionError(f"the launcher ended with {self.process.returncode} before {why}:\n{self.said()}")
            time.sleep(0.02)
        raise AssertionError(f"{why} did not come within {PATIENCE_S} s:\n{self.said()}")

    def wait_mark(self, marks: Path, name: str, count: int = 1) -> list[Path]:
        def found() -> list[Path]:
            paths = sorted(marks.glob(name))
            return paths if len(paths) >= count else []

        result: list[Path] = self.wait_for(found, f"mark {name}")
        return result

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def said(self) -> str:
        return self.err.read_text()

    def verdict(self) -> dict[str, Any]:
        doc: dict[str, Any] = json.loads((self.run_folder / "verdict.json").read_text())
        return doc

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted(self.run_folder.glob("incidents/*/summary.json"))]

    def below(self) -> list[psutil.Process]:
        """Every process below the launcher."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def rank_pid(self, rank: int) -> int:
        """The pid of a running rank, told by its title."""
        for process in self.below():
            try:
                if f"[rank {rank}]" in " ".join(process.cmdline()):
                    return process.pid
            except psutil.Error:
                continue
        raise AssertionError(f"rank {rank} does not run")

    def zygote_pid(self) -> int:
        """The agent's child of that title: there may be others, that ask a GPU driver or run a check."""
        (pid,) = [c.pid for c in psutil.Process(self.process.pid).children() if "".join(c.cmdline()[:1]).startswith("ft-launch: zygote")]
        return pid

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    """True once none of the processes lives; zombies of others count as gone."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not [p for p in pids if alive(p)]:
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
