"""The writer thread against disks that are full, gone, read-only and stuck. Jobs are real functions; the stuck disk is a real full pipe."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ft_launcher.shell.writer import Keep, Writer

GENEROUS_S = 60.0


class Said(list):
    """Lines said, with an event to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self.changed:
            self.append(line)
            self.changed.notify_all()

    def wait_for(self, part: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(part in line for line in self), GENEROUS_S), self


class Disk:
    """A place to write to that can be broken and mended."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.written: list[object] = []
        self.tried = threading.Event()

    def job(self, value: object):
        def write() -> None:
            self.tried.set()
            if self.error is not None:
                raise self.error
            self.written.append(value)

        return write


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def writer(said: Said):
    made = Writer(said)
    made.start()
    yield made
    made.close(5.0)
    assert not made._thread.is_alive()


class StuckPipe:
    """A job that blocks in write(2) on a full pipe, as on a file system that does not answer."""

    def __init__(self) -> None:
        self.reader, self.pipe = os.pipe()
        self.entered = threading.Event()
        os.set_blocking(self.pipe, False)
        try:
            while True:
                os.write(self.pipe, b"x" * 65536)
        except BlockingIOError:
            os.set_blocking(self.pipe, True)

    def __call__(self) -> None:
        self.entered.set()
        os.write(self.pipe, b"y" * 4096)

    def release(self) -> None:
        while len(os.read(self.reader, 1 << 20)) == 1 << 20:
            pass

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.pipe)


@pytest.fixture
def stuck():
    pipe = StuckPipe()
    yield pipe
    pipe.close()


def test_jobs_of_a_lane_are_done_in_order_and_flush_waits_for_them(writer: Writer) -> None:
    disk = Disk()
    for n in range(500):
        assert writer.submit("journal", disk.job(n))
    assert writer.flush(GENEROUS_S)
    assert disk.written == list(range(500))


def test_a_full_disk_is_said_once_and_nothing_of_it_is_lost_when_it_is_back(writer: Writer, said: Said) -> None:
    disk = Disk()
    disk.error = OSError(errno.ENOSPC, "No space left on device", "/x/journal.jsonl")
    for n in range(20):
        writer.submit("journal", disk.job(n))
    writer.submit("verdict", disk.job("verdict"), Keep.ALWAYS)
    said.wait_for("journal: cannot be written (/x/journal.jsonl: No space")
    assert not writer.flush(0.5)
    assert len([line for line in said if line.startswith("journal")]) == 1
    disk.error = None
    assert writer.flush(GENEROUS_S)
    assert [value for value in disk.written if value != "verdict"] == list(range(20))
    assert "verdict" in disk.written
    said.wait_for("journal: written again after")


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOENT, errno.ESTALE, errno.EDQUOT])
def test_trouble_in_one_lane_leaves_the_others_alone(writer: Writer, said: Said, code: int) -> None:
    bad, good = Disk(), Disk()
    bad.error = OSError(code, os.strerror(code))
    writer.submit("journal", bad.job(1))
    writer.submit("state", good.job(2), Keep.NEWEST)
    said.wait_for(os.strerror(code))
    writer.submit("state", good.job(3), Keep.NEWEST)
    deadline = time.monotonic() + GENEROUS_S
    while good.written[-1:] != [3] and time.monotonic() < deadline:
        writer.flush(0.01)
    assert good.written[-1] == 3
    bad.error = None
    assert writer.flush(GENEROUS_S)
    assert bad.written == [1]


def test_a_stuck_disk_delays_no_caller_and_drops_lines_but_never_a_verdict(said: Said, stuck: StuckPipe) -> None:
    writer, disk = Writer(said, capacity=100), Disk()
    writer.start()
    writer.submit("journal", stuck)
    assert stuck.entered.wait(GENEROUS_S)
    accepted = [writer.submit("journal", disk.job(n)) for n in range(1000)]
    for n in range(300):
        assert writer.submit("state", disk.job(f"state {n}"), Keep.NEWEST)
        assert writer.submit("incidents", disk.job(f"incident {n}"), Keep.ALWAYS)
    assert accepted.count(True) == 99
    assert writer.stalled_s > 0
    assert not writer.flush(0.05)
    stuck.release()
    assert writer.flush(GENEROUS_S)
    assert writer.stalled_s == 0
    assert [value for value in disk.written if isinstance(value, int)] == list(range(99))
    assert [value for value in disk.written if str(value).startswith("state")] == ["state 299"]
    assert len([value for value in disk.written if str(value).startswith("incident")]) == 300
    said.wait_for("901 lines dropped")
    assert len([line for line in said if "dropped" in line]) == 1
    assert writer.close(GENEROUS_S)


def test_close_returns_while_the_disk_hangs_and_says_what_was_lost(said: Said, stuck: StuckPipe) -> None:
    writer, disk = Writer(said), Disk()
    writer.start()
    writer.submit("journal", stuck)
    assert stuck.entered.wait(GENEROUS_S)
    for n in range(7):
        writer.submit("verdict", disk.job(n), Keep.ALWAYS)
    assert writer.close(0.2) is False
    assert any("7 of verdict" in line for line in said)
    assert not writer.submit("journal", disk.job(1))
    stuck.release()
    writer._thread.join(GENEROUS_S)
    assert not writer._thread.is_alive()


def test_a_newer_state_replaces_one_that_failed(writer: Writer, said: Said) -> None:
    disk = Disk()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    writer.submit("state", disk.job("old"), Keep.NEWEST)
    said.wait_for("state: cannot be written")
    writer.submit("state", disk.job("new"), Keep.NEWEST)
    disk.error = None
    assert writer.flush(GENEROUS_S)
    assert disk.written == ["new"]


def test_a_mistake_of_ours_in_a_job_is_said_and_does_not_end_the_thread(writer: Writer, said: Said) -> None:
    disk = Disk()
    writer.submit("journal", lambda: {}["missing"])
    writer.submit("journal", disk.job("after"))
    assert writer.flush(GENEROUS_S)
    assert disk.written == ["after"]
    assert len(said) == 1
    assert "KeyError" in said[0]


def test_a_say_that_fails_does_not_end_the_thread() -> None:
    def broken(_line: str) -> None:
        raise BrokenPipeError

    writer, disk = Writer(broken), Disk()
    disk.error = OSError(errno.EIO, "Input/output error")
    writer.start()
    writer.submit("journal", disk.job(1))
    assert disk.tried.wait(GENEROUS_S)
    disk.error = None
    assert writer.flush(GENEROUS_S)
    assert disk.written == [1]
    assert writer.close(GENEROUS_S)


def test_what_was_submitted_before_start_waits_and_close_without_start_returns(said: Said, tmp_path: Path) -> None:
    writer, disk = Writer(said), Disk()
    writer.submit("journal", disk.job(1))
    writer.start()
    assert writer.close(GENEROUS_S)
    assert disk.written == [1]
    never = Writer(said)
    assert never.close(1.0)
    never_written = Writer(said)
    never_written.submit("verdict", disk.job(2), Keep.ALWAYS)
    assert not never_written.close(1.0)
