"""What people run: as many seeds as time allows, and the figures of decisions and worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.serial


def said(*command: str, **environ: str) -> tuple[int, list[str]]:
    """Exit code and lines."""
    env = {**os.environ, **environ}
    done = subprocess.run([sys.executable, *command], cwd=TREE, env=env, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout.splitlines()


def test_as_many_seeds_as_time_allows() -> None:
    code, lines = said("tools/sim_many.py", FT_SIM_S="0.2", SEED="1")
    assert code == 0, lines
    assert lines[-1].endswith("no violation")
    assert int(lines[-1].split()[0]) >= 1


def test_a_violation_ends_it_with_the_command_that_repeats_it() -> None:
    broken = (
        "import runpy; from ft_launcher.core.roster import Roster;"
        "Roster.unacknowledged = lambda self, state: [];"
        "runpy.run_path('tools/sim_many.py', run_name='__main__')"
    )
    code, lines = said("-c", broken, FT_SIM_S="20", SEED="1")
    assert code == 1, lines
    assert lines[-2].startswith("VIOLATION ")
    assert lines[-1].startswith("again: ft-launch simulate --ranks ")


def test_decisions_are_measured() -> None:
    code, lines = said("bench/sim.py", "--quick", "--contestants", "decisions")
    body = json.loads(lines[-1])
    assert code == 0
    assert len(body["checks"]) == 3
    assert all(value > 0 for figure in body["figures"] for value in figure["values"])
