"""Medians, targets and the JSON line; the command line's mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import overhead
import pytest
import run as run_all
from _common import figures, outage
from _common.contestants import EVERYONE, FLOOR, FT, NVRX, TORCHRUN, Plan, launch
from _common.figures import Results
from _common.outage import Outage


def _results() -> Results:
    results = Results("example")
    ours = results.add("ours", "ms", [3.0, 1.0, 2.0])
    theirs = results.add("theirs", "ms", [40.0, 50.0, 41.0])
    results.check_ratio("ours / theirs", ours, theirs, 1 / 20)
    results.check("ours", ours, 1.9)
    return results


def test_the_median_is_compared_and_the_limit_itself_still_passes() -> None:
    results = _results()
    ratio, absolute = results.checks
    assert (ratio.value, ratio.passed) == (pytest.approx(2 / 41), True)
    assert (absolute.value, absolute.unit, absolute.passed) == (2.0, "ms", False)
    results.check("exactly", results.figures[0], 2.0)
    assert results.checks[-1].passed


def test_nothing_measured_is_no_figure_and_no_target() -> None:
    results = Results("empty")
    assert results.add("none", "s", []) is None
    results.check("none", None, 1.0)
    results.check_ratio("none", None, results.add("some", "s", [1.0]), 1.0)
    assert results.checks == []


def test_the_table_says_what_was_missed_and_by_how_much() -> None:
    table = _results().table()
    assert "MISS ours: 2.000 ms (target <= 1.900)" in table
    assert "ok   ours / theirs: 0.0488 x (target <= 0.05)" in table


def test_the_json_holds_every_value() -> None:
    body = json.loads(json.dumps(_results().to_json()))
    assert body["figures"][0] == {"name": "ours", "unit": "ms", "values": [3.0, 1.0, 2.0], "median": 2.0}
    assert [check["passed"] for check in body["checks"]] == [True, False]


@pytest.mark.parametrize("argv", [["--runs", "0"], ["--runs", "x"], ["--contestants", "torchrun,slurm"]])
def test_a_mistake_on_the_command_line_ends_at_once(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        figures.parse("Example.", EVERYONE, argv)
    assert ended.value.code == 2


def test_quick_means_one_run() -> None:
    assert figures.parse("Example.", EVERYONE, ["--quick", "--runs", "7"]).runs == 1


def test_contestants_take_turns_until_each_has_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns: list[tuple[str, str, int, int]] = []

    def fake(name: str, plan: Plan, folder: Path, kills: int, first: int) -> list[Outage]:
        turns.append((name, folder.name, kills, first))
        return [Outage(victim, 0.1, None, None, 0.2) for victim in range(first, first + kills)]

    monkeypatch.setattr(outage, "outages", fake)
    found = outage.alternate((FT, TORCHRUN), Plan(Path("x")), tmp_path, 5, {FT: 3, TORCHRUN: 2})
    assert [turn[0] for turn in turns] == [FT, TORCHRUN] * 3
    assert {name: len(seen) for name, seen in found.items()} == {FT: 9, TORCHRUN: 6}
    assert [o.victim for o in found[TORCHRUN]] == [0, 1, 2, 3, 4, 5]
    assert len({turn[1] for turn in turns}) == len(turns)  # a folder of its own for every job


@pytest.mark.parametrize("name", EVERYONE)
def test_every_contestant_gets_the_same_environment_and_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("FT_MAX_RESTARTS", "0")
    job, _ = launch(name, Plan(Path("/s/train.py"), ("--x", "1")), tmp_path / "job")
    command, env = job.command, job.env
    assert command[-3:] == ("/s/train.py", "--x", "1")
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"], env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]) == ("1", "lo", "1")
    assert "RANK" not in env and "FT_MAX_RESTARTS" not in env
    assert {FT: "ft-launch", FLOOR: "bare.py", TORCHRUN: "torchrun", NVRX: "ft_launcher"}[name] in " ".join(command[:2])


def test_memory_of_a_process_is_read_in_megabytes() -> None:
    lines = [
        "55d0-7ffe ---p 00000000 00:00 0 [rollup]",
        "Rss:                2000 kB",
        "Pss:                1000 kB",
        "Pss_Anon:            900 kB",
    ]
    assert overhead._rollup(lines) == (pytest.approx(1.024), pytest.approx(2.048))


def test_the_last_table_tells_misses_and_failures() -> None:
    counted = {"bench": "timeouts", "checks": [{"name": "false kills", "value": 0.0, "limit": 0.0, "passed": True}]}  # a number has no unit
    found: dict[str, dict[str, Any] | None] = {
        "example": _results().to_json(),
        "broken": None,
        "without targets": {"bench": "x"},
        "t": counted,
    }
    lines = run_all.targets(found)
    assert [line.split()[0] for line in lines] == ["ok", "MISS", "FAILED", "ok"]
    assert lines[2].endswith("broken") and "false kills: 0" in lines[3]


@pytest.mark.parametrize("argv", [["--only", "recovery,speed"], ["--runs", "0"]])
def test_run_refuses_what_it_does_not_know(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_all.parse(argv)
    assert ended.value.code == 2
