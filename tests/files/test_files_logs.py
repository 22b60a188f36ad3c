from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.errors import ConfigError
from ft_launcher.shell.logs import LogTail, last_lines
from ft_launcher.shell.tee import LINE_MAX_BYTES, Lines, parse_tee, prefix_for

GENEROUS_S = 60.0


class Console:
    """The reading end of the launcher's stdout, collected by a thread of its own."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        self.data = b""
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._collect, daemon=True)
        self.thread.start()

    def _collect(self) -> None:
        while data := os.read(self.reader, 65536):
            with self.changed:
                self.data += data
                self.changed.notify_all()

    def wait_for(self, part: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: part in self.data, GENEROUS_S), self.data[-500:]

    def close(self) -> None:
        os.close(self.fd)
        self.thread.join(GENEROUS_S)
        os.close(self.reader)


@pytest.fixture
def console():
    made = Console()
    yield made
    made.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def tail(console: Console, said: list[str]):
    made = LogTail(console.fd, 4, said.append, poll_s=0.01)
    made.start()
    yield made
    made.close(GENEROUS_S)
    assert not made._thread.is_alive()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_lines_are_copied_while_ranks_run_and_an_unfinished_one_when_they_are_gone(tail: LogTail, console: Console, tmp_path: Path) -> None:
    logs = {rank: tmp_path / "cycle_0000" / f"rank_{rank:05d}.log" for rank in (0, 3)}
    tail.follow(logs)
    logs[0].parent.mkdir()
    with open(logs[0], "ab", buffering=0) as zero, open(logs[3], "ab", buffering=0) as three:
        zero.write(b"hello\nhalf")
        console.wait_for(b"[r0] hello\n")
        three.write(b"tr\xc3\xa8s bien\n")
        console.wait_for("[r3] très bien\n".encode())
        assert b"half" not in console.data
        zero.write(b" a line\nlast words")
        console.wait_for(b"[r0] half a line\n")
    tail.end_cycle()
    console.wait_for(b"[r0] last words\n")


def test_a_new_cycle_means_new_files_and_nothing_of_the_old_is_lost_or_mixed(tail: LogTail, console: Console, tmp_path: Path) -> None:
    before = open_descriptors()
    for cycle in range(20):
        path = tmp_path / f"cycle_{cycle:04d}.log"
        path.write_bytes(f"cycle {cycle} one\ncycle {cycle} torn".encode())
        tail.follow({1: path})
    tail.end_cycle()
    assert tail.drain(GENEROUS_S)
    console.wait_for(b"[r1] cycle 19 torn\n")
    assert console.data.decode().split("\n")[:-1] == [f"[r1] cycle {n} {what}" for n in range(20) for what in ("one", "torn")]
    assert open_descriptors() == before


def test_much_output_is_drained_before_closing_and_every_line_is_whole(console: Console, said: list[str], tmp_path: Path) -> None:
    logs = {rank: tmp_path / str(rank) for rank in range(4)}
    for rank, path in logs.items():
        path.write_bytes(b"".join(b"%d:%06d %s\n" % (rank, n, b"x" * (n % 200)) for n in range(5000)))
    tail = LogTail(console.fd, 4, said.append)
    tail.start()
    tail.follow(logs)
    assert tail.close(GENEROUS_S)
    console.wait_for(b"3:004999")
    lines = console.data.split(b"\n")[:-1]
    for rank in range(4):
        expected = [b"[r%d] %d:%06d %s" % (rank, rank, n, b"x" * (n % 200)) for n in range(5000)]
        assert [line for line in lines if line.startswith(b"[r%d]" % rank)] == expected


def test_a_stuck_console_stalls_nobody_and_close_returns(said: list[str], tmp_path: Path) -> None:
    reader, full = os.pipe()
    log = tmp_path / "log"
    log.write_bytes((b"x" * 100 + b"\n") * 20_000)
    tail = LogTail(full, 4, said.append, poll_s=0.01)
    tail.start()
    tail.follow({0: log})
    assert not tail.drain(0.3)
    for cycle in range(50):
        tail.follow({0: tmp_path / f"c{cycle}"})
    assert not tail.close(0.3)
    tail._thread.join(GENEROUS_S)
    assert not tail._thread.is_alive()
    assert os.read(reader, 100) == b"[r0] " + b"x" * 95
    os.close(reader)
    os.close(full)


def test_a_console_that_is_closed_ends_the_copying_quietly(said: list[str], tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    tail = LogTail(pipe, 4, said.append, poll_s=0.01)
    tail.start()
    os.close(reader)
    (tmp_path / "log").write_bytes(b"hello\n")
    tail.follow({0: tmp_path / "log"})
    assert not tail.drain(GENEROUS_S)
    assert not tail.close(GENEROUS_S)
    assert said == []
    os.close(pipe)


def test_a_non_blocking_console_gets_everything(said: list[str], tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    (tmp_path / "log").write_bytes(b"0123456789\n" * 50_000)
    tail = LogTail(pipe, 1, said.append, poll_s=0.01)
    tail.start()
    tail.follow({0: tmp_path / "log"})
    size, expected = 0, 50_000 * len(b"[r0] 0123456789\n")
    while size < expected:
        size += len(os.read(reader, 65536))
    assert tail.close(GENEROUS_S)
    os.close(reader)
    os.close(pipe)


def test_a_truncated_log_is_followed_from_its_new_start(tail: LogTail, console: Console, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a long first line\n")
    tail.follow({0: log})
    console.wait_for(b"first line\n")
    os.truncate(log, 0)
    assert tail.drain(GENEROUS_S)
    with open(log, "ab") as file:
        file.write(b"again\n")
    console.wait_for(b"[r0] again\n")


def test_a_log_that_cannot_be_followed_is_said_once(tail: LogTail, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    tail.follow({0: tmp_path / "file" / "log", 1: tmp_path / "file" / "log2"})
    assert tail.drain(GENEROUS_S)
    assert tail.drain(GENEROUS_S)
    assert len(said) == 1
    assert "Not a directory" in said[0]


def test_a_finished_cycle_far_behind_is_cut_with_a_word_about_it(console: Console, said: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        for n in range(80_000):
            file.write(b"%07d" % n + b"." * 92 + b"\n")
    tail = LogTail(console.fd, 1, said.append, poll_s=0.01)
    tail.follow({0: log})
    tail.end_cycle()
    tail.start()
    assert tail.close(GENEROUS_S)
    console.wait_for(b"0079999")
    assert b"bytes not shown here, see " in console.data
    assert len(console.data) < 6_000_000


def test_a_stray_that_goes_on_writing_does_not_hold_up_the_next_cycle(console: Console, said: list[str], tmp_path: Path) -> None:
    """The old file grows by what was copied of it, each time something was copied: whoever waits for its end waits for ever."""
    stray, fresh = tmp_path / "stray", tmp_path / "fresh"
    stray.write_bytes(b"x" * 200 + b"\n")
    fresh.write_bytes(b"the next cycle\n")
    tail = LogTail(console.fd, 1, said.append, poll_s=0.01)
    real = tail._write

    def write_and_grow(lines: list[bytes]) -> None:
        with open(stray, "ab") as file:
            file.write(b"x" * 200_000 + b"\n")
        real(lines)

    tail._write = write_and_grow
    tail.follow({0: stray})
    tail.follow({0: fresh})
    tail.start()
    console.wait_for(b"[r0] the next cycle\n")
    tail.close(GENEROUS_S)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=12))
def test_any_bytes_in_any_pieces_give_printable_whole_prefixed_lines(pieces: list[bytes]) -> None:
    lines = Lines(b"[r0] ")
    shown = [line for piece in pieces for line in lines.feed(piece)] + lines.end()
    whole = Lines(b"[r0] ")
    assert shown == whole.feed(b"".join(pieces)) + whole.end()
    for line in shown:
        assert line.startswith(b"[r0] ")
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        text = line[:-1].decode("utf-8")
        assert not any(ord(char) < 32 and char not in "\t\x1b" for char in text)
    data = b"".join(pieces)
    assert len(shown) == data.count(b"\n") + bool(data.rsplit(b"\n", 1)[-1])


def test_text_passes_unchanged_and_a_progress_bar_shows_its_last_state() -> None:
    lines = Lines(b"[r0] ")
    assert lines.feed("a\tb \x1b[31mred\x1b[0m ü 漢\n".encode()) == ["[r0] a\tb \x1b[31mred\x1b[0m ü 漢\n".encode()]
    assert lines.feed(b"dos line\r\n") == [b"[r0] dos line\n"]
    assert lines.feed(b"\r 1%\r 50%\r 100%") == []
    assert lines.feed(b"\n\n") == [b"[r0]  100%\n", b"[r0] \n"]
    assert lines.feed(b"nul \0 bell \x07\n") == [b"[r0] nul ? bell ?\n"]


def test_a_very_long_line_is_split_between_characters_and_memory_stays_bounded() -> None:
    lines, text = Lines(b"> "), "漢" * 100_000
    shown = []
    for start in range(0, len(text.encode()), 1000):
        shown += lines.feed(text.encode()[start : start + 1000])
        assert len(lines._rest) <= LINE_MAX_BYTES
    shown += lines.end()
    assert b"".join(line[2:-1] for line in shown).decode() == text
    assert max(len(line) for line in shown) <= LINE_MAX_BYTES + 3
    bar = Lines(b"> ")
    for n in range(20_000):
        assert bar.feed(b"\rstep %d" % n) == []
    assert bar.end() == [b"> step 19999\n"]


def test_prefixes_are_padded_to_the_worlds_width() -> None:
    assert prefix_for(3, 4) == b"[r3] "
    assert prefix_for(3, 11) == b"[r03] "
    assert prefix_for(3, 10) == b"[r3] "
    assert prefix_for(1023, 1024) == b"[r1023] "


def test_tee_choices() -> None:
    assert parse_tee("all", 3) == {0, 1, 2}
    assert parse_tee("NONE", 3) == frozenset()
    assert parse_tee("0, 2", 3) == {0, 2}
    for bad in ("", "3", "-1", "0,,1", "x", "0-2", "1.0", "9" * 30, "²"):
        with pytest.raises(ConfigError, match="--tee") as caught:
            parse_tee(bad, 3)
        assert "\n" not in str(caught.value)


def test_last_lines_reads_only_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)) + b"killed in the mid")
    assert last_lines(log, 3) == ["line 99998", "line 99999", "killed in the mid"]
    assert len(last_lines(log, 10**6)) < 10_000
    assert last_lines(log, 0) == []
    with open(log, "wb") as file:
        file.truncate(1 << 40)
    assert len(last_lines(log, 5)[0]) == 65_536
    log.write_bytes(b"")
    assert last_lines(log, 5) == []
    log.write_bytes(b"\xff\xfe\r\n\n")
    assert last_lines(log, 5) == ["��", ""]
    os.mkfifo(tmp_path / "fifo")
    assert last_lines(tmp_path / "fifo", 5) == []
    assert last_lines(tmp_path, 5) == []
    assert last_lines(tmp_path / "nope", 5) == []
