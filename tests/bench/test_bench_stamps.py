"""Reading what ranks stamped: only whole lines, only new processes, only when all are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from _common.stamps import Moment, Stamps, parse


def _write(stamps: Stamps, rank: int, *lines: str) -> None:
    with (stamps.folder / f"rank{rank}").open("a") as file:
        file.write("".join(lines))


@pytest.fixture
def stamps(tmp_path: Path) -> Stamps:
    return Stamps(tmp_path / "stamps", world=2)


def test_a_line_is_kind_process_time() -> None:
    assert parse("step 17 123\n") == Moment("step", 17, 123)
    with pytest.raises(ValueError):
        parse("step 17\n")


def test_a_torn_last_line_is_not_read(stamps: Stamps) -> None:
    _write(stamps, 0, "line 5 100\n", "step 5 2")
    assert stamps.read() == {0: [Moment("line", 5, 100)], 1: []}
    _write(stamps, 0, "00\n")
    assert stamps.read()[0][-1] == Moment("step", 5, 200)


def test_the_slowest_rank_decides_and_a_missing_one_means_not_yet(stamps: Stamps) -> None:
    _write(stamps, 0, "step 5 100\n", "step 5 900\n")
    assert stamps.first_on_all("step") is None
    _write(stamps, 1, "step 6 300\n")
    assert stamps.first_on_all("step") == 300


def test_after_a_fault_old_processes_and_old_times_do_not_count(stamps: Stamps) -> None:
    _write(stamps, 0, "step 5 100\n", "step 50 450\n")
    _write(stamps, 1, "step 6 100\n", "step 6 401\n")  # a survivor that finishes its step after the fault
    known = frozenset({5, 6})
    assert stamps.first_on_all("step", 400, known) is None
    _write(stamps, 1, "step 60 500\n")
    assert stamps.first_on_all("step", 400, known) == 500
    assert stamps.firsts("step", 400, known) == {0: 450, 1: 500}


def test_who_runs_now_and_how_far_they_are(stamps: Stamps) -> None:
    _write(stamps, 0, "step 5 1\n", "step 50 2\n", "step 50 3\n")
    _write(stamps, 1, "step 60 2\n")
    assert stamps.pids() == {0: 50, 1: 60}
    assert stamps.fewest("step", {0: 50, 1: 60}) == 1
