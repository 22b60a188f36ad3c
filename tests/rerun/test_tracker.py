"""The tracker file: what Megatron writes is read, what is torn, strange or not there is no error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.core.rerun_report import RerunStatus
from rerun import tracker
from rerun.tracker import TrackerEntry, parse, tracker_path

HEAD = "ts=2026-11-30 10:00:00.123456 node=n1 device=0 jobID=N/A rank=3 iteration=41"
GOOD = HEAD + " status=RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE result=nan message='loss is NaN'\n"
ENTRY = TrackerEntry(3, 41, RerunStatus.FIRST_RERUN_REPRODUCIBLE, "n1", "0", "loss is NaN", "nan", "2026-11-30 10:00:00.123456")


@pytest.mark.parametrize(
    "status", ["RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE", "first_rerun_reproducible", "FIRST_RERUN_REPRODUCIBLE"]
)
def test_a_status_in_any_spelling(status: str) -> None:
    assert parse(GOOD.replace("RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE", status)) == [ENTRY]


@pytest.mark.parametrize("status", list(RerunStatus))
def test_what_is_written_is_read(tmp_path: Path, status: RerunStatus) -> None:
    path = str(tmp_path / "t")
    entry = TrackerEntry(0, 7, status, "a-1", "GPU-1b2c", "spiky 'loss' is 'up'", "tensor(3., device='cuda:0')", tracker.now(), "77")
    tracker.append(path, ENTRY)
    behind = tracker.size(path)
    tracker.append(path, entry)
    assert tracker.read(path) == [ENTRY, entry] and tracker.read(path, behind) == [entry]
    assert entry.finding.rank == 0 and entry.finding.status is status and "GPU-1b2c" in entry.finding.text


def test_a_result_over_several_lines() -> None:
    (entry,) = parse(GOOD.replace("result=nan", "result=tensor([1.,\n        2.])"))
    assert entry.result == "tensor([1., 2.])" and entry.line.count("\n") == 1
    assert parse(entry.line) == [entry]


def test_megatrons_device_on_a_cpu_has_a_blank_in_some_versions() -> None:
    (entry,) = parse(GOOD.replace("device=0", "device=device(type='cpu', index=0)"))
    assert entry.device == "device(type='cpu', index=0)"


@pytest.mark.parametrize("cut", [1, 20, len(HEAD), len(GOOD) - 3])
def test_a_torn_line_costs_itself_alone(cut: int) -> None:
    assert parse(GOOD + GOOD[:cut]) == [ENTRY]
    assert parse(GOOD[:cut] + GOOD) == [ENTRY], "the next writer's line stands behind the torn one"


def test_a_line_without_its_end_is_a_line() -> None:
    assert parse(GOOD.rstrip("\n")) == [ENTRY]


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "hello", "\x00" * 100, GOOD.replace("rank=3", "rank=x"), GOOD.replace("FIRST_RERUN_REPRODUCIBLE", "NO_SUCH_STATUS"), HEAD],
)
def test_garbage_is_no_entry(text: str) -> None:
    assert parse(text) == []
    assert parse(text + "\n" + GOOD) == [ENTRY]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_text_is_an_error(text: str) -> None:
    parse(text)
    parse(HEAD + " " + text)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "fifo", Path("/dev/zero"), "\0"):
        assert tracker.read(str(path)) == []
    assert tracker.size(str(tmp_path / "nowhere")) == 0


def test_a_file_that_was_replaced_is_read_whole_and_bytes_need_be_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\xff\xfe\n" + GOOD.encode())
    assert tracker.read(str(path), 10_000) == [ENTRY]


def test_only_the_end_of_a_huge_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "MAX_READ_BYTES", 3 * len(GOOD) + 5)
    path = tmp_path / "t"
    path.write_text(GOOD * 100)
    assert tracker.read(str(path)) == [ENTRY] * 3


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ([], None),
        (["--x", tracker.FLAG, "a"], "a"),
        ([f"{tracker.FLAG}=a=b"], "a=b"),
        ([tracker.FLAG, "a", f"{tracker.FLAG}=b"], "b"),
        ([f"{tracker.FLAG}=a", tracker.FLAG, "b"], "b"),
        ([tracker.FLAG], None),
        ([f"{tracker.FLAG}="], None),
        (["--", tracker.FLAG, "a"], None),
        ([tracker.FLAG, "a", "--", tracker.FLAG, "b"], "a"),
        (["--result-rejected-tracker", "a"], None),
    ],
)
def test_the_file_is_found_in_the_scripts_arguments(args: list[str], path: str | None) -> None:
    assert tracker_path(args) == path


def test_the_agent_may_import_it() -> None:
    code = "import sys, rerun, rerun.tracker; assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
