"""Drives a real zygote from a plain test function, and runs the same script under a fresh interpreter for comparison."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ft_launcher.shell.process import (
    Command,
    ProcessEvent,
    RankEnded,
    RankSpec,
    RankStarted,
    Reaped,
    SourcesChanged,
    Zygote,
    ZygoteLost,
    ZygoteOptions,
    ZygoteReady,
)
from monitors import layout

DEADLINE_S = 120.0
Event = TypeVar("Event")


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a script's process ended and what it printed (stdout and stderr in one file, as in a rank's log)."""

    code: int | None
    signal: int | None
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and (self.code, self.signal, self.same) == (other.code, other.signal, other.same)

    __hash__ = None  # type: ignore[assignment]

    @property
    def same(self) -> str:
        """The text without what differs between any two processes: addresses and thread names' numbers."""
        return re.sub(r"0x[0-9a-f]{6,}|started \d+", "@", self.text)


class Driver:
    """One zygote and everything it said. Use as a context manager; leaving it closes the zygote and checks that nothing is left of it."""

    def __init__(self, folder: Path, command: Command, **options: Any) -> None:
        env = dict(options.pop("env", base_env()))
        env.setdefault("PYTHONUNBUFFERED", "1")
        self.folder = folder
        self.options = ZygoteOptions(
            command=command, env=env, **{"cwd": str(folder), "log_path": str(folder / "zygote.log"), "early_standby": False, **options}
        )
        self.loop = asyncio.new_event_loop()
        self.events: list[ProcessEvent] = []
        self._arrived = asyncio.Event()
        self._seen = 0
        self.cycle = 0
        self.zygote = Zygote(self.options, self._on_event)

    def __enter__(self) -> Driver:
        self.loop.run_until_complete(self.zygote.start())
        self.ready = self.expect(ZygoteReady)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.zygote.close(DEADLINE_S))
        self.loop.close()

    def _on_event(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._arrived.set()

    def expect(self, kind: type[Event], match: Callable[[Event], bool] = lambda _: True, deadline_s: float = DEADLINE_S) -> Event:
        """The first event of this kind, past or to come, that matches; a lost zygote fails the test at once."""
        end = time.monotonic() + deadline_s
        while True:
            for event in self.events:
                if isinstance(event, kind) and match(event):
                    return event
            lost = [event for event in self.events if isinstance(event, ZygoteLost | SourcesChanged)]
            assert not lost, f"{lost}\n{self.log()}"
            assert time.monotonic() < end, f"no {kind.__name__} in {deadline_s:.0f} s; got {self.events[-10:]}\n{self.log()}"
            self.turn(min(5.0, deadline_s))

    def turn(self, limit_s: float) -> None:
        """Runs the event loop until an event arrives, at most `limit_s`."""

        async def wait() -> None:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), limit_s)
            except TimeoutError:
                return

        self.loop.run_until_complete(wait())

    def call(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Calls one of the zygote's methods inside the event loop, as the agent does."""

        async def inside() -> None:
            function(*args, **kwargs)

        self.loop.run_until_complete(inside())

    def log(self) -> str:
        path = Path(self.options.log_path or "/dev/null")
        return path.read_text() if path.exists() else ""

    def rank_log(self, cycle: int, rank: int) -> Path:
        return self.folder / f"c{cycle}_r{rank}.log"

    def fork(self, count: int = 1, env: Mapping[str, str | None] | None = None, **fields: Any) -> int:
        """Starts ranks 0..count-1 in a new cycle; returns the cycle."""
        self.cycle += 1
        specs = [
            RankSpec(
                **{"rank": r, "slot": r, "log_path": str(self.rank_log(self.cycle, r)), "env": {"RANK": str(r), **(env or {})}, **fields}
            )
            for r in range(count)
        ]
        self.call(self.zygote.fork_ranks, self.cycle, specs)
        return self.cycle

    def started(self, cycle: int, rank: int = 0) -> RankStarted:
        return self.expect(RankStarted, lambda e: e.cycle == cycle and e.rank == rank)

    def ended(self, cycle: int, rank: int = 0) -> RankEnded:
        return self.expect(RankEnded, lambda e: e.cycle == cycle and e.rank == rank)

    def reap(self, cycle: int) -> Reaped:
        self.call(self.zygote.reap, cycle)
        return self.expect(Reaped, lambda e: e.cycle == cycle)

    def run(self, env: Mapping[str, str | None] | None = None) -> Outcome:
        """One rank from start to end."""
        cycle = self.fork(env=env)
        end = self.ended(cycle)
        return Outcome(end.code, end.signal, self.rank_log(cycle, 0).read_text(errors="surrogateescape"))

    def wait_text(self, cycle: int, text: str, rank: int = 0) -> str:
        """Waits until a rank has printed `text`; returns all it has printed."""
        path = self.rank_log(cycle, rank)
        wait_until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}")
        return path.read_text()


def wait_until(ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.005)


def fresh(folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> Outcome:
    """`python [flags] args...` as a shell would start it with output redirected to one file."""
    log = folder / "fresh.log"
    log.unlink(missing_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        whole = {**(base_env() if env is None else env)}
        whole.setdefault("PYTHONUNBUFFERED", "1")
        whole["RANK"] = "0"
        process = subprocess.run(
            [sys.executable, *flags, *args],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd=folder,
            env=whole,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(fd)
    code = process.returncode
    return Outcome(code if code >= 0 else None, -code if code < 0 else None, log.read_text(errors="surrogateescape"))


def base_env() -> dict[str, str]:
    """This process's environment without what changes from test to test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def gone(pid: int) -> bool:
    """No such process, or only its name on a tombstone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def make_page() -> int:
    """An empty section page, as the agent makes one."""
    fd = os.memfd_create(layout.MEMFD_NAME)
    os.ftruncate(fd, layout.PAGE_BYTES)
    os.pwrite(fd, layout.MAGIC_WORD.to_bytes(8, "little") + layout.LAYOUT_VERSION.to_bytes(8, "little"), 0)
    return fd
