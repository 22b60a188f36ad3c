"""The storage fence: real files, real processes, and an owner who falls asleep at the worst moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitors.fence import MOST_BYTES, NAMES_KEPT, NUMBERS_KEPT, CheckpointFence, FenceLost, newest_commit
from tests.monitors.conftest import ROOT


def anything(name: str) -> bool:
    return True


def claim(folder: Path, usable: object = anything) -> CheckpointFence:
    return CheckpointFence.claim(folder, usable)  # type: ignore[arg-type]


def run(code: str, *args: object) -> subprocess.Popen[str]:
    head = "import os, signal, sys\nfrom monitors.fence import CheckpointFence, FenceLost\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def test_commits_of_one_owner_are_found_by_the_next(tmp_path: Path) -> None:
    first = claim(tmp_path / "new" / "folder")
    assert (first.number, first.chosen, newest_commit(first.folder)) == (1, None, None)
    first.commit("step_1")
    first.commit("step_2")
    second = claim(first.folder)
    assert (second.number, second.chosen, second.held(), first.held()) == (2, "step_2", True, False)
    assert newest_commit(first.folder) == "step_2"


def test_a_superseded_owner_cannot_commit(tmp_path: Path) -> None:
    old = claim(tmp_path)
    new = claim(tmp_path)
    with pytest.raises(FenceLost, match=r"fence 1 is superseded by fence 2"):
        old.commit("late")
    new.commit("good")
    assert newest_commit(tmp_path) == "good"


@pytest.mark.parametrize(
    ("run", "said"),
    [("other-7", "fence 2 of run other-7: "), (None, "fence 2: "), ("bad\nname", "fence 2: ")],
    ids=["named", "without one", "unfit"],
)
def test_who_has_lost_the_folder_is_told_to_which_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str | None, said: str) -> None:
    monkeypatch.setenv("FT_RUN_ID", "ours")
    old = claim(tmp_path)
    monkeypatch.delenv("FT_RUN_ID")
    if run is not None:
        monkeypatch.setenv("FT_RUN_ID", run)
    new = claim(tmp_path)
    with pytest.raises(FenceLost, match=f"fence 1 is superseded by {said}a newer owner has "):
        old.commit("late")
    (tmp_path / "fence.2").write_text("{")
    with pytest.raises(FenceLost, match="superseded by fence 2: "):
        old.commit("late")
    assert new.held()


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_is_forgotten(tmp_path: Path) -> None:
    first = claim(tmp_path)
    for i in range(12):
        first.commit(f"step_{i}")
    asked: list[str] = []

    def usable(name: str) -> bool:
        asked.append(name)
        return name == "step_8"

    assert claim(tmp_path, usable).chosen == "step_8"
    assert asked == ["step_11", "step_10", "step_9", "step_8"]
    assert claim(tmp_path).chosen == "step_8"  # another timeline went on from there: what was newer never comes back


def test_when_nothing_is_usable_the_names_are_kept_for_the_next_try(tmp_path: Path) -> None:
    claim(tmp_path).commit("step_1")
    assert claim(tmp_path, lambda name: False).chosen is None
    assert claim(tmp_path).chosen == "step_1"


def test_candidates_of_a_folder_without_fences(tmp_path: Path) -> None:
    fence = CheckpointFence.claim(tmp_path, lambda name: name != "torn", candidates=["torn", "iter_20", "iter_10"])
    assert fence.chosen == "iter_20" and newest_commit(tmp_path) == "iter_20"
    fence.commit("iter_30")
    assert CheckpointFence.claim(tmp_path, anything, candidates=["iter_99"]).chosen == "iter_30"


SLEEPER = """
folder, name = sys.argv[1:]
fence = CheckpointFence.claim(folder, lambda n: True)
fence.commit("before")
import pathlib
rename = pathlib.Path.replace
def asleep(self, target):
    print(fence.number, flush=True)
    sys.stdin.readline()
    return rename(self, target)
pathlib.Path.replace = asleep          # the moment between the last check and the rename
try:
    fence.commit(name)
except FenceLost:
    print("lost", flush=True)
except OSError as e:
    print("failed", e, flush=True)
else:
    print("committed", flush=True)
"""


@pytest.mark.parametrize("tidied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("usable", [True, False])
def test_an_old_owner_that_slept_between_check_and_rename_is_never_loaded(tmp_path: Path, tidied: bool, frozen: bool, usable: bool) -> None:
    old = run(SLEEPER, tmp_path, "from the grave")
    assert old.stdout and old.stdin and old.stdout.readline() == "1\n"
    if frozen:
        old.send_signal(signal.SIGSTOP)
    kept = [(path, path.read_bytes()) for path in tmp_path.glob(".latest*.tmp")]
    assert len(kept) == 1
    new = claim(tmp_path, lambda name: usable)
    assert new.chosen == ("before" if usable else None)
    if not tidied:  # the file server kept the old owner's file although the new one removed it
        kept[0][0].write_bytes(kept[0][1])
    if frozen:
        old.send_signal(signal.SIGCONT)
    old.stdin.write("\n")
    old.stdin.flush()
    assert old.stdout.readline() == "lost\n"
    old.communicate(timeout=60)
    assert (tmp_path / "latest.1").read_text().count("from the grave") == (not tidied)
    assert newest_commit(tmp_path) == "before"
    assert claim(tmp_path).chosen == "before"
    assert not list(tmp_path.glob(".latest*"))


def test_many_claimers_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    code = "sys.stdin.readline()\nfor _ in range(20): print(CheckpointFence.claim(sys.argv[1], lambda n: True).number)\n"
    claimers = [run(code, tmp_path) for _ in range(6)]
    for claimer in claimers:
        assert claimer.stdin
        claimer.stdin.write("\n")
        claimer.stdin.flush()
    numbers = [int(n) for claimer in claimers for n in claimer.communicate(timeout=120)[0].split()]
    assert len(numbers) == 120 and len(set(numbers)) == 120
    last = claim(tmp_path)
    assert last.number > max(numbers) and last.held()


def test_two_owners_committing_against_each_other_leave_one_winner(tmp_path: Path) -> None:
    claim(tmp_path).commit("start")
    code = (
        "fence = CheckpointFence.claim(sys.argv[1], lambda n: True); won = []\ntry:\n"
        "    for i in range(50): fence.commit(f'{fence.number}:{i}'); won.append(i)\nexcept FenceLost: print(fence.number, 'lost', len(won))\n"
        "else: print(fence.number, 'held', 50)\n"
    )
    owners = [run(code, tmp_path) for _ in range(4)]
    results = sorted((int(n), state) for n, state, _ in (owner.communicate(timeout=120)[0].split() for owner in owners))
    assert results[-1][1] == "held"
    assert newest_commit(tmp_path) == f"{results[-1][0]}:49"


def test_a_commit_killed_at_any_moment_leaves_the_last_name_or_the_next(tmp_path: Path) -> None:
    code = (
        "fence = CheckpointFence.claim(sys.argv[1], lambda n: True)\n"
        "for i in range(10**9):\n    fence.commit(str(i)); os.write(1, f'{i}\\n'.encode())\n"
    )
    for _ in range(4):
        owner = run(code, tmp_path)
        assert owner.stdout
        for _ in range(30):
            owner.stdout.readline()
        owner.kill()
        said = owner.stdout.read().split()
        owner.communicate(timeout=60)
        last = int(said[-1]) if said else 29
        assert newest_commit(tmp_path) in (str(last), str(last + 1))
    assert claim(tmp_path).chosen == newest_commit(tmp_path) and not list(tmp_path.glob(".latest*"))


GARBAGE = [
    b"",
    b"{",
    b"null",
    b"[1]",
    b"\xff\xfe\0",
    b'{"format": "ft-latest/1"}',
    b'{"format":"ft-latest/1","fence":9,"names":[3]}',
    b"[" * 50_000,
    b"x" * (2 * MOST_BYTES),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_a_record_falls_back_to_the_last_good_one(tmp_path: Path, garbage: bytes) -> None:
    claim(tmp_path).commit("good")
    (tmp_path / "latest.9").write_bytes(garbage)
    assert newest_commit(tmp_path) == "good"
    fence = claim(tmp_path)
    assert (fence.number, fence.chosen) == (10, "good")
    fence.commit("next")
    assert newest_commit(tmp_path) == "next"


def test_foreign_things_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    for name in (
        "latest",
        "fence",
        "latest.",
        "fence.x",
        "fence.007",
        "latest.-1",
        "fence.1.bak",
        "latest_checkpointed_iteration.txt",
        "fence." + "9" * 30,
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / "fence.3").mkdir()
    (tmp_path / "latest.2").symlink_to("nowhere")
    os.mkfifo(tmp_path / "latest.1")
    (tmp_path / "latest.4").mkdir()
    os.symlink(b"nowhere", bytes(tmp_path) + b"/\xff\xfe")  # noqa: PTH211  a name that is no text
    fence = claim(tmp_path)
    fence.commit("a")
    assert fence.number == 5 and newest_commit(tmp_path) == "a" and newest_commit(tmp_path / "missing") is None


@given(st.lists(st.tuples(st.sampled_from(["fence", "latest"]), st.integers(1, 30), st.binary(max_size=80)), max_size=12))
@settings(max_examples=25, deadline=None)
def test_any_files_are_survived(tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, int, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("fence")
    for kind, number, content in files:
        (folder / f"{kind}.{number}").write_bytes(content)
    fence = claim(folder)
    assert fence.number > max((number for _, number, _ in files), default=0) and fence.chosen is None
    fence.commit("mine")
    assert claim(folder).chosen == "mine"


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    for i in range(3 * NUMBERS_KEPT):
        claim(tmp_path).commit(f"step_{i}")
    assert len(list(tmp_path.iterdir())) == 2 * NUMBERS_KEPT
    record = json.loads((tmp_path / f"latest.{3 * NUMBERS_KEPT}").read_text())
    assert len(record["names"]) == NAMES_KEPT and record["names"][:2] == [f"step_{3 * NUMBERS_KEPT - 1}", f"step_{3 * NUMBERS_KEPT - 2}"]


def test_a_folder_that_cannot_be_written_says_so_and_a_bad_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        claim(tmp_path / "file")
    fence = claim(tmp_path / "ok")
    for name in ("", "x" * 1025):
        with pytest.raises(ValueError, match="1 to 1024"):
            fence.commit(name)
    fence.commit("käse/../\n x")
    assert newest_commit(tmp_path / "ok") == "käse/../\n x"


def test_a_commit_that_fails_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = claim(tmp_path)
    fence.commit("a")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            fence.commit("b")
    fence.commit("c")
    assert json.loads((tmp_path / "latest.1").read_text())["names"] == ["c", "a"] and not list(tmp_path.glob(".latest*"))
