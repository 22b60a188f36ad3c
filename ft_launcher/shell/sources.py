"""Have the files of the preloaded modules changed since they were imported? A fresh interpreter would run the new text; a forked rank would not.

The files may lie on a file system that has stalled, and a zygote that waits in the kernel is a zygote that reports no deaths. So the looking (2,900 files in
9 ms where all is well) is done by a short-lived child, which the loop listens to and gives up on. It knows module files and stamps, not what is done about a
change.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

NAMED_FILES = 20
FRESH_S = (
    0.2  # a look that began at most this long before a fork was asked for is good enough: it was then taken while the last ranks were dying
)
PATIENCE_S = 1.0

Stamp = tuple[int, int, int]


class SourceStamps:
    """The files of the modules imported from now on, with time, size and inode as they were when `remember` first met them.

    What was imported before is the launcher itself, and that must not change under a running job: a new zygote would not understand the old agent.
    """

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._stamps: dict[str, Stamp | None] = {}

    def remember(self) -> None:
        """Takes the stamp of every file not met before: call it after each import, so that little time passes between the two."""
        for path in self._module_files():
            if path not in self._stamps:
                self._stamps[path] = _stamp(path)

    def changed(self) -> list[str]:
        """The files that differ now or are gone, in path order."""
        return sorted(path for path, stamp in self._stamps.items() if stamp is not None and _stamp(path) != stamp)

    def _module_files(self) -> Iterator[str]:
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and name not in self._before:
                yield path


class SourceCheck:
    """One look at all files, in a child process: `fd` becomes readable when it is done."""

    def __init__(self, stamps: SourceStamps) -> None:
        self.fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _look(stamps, write_fd)
        os.close(write_fd)

    def result(self) -> tuple[str, ...]:
        """At most 20 of the changed files. Call it once `fd` is readable; it closes `fd`. Empty when the child failed."""
        with os.fdopen(self.fd, "rb") as pipe:
            text = pipe.read()
        return tuple(json.loads(text)) if text else ()

    def give_up(self) -> None:
        """Stops listening."""
        os.close(self.fd)


class SourceGate:
    """Keeps the latest look and says whether a fork may go ahead. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, stamps: SourceStamps) -> None:
        self._stamps = stamps
        self._check: SourceCheck | None = None
        self._began = 0.0
        self._known_of = float("-inf")
        self._files: tuple[str, ...] = ()

    @property
    def pids(self) -> frozenset[int]:
        """The child that is looking, if any."""
        return frozenset() if self._check is None else frozenset({self._check.pid})

    @property
    def fd(self) -> int | None:
        """Readable when `hear` has something to hear."""
        return None if self._check is None else self._check.fd

    def look(self) -> None:
        """Starts a look, unless one is under way."""
        if self._check is None:
            self._began = time.monotonic()
            self._check = SourceCheck(self._stamps)

    def hear(self) -> None:
        """Takes the result of the look."""
        if self._check is not None:
            self._files, self._known_of, self._check = self._check.result(), self._began, None

    def verdict(self, asked: float) -> tuple[str, ...] | None:
        """For a fork asked for at `asked`: the changed files, none when it may go ahead, None when that is not known yet (a look is under way)."""
        if self._known_of >= asked - FRESH_S:
            self._known_of = float("-inf")  # good for one fork
            return self._files
        self.look()
        if time.monotonic() < max(asked, self._began) + PATIENCE_S:
            return None
        sys.stderr.write(
            f"ft-launch: the file system did not tell within {PATIENCE_S:.0f} s whether sources have changed; starting with what was imported\n"
        )
        self._give_up()
        return ()

    def _give_up(self) -> None:
        if self._check is not None:
            self._check.give_up()
            self._check = None


def _look(stamps: SourceStamps, write_fd: int) -> None:
    code = 1
    try:
        os.write(write_fd, json.dumps(stamps.changed()[:NAMED_FILES]).encode())
        code = 0
    finally:
        os._exit(code)


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
