"""Every benchmark runs, prints its table, ends with its JSON and leaves no file behind. What it measures is not judged: a test machine is no place for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
LIMIT_S = 280
CASES = {
    "recovery": (["--contestants", "ft-launch,floor"], "ft-launch: kill -> first new step on all ranks"),
    "megatron_gpt": (["--contestants", "ft-launch"], "ft-launch: kill -> first new step on all ranks"),
    "start": (["--contestants", "ft-launch"], "ft-launch: 4 ranks, no torch, command -> first line"),
    "sections": (["--contestants", "ft-launch"], "ft-launch: section open + close"),
    "overhead": (["--contestants", "ft-launch"], "ft-launch: agent, PSS"),
    "hang": (["--contestants", "ft-launch"], "ft-launch: overshoot beyond the hard timeout"),
    "anatomy": ([], "-> end committed"),
    "nodes": (["--contestants", "ft-launch"], "ft-launch: plain node, agent killed -> first step"),
    "store": ([], "40 nodes: report -> next cycle seen by all"),
}


def _run(name: str, args: list[str], tmp: Path) -> str:
    env = {**os.environ, "TMPDIR": str(tmp)}
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *args], capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_quick_mode_measures_and_ends_with_json(name: str, tmp_path: Path) -> None:
    args, figure = CASES[name]
    tmp = tmp_path / "t"
    tmp.mkdir()
    output = _run(name, ["--quick", "--json", str(tmp_path / "out.json"), *args], tmp)
    body = json.loads(output.splitlines()[-1])
    assert body["bench"] == name and body["runs"] == 1
    found = {f["name"]: f for f in body["figures"]}
    assert len(found[figure]["values"]) >= 1
    assert found[figure]["median"] > 0 or name == "hang"  # a hang may be found a moment before the clock that is looked at here
    assert {"cores", "load", "load_after", "date", "versions"} <= set(body["machine"])
    assert json.loads((tmp_path / "out.json").read_text()) == body
    assert figure[:40] in output
    assert list(tmp.iterdir()) == []


def test_run_collects_the_json_of_each(tmp_path: Path) -> None:
    output = _run("run", ["--quick", "--only", "section_cost"], tmp_path)
    body = json.loads(output.splitlines()[-1])
    assert set(body["benches"]) == {"section_cost"}
    assert body["benches"]["section_cost"]["bench"] == "section_cost"
    assert "== targets ==" in output


def test_run_tells_a_failed_benchmark_from_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import run as run_all

    broken = tmp_path / "broken.py"
    broken.write_text("print('half a table')\nraise SystemExit(3)\n")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    assert run_all.run_one(run_all.Bench("broken", "broken.py"), 1, quick=True) is None
    out = capfd.readouterr().out
    assert "half a table" in out and "FAILED broken: exit code 3" in out
