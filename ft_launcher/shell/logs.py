"""Following what the ranks print: their log files, copied to the launcher's output while they run.

Ranks write straight to files of their own; nothing of ours stands between a rank and its log, so a stuck console, a slow disk or a dead
launcher cannot stop one. `LogTail` is a thread beside the event loop: it looks at the current cycle's files ten times a second (no
inotify: network file systems have none) and copies new lines. It is never waited for, except for a bounded time at the end. A console
that is closed ends the copying, quietly; one that is stuck delays only the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.shell.tee import Lines, prefix_for

POLL_S = 0.1
_READ_BYTES = 65_536
_PIPE_BYTES = 4096  # a write no longer than PIPE_BUF is not torn apart by other writers, and does not block after poll() said there is room
_CATCH_UP_BYTES = 4 << 20  # of a finished cycle, per rank; the files have the rest
_TAIL_BYTES = 65_536


@dataclass(slots=True)
class _Followed:
    rank: int
    path: Path
    lines: Lines
    handle: int = -1
    offset: int = 0


class LogTail:
    """Copies the output of some ranks to `out_fd`. `follow` and `end_cycle` only leave a note for the thread: they never block and never
    raise.
    """

    def __init__(self, out_fd: int, world_size: int, say: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._out_fd = out_fd
        self._world_size = world_size
        self._say = say
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._wanted: deque[dict[int, Path]] = deque()
        self._asked = self._drained = 0
        self._stopping = self._output_gone = False
        self._followed: list[_Followed] = []
        self._trouble: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="ft-tee", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def follow(self, logs: Mapping[int, Path]) -> None:
        """From now on the files of a new cycle, rank -> path (they may not exist yet); those of the former are copied to their end first."""
        with self._changed:
            self._wanted.append(dict(logs))
            self._changed.notify_all()

    def end_cycle(self) -> None:
        """The ranks are gone: copies the rest, unfinished last lines included, and lets go of the files."""
        self.follow({})

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that the ranks have written so far is copied; False where `timeout_s` passes first (a stuck console)."""
        with self._changed:
            self._asked += 1
            target = self._asked
            self._changed.notify_all()
            return (
                self._changed.wait_for(lambda: self._drained >= target or not self._thread.is_alive(), timeout_s) and not self._output_gone
            )

    def close(self, timeout_s: float) -> bool:
        """Ends the cycle, drains, stops the thread; returns within `timeout_s` whatever the console does. False where something was not
        copied.
        """
        deadline = time.monotonic() + timeout_s
        self.end_cycle()
        copied = self._thread.is_alive() and self.drain(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return copied

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        finally:
            self._let_go()
            with self._changed:
                self._output_gone = self._output_gone or not self._stopping
                self._changed.notify_all()

    def _round(self) -> None:
        """Takes the next cycle if there is one, copies what is new, answers who waits; sleeps where nothing was new."""
        with self._changed:
            asked, wanted = self._asked, self._wanted.popleft() if self._wanted else None
        if wanted is not None:
            self._finish_cycle()
            self._followed = [_Followed(rank, path, Lines(prefix_for(rank, self._world_size))) for rank, path in sorted(wanted.items())]
        more = False
        for followed in self._followed:
            more = self._copy_some(followed) or more
        with self._changed:
            if not more and not self._wanted:
                self._drained = max(self._drained, asked)
                self._changed.notify_all()
            if not more and not self._wanted and not self._stopping and self._asked == asked:
                self._changed.wait(self._poll_s)

    def _finish_cycle(self) -> None:
        for followed in self._followed:
            end = self._skip_ahead(followed)
            while followed.offset < end and not self._stopping and self._copy_some(followed):
                pass
            self._write(followed.lines.end())
        self._let_go()

    def _skip_ahead(self, followed: _Followed) -> int:
        """A console that is far behind does not hold up the next cycle's lines. Returns where the file ends now: a stray that still
        writes is not waited for.
        """
        size = self._size_of(followed)
        if size - followed.offset > _CATCH_UP_BYTES:
            skipped = size - followed.offset - _CATCH_UP_BYTES
            self._write(followed.lines.end())
            self._write(followed.lines.feed(f"... {skipped} bytes not shown here, see {followed.path}\n".encode()))
            followed.offset += skipped
        return size

    def _copy_some(self, followed: _Followed) -> bool:
        """Copies up to one buffer of new output; True where there may be more."""
        if self._output_gone:
            return False
        size = self._size_of(followed)
        if size < followed.offset:  # somebody truncated it: what follows is new
            followed.offset = 0
        if size <= followed.offset:
            return False
        try:
            data = os.pread(followed.handle, _READ_BYTES, followed.offset)
        except OSError as error:
            self._say_once(followed, error)
            return False
        followed.offset += len(data)
        self._write(followed.lines.feed(data))
        return bool(data) and followed.offset < size

    def _size_of(self, followed: _Followed) -> int:
        """Size of the file, opened when it appears; 0 while it is not there."""
        try:
            if followed.handle < 0:
                followed.handle = os.open(followed.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return os.fstat(followed.handle).st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._say_once(followed, error)
            return 0

    def _write(self, lines: list[bytes]) -> None:
        """Writes whole lines, several at once where they fit into what a pipe takes undivided."""
        batch = b""
        for line in lines:
            if batch and len(batch) + len(line) > _PIPE_BYTES:
                self._put(batch)
                batch = b""
            batch += line
        self._put(batch)

    def _put(self, data: bytes) -> None:
        """Waits for room as long as it takes (or until the tail is closed); a console that is gone ends the copying."""
        rest = memoryview(data)
        while rest and not self._output_gone and not self._stopping:
            try:
                if self._room():
                    rest = rest[os.write(self._out_fd, rest[:_PIPE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._output_gone = True
                if error.errno not in (errno.EPIPE, errno.EBADF, errno.EIO):
                    self._tell(f"output of the ranks is no longer shown ({error.strerror}); their logs go on")

    def _room(self) -> bool:
        """Whether the console takes bytes now; looks for at most a poll interval, so that closing is noticed."""
        poll = select.poll()
        poll.register(self._out_fd, select.POLLOUT)
        return bool(poll.poll(self._poll_s * 1000))

    def _let_go(self) -> None:
        for followed in self._followed:
            if followed.handle >= 0:
                with contextlib.suppress(OSError):
                    os.close(followed.handle)
        self._followed = []

    def _say_once(self, followed: _Followed, error: OSError) -> None:
        if error.errno not in self._trouble:
            self._trouble.add(error.errno or 0)
            self._tell(f"{followed.path}: cannot be followed ({error.strerror or error}); the rank is not affected")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(Exception):
            self._say(line)


def last_lines(path: Path, count: int, max_bytes: int = _TAIL_BYTES) -> list[str]:
    """The last `count` lines of a log, reading only its tail of at most `max_bytes`; none where it cannot be read. Never raises for
    content.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return []
    try:
        start = max(0, os.fstat(handle).st_size - max_bytes)
        data = os.pread(handle, max_bytes, start)
    except OSError:
        return []
    finally:
        os.close(handle)
    lines = data.split(b"\n")
    if start > 0 and len(lines) > 1:
        lines = lines[1:]
    if lines and not lines[-1]:
        lines.pop()
    return [line.decode("utf-8", "replace").rstrip("\r") for line in lines[-count:]] if count > 0 else []
