"""ft_state.json after everything that can happen to a file."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from state_samples import AT, full, megatron_rewrites, run_info

from ft_launcher.state import document as doc
from ft_launcher.state.file import FtStateFile, Saved
from ft_launcher.state.reading import MAX_BYTES

GARBAGE = {
    "empty": b"",
    "blank": b" \n\n",
    "torn": b'{"schema": "ft-state/1", "run": {"id": "jo',
    "torn at the end": b"TORN",
    "nul bytes": b"\0" * 4096,
    "a list": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "a text": b'"ft_state"',
    "another object": b'{"name": "package", "version": "1.0"}',
    "a later version": b'{"schema": "ft-state/9", "run": {"id": "x"}}',
    "a version that is no text": b'{"schema": ["../../etc/passwd"]}',
    "NaN": b'{"schema": "ft-state/1", "x": NaN}',
    "Infinity": b'{"schema": "ft-state/1", "x": -Infinity}',
    "overflow": b'{"schema": "ft-state/1", "x": 1e999}',
    "digits": b'{"schema": "ft-state/1", "x": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"schema": "\xff\xfe"}',
    "UTF-16": '{"schema": "ft-state/1"}'.encode("utf-16"),
    "deep list": b"[" * 200_000,
    "deep object": b'{"schema":"ft-state/1","x":' + b'{"a":' * 200_000,
    "foreign nonsense": b'{"current_timeouts": {"section": {"section": {"step": -1}}}}',
    "foreign list": b'{"current_timeouts": [1]}',
}


def one_line(notes: tuple[str, ...]) -> bool:
    return all("\n" not in note and len(note) < 600 for note in notes)


def state_in(folder: Path) -> FtStateFile:
    return FtStateFile(folder / "ft_state.json")


def test_first_run_loads_nothing_and_says_nothing(tmp_path: Path) -> None:
    assert state_in(tmp_path / "not there").load().document is None
    assert state_in(tmp_path / "not there").load().notes == ()


def test_what_was_saved_is_loaded_and_the_directory_is_made(tmp_path: Path) -> None:
    state = FtStateFile(tmp_path / "a" / "b" / "ft_state.json")
    assert state.save(full()).written
    loaded = FtStateFile(state.path).load()
    assert loaded.document == json.loads(json.dumps(full()))
    assert loaded.notes == ()
    assert sorted(os.listdir(state.path.parent)) == ["ft_state.json", "ft_state.json.bak"]


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_falls_back_to_the_copy_and_is_replaced_by_the_next_save(tmp_path: Path, what: str) -> None:
    state = state_in(tmp_path)
    state.save(full())
    expected = json.loads(state.path.read_bytes())
    good = state.path.read_bytes()
    state.path.write_bytes(good[:-40] if what == "torn at the end" else GARBAGE[what])
    loaded = FtStateFile(state.path).load()
    assert loaded.document == expected
    assert loaded.notes
    assert one_line(loaded.notes)
    saved = FtStateFile(state.path).save(full(at_cycle=3))
    assert saved.written
    assert one_line(saved.notes)
    assert len(state.load().document["cycles"]) == 4


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_alone_is_no_document_and_stops_nobody(tmp_path: Path, what: str) -> None:
    state = state_in(tmp_path)
    state.path.write_bytes(GARBAGE[what])
    loaded = state.load()
    assert loaded.document is None or loaded.document["cycles"] == []
    assert loaded.notes
    assert one_line(loaded.notes)
    assert doc.begin_run(loaded.document, run_info())["run"]["id"] == "job7"
    assert state.save(full()).written


@pytest.mark.parametrize("what", ["a later version", "another object", "a list", "torn"])
def test_what_is_not_ours_is_kept_aside_byte_for_byte_each_time(tmp_path: Path, what: str) -> None:
    state = state_in(tmp_path)
    for n in range(3):
        content = GARBAGE[what] + b" " * n
        state.path.write_bytes(content)
        state.save(full())
        kept = [path.read_bytes() for path in tmp_path.glob("*.saved")]
        assert content in kept
        assert len(kept) == n + 1
    if what == "a later version":
        assert (tmp_path / "ft_state.json.ft-state-9.saved").read_bytes() == GARBAGE[what]
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*.saved"))


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    for n in range(8):
        state.path.write_bytes(GARBAGE["torn"] + str(n).encode())
        state.save(full())
    assert len(list(tmp_path.glob("*.saved"))) == 3


def test_huge_pipe_and_directory_are_refused_without_waiting(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    state.save(full())
    state.path.unlink()
    os.mkfifo(state.path)
    assert state.load().document == json.loads(json.dumps(full()))
    state.path.unlink()
    with open(state.path, "wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert "more than" in state.load().notes[0]
    assert state.load().document is not None
    state.path.unlink()
    state.path.mkdir()
    assert state.load().document is not None
    with pytest.raises(OSError, match=r"directory|not empty"):
        state.save(full())
    assert state.path.is_dir()
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_an_unusable_path_raises_only_when_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for unreadable in (tmp_path / "loop", tmp_path / "nul\0"):
        assert FtStateFile(unreadable).load().document is None
    for path in (tmp_path / "file" / "ft_state.json", tmp_path / ("n" * 300), tmp_path / "loop" / "ft_state.json"):
        assert FtStateFile(path).load().document is None
        with pytest.raises(OSError, match=r"."):
            FtStateFile(path).save(full())


def test_an_older_generation_or_cycle_is_refused_also_after_a_foreign_rewrite(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    newest = full(generation=2, at_cycle=1)
    state.save(newest)
    for older in (full(generation=1, at_cycle=50), full(generation=2, at_cycle=0)):
        refused = FtStateFile(state.path).save(older)
        assert not refused.written
        assert "newer" in refused.notes[-1]
        assert refused.document["run"] == state.load().document["run"]
    megatron_rewrites(state.path)
    assert not FtStateFile(state.path).save(full(generation=1, at_cycle=50)).written
    assert FtStateFile(state.path).save(full("another", generation=0, at_cycle=0)).written


def test_megatron_in_its_own_shape_is_merged_and_believed_until_we_state_something_newer(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    state.save(full())
    theirs = megatron_rewrites(state.path)
    loaded = FtStateFile(state.path).load()
    assert loaded.document["current_timeouts"] == theirs
    assert len(loaded.document["cycles"]) == 3
    saved = state.save(full(at_cycle=3))
    assert saved.document["current_timeouts"] == theirs
    on_disk = json.loads(state.path.read_text())
    assert on_disk["current_timeouts"] == theirs
    assert len(on_disk["cycles"]) == 4
    state.save(full(at_cycle=4))
    assert json.loads(state.path.read_text())["current_timeouts"] == theirs
    changed = doc.with_timeouts(full(at_cycle=4), {"step": doc.SectionTimeout(2.5, "learned", learned=True)}, AT)
    state.save(changed)
    assert json.loads(state.path.read_text())["current_timeouts"]["section"]["section"] == {"step": 2.5}


def test_history_survives_a_foreign_rewrite_seen_by_a_new_process(tmp_path: Path) -> None:
    state_in(tmp_path).save(full(at_cycle=7))
    megatron_rewrites(tmp_path / "ft_state.json")
    again = state_in(tmp_path)
    begun = doc.begin_run(again.load().document, run_info(generation=1))
    again.save(begun)
    assert len(state_in(tmp_path).load().document["cycles"]) == 8


def test_a_writer_that_never_loaded_loses_nothing(tmp_path: Path) -> None:
    state_in(tmp_path).save({**full(at_cycle=7), "a later launcher's": 1})
    blind = doc.begin_run(None, run_info(generation=1))
    state_in(tmp_path).save(blind)
    kept = state_in(tmp_path).load().document
    assert len(kept["cycles"]) == 8
    assert kept["hardware"] == full()["hardware"]
    assert kept["a later launcher's"] == 1
    state_in(tmp_path).save(doc.begin_run(None, run_info("another")))
    assert state_in(tmp_path).load().document["earlier_runs"]["job7"]["cycles"] == 8


@pytest.mark.parametrize("what", [*GARBAGE, "gone", "rewritten"])
def test_before_each_cycle_the_file_is_one_that_a_plain_json_load_can_use(tmp_path: Path, what: str) -> None:
    state = state_in(tmp_path)
    document = full()
    state.save(document)
    if what == "gone":
        state.path.unlink()
    elif what == "rewritten":
        megatron_rewrites(state.path)
    else:
        state.path.write_bytes(state.path.read_bytes()[:-40] if what == "torn at the end" else GARBAGE[what])
    restored = state.restore_if_torn(document)
    assert restored.written
    assert json.loads(state.path.read_text())["schema"] == "ft-state/1"
    assert not state.restore_if_torn(document).written


def test_an_intact_file_is_not_touched_before_a_cycle(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    state.save(full())
    before = state.path.stat()
    assert state.restore_if_torn(full(at_cycle=5)) == Saved(full(at_cycle=5), written=False)
    assert state.path.stat() == before


def test_a_link_is_followed_and_an_operators_mode_survives(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "ft_state.json"
    state_in(tmp_path / "real").save(full())
    real.chmod(0o640)
    link = tmp_path / "ft_state.json"
    link.symlink_to(real)
    FtStateFile(link).save(full(at_cycle=4))
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert len(json.loads(real.read_text())["cycles"]) == 5


def test_leftovers_of_killed_writers_are_swept_and_fresh_ones_left(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".ft_state.json.0123.tmp", tmp_path / ".ft_state.json.4567.tmp"
    for leftover in (old, fresh):
        leftover.write_text("x")
    os.utime(old, (1, 1))
    state_in(tmp_path).save(full())
    assert not old.exists()
    assert fresh.exists()


def test_megatron_rewriting_all_the_time_never_makes_us_lose_history(tmp_path: Path) -> None:
    """A foreign thread truncates and rewrites in place while we save; whatever the interleaving, nothing raises and the cycles are all
    there at the end.
    """
    state = state_in(tmp_path)
    state.save(full(at_cycle=0))
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            megatron_rewrites(state.path)
            stop.wait(0.002)

    thread = threading.Thread(target=rewrite)
    thread.start()
    failures = 0
    try:
        for n in range(1, 25):
            try:
                state.save(full(at_cycle=n))
            except OSError as error:
                assert "changed" in str(error)
                failures += 1
    finally:
        stop.set()
        thread.join()
    assert failures < 24
    state.save(full(at_cycle=25))
    assert [one["n"] for one in json.loads(state.path.read_text())["cycles"]] == list(range(26))


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from state_samples import full
from ft_launcher.state.file import FtStateFile
state, n = FtStateFile(Path(sys.argv[1])), int(sys.argv[3])
print("ready", flush=True)
while True:
    n += 1
    state.save(full(at_cycle=n % 150, generation=n // 150))
"""


def check_load(path: Path, newest: tuple[int, int]) -> tuple[int, int]:
    """One load by a reader that knows nothing of the writer: whole, at first sight, and not older than the one before."""
    if not path.exists():
        return newest
    json.loads(path.read_bytes())
    loaded = FtStateFile(path).load()
    assert loaded.notes == ()
    at = (loaded.document["run"]["generation"], loaded.document["run"]["cycle"])
    assert at >= newest
    return at


def test_kill_9_at_any_moment_leaves_a_valid_document(tmp_path: Path) -> None:
    """Many writers killed at many moments, a reader loading all the time: every load is valid and never goes back."""
    path = tmp_path / "ft_state.json"
    newest = (-1, -1)
    for n in range(12):
        command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent), str(n * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            try:
                assert writer.stdout.readline() == b"ready\n"
                before, deadline = newest, time.monotonic() + 60
                while newest == before and time.monotonic() < deadline:
                    newest = check_load(path, newest)
                assert newest > before, "the writer never wrote"
                for _ in range(5 + 3 * n):
                    newest = check_load(path, newest)
            finally:
                writer.kill()
        newest = check_load(path, newest)
    assert FtStateFile(path.with_name(path.name + ".bak")).load().notes == ()


libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A tmpfs of 128 KiB, mounted for one test; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=128k") != 0:
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(os.fsencode(folder), 2) == 0


def test_a_full_disk_raises_keeps_the_old_content_and_works_again_later(tiny_disk: Path) -> None:
    state = state_in(tiny_disk)
    state.save(full())
    before = state.path.read_bytes()
    filler = tiny_disk / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(OSError, match="No space"):
        state.save(full(at_cycle=60))
    assert state.path.read_bytes() == before
    assert state.load().notes == ()
    assert [name for name in os.listdir(tiny_disk) if name.endswith(".tmp")] == []
    filler.unlink()
    assert state.save(full(at_cycle=60)).written


def test_room_for_one_copy_only_is_a_note(tiny_disk: Path) -> None:
    state = state_in(tiny_disk)
    state.save(full(at_cycle=2))
    size = len(state.path.read_bytes())
    (tiny_disk / "filler").write_bytes(b"x" * (128 * 1024 - 2 * 4096 * (size // 4096 + 1) - 4096 * 2))
    notes: tuple[str, ...] = ()
    for n in range(3, 60):
        try:
            notes = state.save(full(at_cycle=n)).notes
        except OSError:
            break
        if notes:
            break
    loaded = state.load()
    assert loaded.document is not None
    assert loaded.notes == ()


def test_a_read_only_directory_is_read_and_never_stops_a_load(tiny_disk: Path) -> None:
    state = state_in(tiny_disk)
    state.save(full())
    read_only, remount = 1, 32
    assert libc.mount(b"tmpfs", os.fsencode(tiny_disk), b"tmpfs", read_only | remount, None) == 0
    assert state.load().document == json.loads(json.dumps(full()))
    with pytest.raises(OSError, match="Read-only"):
        state.save(full(at_cycle=9))
    with pytest.raises(OSError, match="Read-only"):
        (tiny_disk / "probe").write_text("x")
    assert not state.restore_if_torn(full()).written
