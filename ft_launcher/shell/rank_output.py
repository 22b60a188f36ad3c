"""A rank's standard output and error on a disk that may be full: what cannot be written is lost, and training goes on.

Ranks write to their log files themselves, so a full disk reaches `print`, which would end a job of weeks for a line of text. Here the lowest layer of sys.stdout and sys.stderr takes an
error of the log's file system for written, counts the bytes, and says how many they were as soon as there is room again. Only for the log itself: whatever a script opens, or puts in
the log's place, behaves as ever. Made once in the zygote, before anything is imported, so that modules that keep the streams have these too; children started by exec, and ranks
started by `spawn`, have Python's own.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
"""Full, over quota, broken, gone: the file system's trouble, not the script's."""


class LogStream(io.FileIO):
    """Descriptor 1 or 2 of a rank. `log`: device and inode of the file that may lose bytes, None for none."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.log: tuple[int, int] | None = None
        self._lost = 0
        self._why = ""

    def write(self, data: Any, /) -> int:
        """As FileIO's; bytes that the log's file system refuses count as written."""
        try:
            if self._lost:
                self._tell()
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST or self.log is None or self.log != identity(self.fileno()):
                raise
            size = memoryview(data).nbytes
            self._lost += size
            self._why = error.strerror or str(error)
            return size

    def _tell(self) -> None:
        """There may be room again: first of all say what is missing here. Raises OSError where there is none."""
        said = f"\nft-launch: {self._lost} bytes of output are missing here ({self._why})\n".encode()
        if super().write(said):
            self._lost = 0


# What scripts print of their streams stays Python's own.
LogStream.__module__, LogStream.__qualname__, LogStream.__name__ = "_io", "FileIO", "FileIO"


def identity(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor is, None for a closed one."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def install() -> None:
    """Give this process such streams, in all else like those it has. A stream that Python did not make, or that is closed, stays."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__") and not stream.closed:
            stream.flush()
            fresh = _like(stream, fd)
            setattr(sys, name, fresh)
            setattr(sys, f"__{name}__", fresh)


def _like(stream: io.TextIOWrapper, fd: int) -> io.TextIOWrapper:
    raw: Any = LogStream(fd)
    raw.name = stream.name  # `<stdout>`, as Python names it
    buffer = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw, getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE))
    fresh: Any = io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    fresh.mode = "w"
    return fresh  # type: ignore[no-any-return]


def begin_log() -> None:
    """In a rank, once descriptors 1 and 2 are its log: from now on that file may lose bytes."""
    for stream in (sys.stdout, sys.stderr):
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if isinstance(raw, LogStream):
            raw.log = identity(raw.fileno())
