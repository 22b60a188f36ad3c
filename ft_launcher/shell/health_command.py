"""Runs the user's `--health-check CMD`: a shell command that says by its exit status whether this node may take ranks.

It runs in a session of its own, is killed with all of its group when its time is over, and what it leaves running is killed as well, even in other sessions: orphans become the agent's,
and a variable tells whose they were. Its output is read as it comes, so that it can
neither block on us nor fill our memory; the last line is the reason that people see. It knows one command; what a failure means for the job, it does not know.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ft_launcher.shell import strays

SHELL = "/bin/sh"
_READ_BYTES = 65_536
_KEPT_BYTES = 8192
_LINE_CHARS = 300
_MARK = "FT_HEALTH_CHECK"
_ROUNDS, _ROUND_S = 20, 0.005
_KILLED_S = 2.0
"""How long a killed command may take to be gone before it is given up: it hangs in the kernel."""


@dataclass(frozen=True, slots=True)
class Checked:
    """How a check ended: `reason` None when the node passed. `seconds` it took."""

    reason: str | None
    seconds: float


class Command:
    """One run of the command. `spare` holds the pids that nobody may sweep away while it runs."""

    def __init__(self, text: str, spare: set[int]) -> None:
        self._text = text
        self._spare = spare
        self._said: deque[bytes] = deque()
        self._kept = 0
        self._mark = f"{_MARK}={os.getpid()}.{time.monotonic_ns()}"

    async def run(self, env: Mapping[str, str], limit_s: float) -> Checked:
        """Run it to its end, at most `limit_s` seconds. Never raises for what the command does."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            process = subprocess.Popen(
                [SHELL, "-c", self._text],
                env={**env, _MARK: self._mark.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            return Checked(f"cannot be run: {error.strerror or error}", loop.time() - began)
        self._spare.add(process.pid)
        try:
            reason = await self._watched(process, limit_s)
            await self._end_orphans()
        finally:
            self._spare.discard(process.pid)
        return Checked(reason, loop.time() - began)

    async def _watched(self, process: subprocess.Popen[bytes], limit_s: float) -> str | None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd, output = os.pidfd_open(process.pid), process.stdout
        out = output.fileno() if output is not None else -1
        os.set_blocking(out, False)
        loop.add_reader(pidfd, ended.set)
        loop.add_reader(out, self._read, out)
        try:
            in_time = await _within(ended, limit_s)
        finally:
            self._kill(process)  # before it is collected: its number cannot be another group's yet
            gone = ended.is_set() or await _within(ended, _KILLED_S)
            self._read(out)
            for fd in (pidfd, out):
                loop.remove_reader(fd)
            os.close(pidfd)
            if output is not None:
                output.close()
        if gone:
            process.wait()
        if not in_time:
            return f"did not end within {limit_s:g} s{'' if gone else ', and cannot be killed'}{self._last_words()}"
        return self._judged(process.wait())

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _end_orphans(self) -> None:
        """Those that left the group and were orphaned are children of this process now; what hangs below them will be, once they are gone."""
        for _ in range(_ROUNDS):
            found = [pid for pid in strays.children(os.getpid()) if self._mark.encode() in _environ(pid)]
            if not found:
                return
            for pid in found:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_ROUND_S)
            for pid in found:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _read(self, out: int) -> None:
        """What there is, all of it; the end is kept."""
        with suppress(OSError):
            data = os.read(out, _READ_BYTES)
            if not data:
                asyncio.get_running_loop().remove_reader(out)
            self._said.append(data[-_KEPT_BYTES:])
            self._kept += len(self._said[-1])
            while self._kept - len(self._said[0]) >= _KEPT_BYTES:
                self._kept -= len(self._said.popleft())

    def _judged(self, code: int) -> str | None:
        if code == 0:
            return None
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exit {code}"
        return f"{how}{self._last_words()}"

    def _last_words(self) -> str:
        """`: the last line that is not empty`, without control characters."""
        lines = [line.strip() for line in b"".join(self._said).decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        clean = "".join(c if c.isprintable() else "?" for c in last)[:_LINE_CHARS]
        return f": {clean}" if clean else ""


def _environ(pid: int) -> list[bytes]:
    """The variables a process was started with; none of one that is dead."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


async def _within(event: asyncio.Event, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
