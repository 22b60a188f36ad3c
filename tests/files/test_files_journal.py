from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.shell.journal import Journal, merge, read_run
from ft_launcher.shell.writer import Writer

GENEROUS_S = 60.0


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(said: list[str]):
    made = Writer(said.append)
    made.start()
    yield made
    made.close(5.0)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_named_keys_and_the_fields(writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "run.0" / "journal.node-a.jsonl"
    journal = Journal(writer, path, "node-a")
    journal.record("rank_exited", 3, 17, rank=2, signal=9)
    journal.record("decision", None, reason="x\ny", kind="not the line's", cycle=99)
    assert writer.flush(GENEROUS_S)
    first, second = lines_of(path)
    assert {key: first[key] for key in ("node", "rev", "cycle", "kind", "rank", "signal")} == {
        "node": "node-a", "rev": 17, "cycle": 3, "kind": "rank_exited", "rank": 2, "signal": 9,
    }  # fmt: skip
    assert first["t"].endswith("Z")
    assert second["mono_ns"] >= first["mono_ns"]
    assert (second["kind"], second["kind_"], second["cycle"], second["cycle_"], second["rev"]) == (
        "decision",
        "not the line's",
        None,
        99,
        None,
    )


def test_what_json_cannot_hold_still_makes_one_valid_line(writer: Writer, tmp_path: Path) -> None:
    loop: list = []
    loop.append(loop)
    journal = Journal(writer, tmp_path / "j", "n")
    for odd in (float("nan"), Path("/x"), {1, 2}, loop, {(1, 2): 3}, b"\xff", "\ud800", "x" * 3_000_000):
        journal.record("odd", 1, odd=odd)
    assert writer.flush(GENEROUS_S)
    assert len((tmp_path / "j").read_text().splitlines()) == 8
    assert len(merge([tmp_path / "j"]).entries) == 8


def test_what_is_recorded_is_what_it_was_then(writer: Writer, tmp_path: Path) -> None:
    journal, ranks = Journal(writer, tmp_path / "j", "n"), [1, 2]
    journal.record("started", 0, ranks=ranks)
    ranks.append(3)
    assert writer.flush(GENEROUS_S)
    assert lines_of(tmp_path / "j")[0]["ranks"] == [1, 2]


def test_a_torn_last_line_of_a_killed_predecessor_is_ended_and_skipped(writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "journal.a.jsonl"
    path.write_bytes(b'{"kind": "whole", "rev": 1}\n{"kind": "tor')
    assert [entry.data["kind"] for entry in merge([path]).entries] == ["whole"]
    Journal(writer, path, "a").record("next", 0, 2)
    assert writer.flush(GENEROUS_S)
    read = read_run(tmp_path)
    assert [entry.data["kind"] for entry in read.entries] == ["whole", "next"]
    assert read.skipped == 1


def test_a_folder_deleted_while_running_is_made_again(writer: Writer, tmp_path: Path) -> None:
    folder = tmp_path / "run.0"
    journal = Journal(writer, folder / "journal.a.jsonl", "a")
    journal.record("one", 0)
    assert writer.flush(GENEROUS_S)
    shutil.rmtree(folder)
    journal.record("two", 0)
    assert writer.flush(GENEROUS_S)
    assert [line["kind"] for line in lines_of(folder / "journal.a.jsonl")] == ["two"]


libc = ctypes.CDLL(None, use_errno=True)


def test_a_full_disk_tears_no_line_that_is_read_and_all_are_there_in_the_end(writer: Writer, said: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("cannot mount a tmpfs")
    try:
        journal = Journal(writer, disk / "journal.a.jsonl", "a")
        (disk / "filler").write_bytes(b"x" * 40_000)
        for n in range(60):
            journal.record("line", n, text="y" * 1000)
        assert not writer.flush(0.3)
        assert len([line for line in said if "No space" in line]) == 1
        before = read_run(disk)
        (disk / "filler").write_bytes(b"")
        assert not writer.flush(0.3)
        again = read_run(disk)
        assert len(again.entries) > len(before.entries)
        assert [entry.data["cycle"] for entry in again.entries] == list(range(len(again.entries)))
    finally:
        writer.close(0.2)
        del journal
        libc.umount2(os.fsencode(disk), 2)


PRODUCER = """
import sys
from pathlib import Path
from ft_launcher.shell.journal import Journal
from ft_launcher.shell.writer import Writer
writer = Writer(print)
writer.start()
journal, n = Journal(writer, Path(sys.argv[1]), "a"), int(sys.argv[2])
while True:
    journal.record("line", n, text="z" * 5000)
    n += 1
    writer.flush(9)
    print(n, flush=True)
"""


def test_kill_9_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    path, n = tmp_path / "journal.a.jsonl", 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", PRODUCER, str(path), str(n)], stdout=subprocess.PIPE) as producer:
            for _ in range(20):
                n = int(producer.stdout.readline())
            producer.kill()
            rest = producer.stdout.read().split()
            n = int(rest[-1]) if rest else n
        found = [entry.data["cycle"] for entry in read_run(tmp_path).entries]
        assert found[:n] == list(range(n))
        assert len(found) in (n, n + 1)
        n = len(found)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.none() | st.integers(0, 6), max_size=8), min_size=1, max_size=4))
def test_merging_keeps_each_files_order_and_never_goes_back_in_revision(files: list[list[int | None]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, revisions in enumerate(files):
            known = sorted(revision for revision in revisions if revision is not None)
            ordered = [known.pop(0) if revision is not None else None for revision in revisions]
            path = Path(folder) / f"journal.n{number}.jsonl"
            lines = [{"kind": "k", "rev": revision, "t": f"2025-01-01T00:00:{9 - n:02d}Z", "n": n} for n, revision in enumerate(ordered)]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            paths.append(path)
        merged = merge(paths).entries
    assert len(merged) == sum(len(revisions) for revisions in files)
    for path in paths:
        numbers = [entry.data["n"] for entry in merged if entry.path == path]
        assert numbers == sorted(numbers)
    known = [entry.data["rev"] for entry in merged if entry.data["rev"] is not None]
    assert known == sorted(known)


def test_unreadable_junk_and_missing_are_notes(tmp_path: Path) -> None:
    (tmp_path / "journal.a.jsonl").write_bytes(b"\0\xff\n[1]\n17\n" + b"[" * 100_000 + b"\n" + b'{"kind": "good"}\n{"no": "kind"}\n')
    (tmp_path / "journal.b.jsonl").mkdir()
    read = read_run(tmp_path)
    assert [entry.data for entry in read.entries] == [{"kind": "good"}]
    assert read.skipped == 5
    assert len(read.notes) == 1
    assert read_run(tmp_path / "nope").notes
