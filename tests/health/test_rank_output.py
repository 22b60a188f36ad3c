"""A rank's output on a full disk: lost, counted, said; and everything else as Python does it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.shell.rank_output import LogStream, identity


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[LogStream]:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    made = LogStream(fd)
    made.log = identity(fd)
    yield made
    os.close(fd)


def on_full_disk(stream: LogStream) -> LogStream:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, stream.fileno())
    os.close(full)
    return stream


def the_log_is_full(stream: LogStream) -> None:
    on_full_disk(stream)
    stream.log = identity(stream.fileno())


def test_a_full_disk_swallows(stream: LogStream) -> None:
    the_log_is_full(stream)
    assert stream.write(b"12345") == 5
    assert stream.write(memoryview(b"123456")[:3]) == 3
    assert stream._lost == 8


def test_what_is_missing_is_said_when_there_is_room_again(stream: LogStream, tmp_path: Path) -> None:
    log = os.dup(stream.fileno())
    the_log_is_full(stream)
    stream.write(b"lost")
    os.dup2(log, stream.fileno())
    os.close(log)
    assert stream.write(b"kept\n") == 5
    assert stream.write(b"also\n") == 5
    why = os.strerror(errno.ENOSPC)
    assert (tmp_path / "log").read_text() == f"\nft-launch: 4 bytes of output are missing here ({why})\nkept\nalso\n"


def test_another_file_in_the_logs_place_fails_as_ever(stream: LogStream) -> None:
    """The script has put something else there: that is its own."""
    with pytest.raises(OSError, match="No space left"):
        on_full_disk(stream).write(b"12345")


def test_before_there_is_a_log_it_fails_as_ever(stream: LogStream) -> None:
    on_full_disk(stream).log = None
    with pytest.raises(OSError, match="No space left"):
        stream.write(b"12345")


def test_other_errors_are_the_scripts_own(stream: LogStream) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, stream.fileno())
    stream.log = identity(stream.fileno())
    with pytest.raises(BrokenPipeError):
        stream.write(b"12345")
    os.close(writing)
