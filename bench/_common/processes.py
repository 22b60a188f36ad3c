"""Processes that a benchmark starts, and the certainty that none of them outlives it.

The benchmark makes itself a subreaper: whatever a contestant starts, in whatever session, stays below this process, so killing "everything below me"
ends all of it and nobody else's. It knows processes; what a launcher is, it does not know.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)
_TERM_S = 1.0
_KILL_S = 10.0
_POLL_S = 0.02
_TAIL_BYTES = 2000


class BenchError(Exception):
    """A contestant did not do what was waited for; the text has the end of its output."""


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def below(pid: int | None = None) -> list[psutil.Process]:
    """Everything below `pid` (default: this process); empty when there is no such process."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def kill_below() -> int:
    """SIGKILL everything below this process and collect it; how many processes there were. Raises BenchError when something stays."""
    seen: set[int] = set()
    end = time.monotonic() + _KILL_S
    while left := below():
        seen.update(process.pid for process in left)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _collect()  # a process whose other threads are still ending looks dead and cannot be collected yet: then once more
        if time.monotonic() > end:
            raise BenchError(f"processes that do not die: {[process.pid for process in left]}")
        time.sleep(_POLL_S)
    return len(seen)


def kill_rank(pid: int, number: int = signal.SIGKILL) -> int:
    """Signal one process below this one; CLOCK_MONOTONIC nanoseconds just before. Raises BenchError when `pid` is not ours."""
    if pid not in {process.pid for process in below()}:
        raise BenchError(f"process {pid} was not started by this benchmark")
    at_ns = time.monotonic_ns()
    os.kill(pid, number)
    return at_ns


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """One contestant running; ended, with all below it, when the `with` block is left."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.command = tuple(command)
        self.env = dict(env)
        self._folder = folder
        self._output = folder / "output.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.started_ns = 0

    def __enter__(self) -> Job:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self.started_ns = time.monotonic_ns()
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # should the benchmark itself be killed
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The contestant's own process."""
        if self._process is None:
            raise BenchError("the contestant was not started")
        return self._process.pid

    def end(self) -> None:
        """Ask it to leave, wait a little, then kill what is left below this process."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_TERM_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        kill_below()
        self._process = None

    def wait_for(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Poll until `done()`. Raises BenchError when the contestant ends first or `limit_s` pass."""
        end = time.monotonic() + limit_s
        while not done():
            ended = self._process is None or self._process.poll() is not None
            if ended and not done():
                raise BenchError(f"{self.command[0]} ended while waiting for {what}:\n{self.tail()}")
            if time.monotonic() > end:
                raise BenchError(f"no {what} within {limit_s:.0f} s from {self.command[0]}:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self) -> str:
        """The end of what it printed."""
        return self._output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def _collect() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return
