"""`--progress-file PATH`: the newest iteration of a script that has no monitoring client, so that cycles without progress are noticed all the same.

The script writes a plain number; here a thread reads it once a second and once more when a cycle is over, for the file may lie on a file system that has stalled: then the last number
known stands. Within a cycle only a higher number counts, so a half-written one does no harm; better still is to write a new file and rename it over the old one. What the number means
for the job is the policy's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ft_launcher.core.evidence import RankProgress

EVERY_S = 1.0
_MOST_BYTES = 64
_MOST_DIGITS = 18


def iteration_in(data: bytes) -> int | None:
    """The number on the first line; None for anything else (nothing yet, half a word, a fraction)."""
    line = data.split(b"\n", 1)[0].strip()
    return int(line) if line.isdigit() and len(line) <= _MOST_DIGITS else None


class ProgressFile:
    """One file, and the thread that reads it until `close`. `iteration` is the highest number seen since `forget`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.iteration: int | None = None
        self._wake = threading.Condition()
        self._asked = self._answered = 0
        self._generation = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        threading.Thread(target=self._run, name="ft-progress-file", daemon=True).start()

    def forget(self) -> None:
        """A new cycle begins, which may resume further back."""
        with self._wake:
            self.iteration = None
            self._generation += 1

    async def fresh(self, limit_s: float) -> None:
        """Return once the file was read again, or after `limit_s` seconds: then it cannot be."""
        done = self._loop.create_future()
        with self._wake:
            self._asked += 1
            self._waiting.append((self._asked, done))
            self._wake.notify()
        with suppress(TimeoutError):
            await asyncio.wait_for(done, limit_s)

    def fill(self, progress: Mapping[int, RankProgress]) -> dict[int, RankProgress]:
        """The same, with this iteration for every rank that has told none itself."""
        return {rank: p if p.iteration is not None else replace(p, iteration=self.iteration) for rank, p in progress.items()}

    def close(self) -> None:
        """Ask the thread to end; it is not waited for."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def _run(self) -> None:
        while not self._closed:
            with self._wake:
                asked, generation = self._asked, self._generation
            found = _read(self._path)
            with self._wake:
                if found is not None and generation == self._generation:
                    self.iteration = max(found, self.iteration or 0)
                self._answered = asked
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._answer)
            with self._wake:
                if self._asked == asked and not self._closed:
                    self._wake.wait(EVERY_S)

    def _answer(self) -> None:
        answered = [done for asked, done in self._waiting if asked <= self._answered]
        self._waiting = [(asked, done) for asked, done in self._waiting if asked > self._answered]
        for done in answered:
            if not done.done():
                done.set_result(None)


def _read(path: Path) -> int | None:
    """Never raises: a file that is not there, is a folder or a pipe tells nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return iteration_in(os.read(fd, _MOST_BYTES))
    except OSError:
        return None
    finally:
        os.close(fd)
