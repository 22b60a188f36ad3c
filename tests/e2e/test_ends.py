"""How a job ends, what budgets allow before it does, and what configuration it ran with: real processes, one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher

HANGS = {
    "atexit": "import atexit, time\natexit.register(time.sleep, 1000)\n",
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n",
}


@pytest.mark.parametrize("where", HANGS)
def test_a_rank_that_hangs_in_its_own_exit_after_success_does_not_spoil_it(launch: Launcher, tmp_path: Path, where: str) -> None:
    script = tmp_path / "end.py"
    script.write_text(
        "import os\nfrom monitors.client import attach\nwith attach().section('step', iteration=1):\n    pass\nprint('trained', flush=True)\n"
        "if os.environ['RANK'] == '1':\n" + "".join(f"    {line}\n" for line in HANGS[where].splitlines())
    )
    job = launch("--exit-grace", "1", script=[str(script)])
    assert job.wait() == 0, job.said()
    assert job.verdict()["outcome"] == "finished"
    assert "rank 1, which had not left after 1 s without a step or a section, was ended" in job.verdict()["reason"]
    assert job.verdict()["cycles"] == 1


def test_a_healthy_stretch_gives_a_restart_back(launch: Launcher) -> None:
    """Three crashes with one restart allowed: each came after a stretch that was long enough."""
    plan = [{"rank": cycle, "cycle": cycle, "after": 8, "do": "exit", "value": 30 + cycle} for cycle in range(3)]
    job = launch("--max-restarts", "1", "--healthy-stretch", "0.2", steps=40, step_s=0.05, resume=True, plan=plan)
    assert job.wait() == 0, job.said()
    assert job.verdict()["cycles"] == 4
    assert [i["reason"].count("restart 1 of 1") for i in job.incidents()] == [1, 1, 1]


def test_ft_state_tells_from_where_to_where_the_first_cycle_went(launch: Launcher) -> None:
    job = launch(steps=30, step_s=0.05)
    assert job.wait() == 0, job.said()
    (cycle,) = json.loads((job.run_folder.parent / "ft_state.json").read_text())["cycles"]
    assert cycle["iteration_start"] in range(10)
    assert cycle["iteration_end"] == 29


def test_the_same_exception_at_the_same_place_is_said_as_such(launch: Launcher) -> None:
    job = launch("--max-restarts", "1", plan=[{"rank": 3, "at": 2, "do": "raise", "value": "bad number"}])
    assert job.wait() == 1, job.said()
    assert "same error at the same place" not in job.incidents()[0]["reason"]
    assert "same error at the same place as the time before" in job.verdict()["reason"]


def test_all_ranks_are_told_the_same_budget_and_reason(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    script = tmp_path / "told.py"
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "FT_CYCLE", "FT_RESTART_REASON")
    script.write_text(
        "import json, os, sys, time\nfrom pathlib import Path\nmarks, c, r = Path(os.environ['MARKS']), os.environ['FT_CYCLE'], os.environ['RANK']\n"
        f"(marks / f'told.{{c}}.{{r}}').write_text(json.dumps({{n: os.environ.get(n) for n in {names}}}))\n"
        "while len(list(marks.glob(f'told.{c}.*'))) < 4: time.sleep(0.01)\nif (c, r) in (('0', '1'), ('1', '3')): sys.exit(5)\n"
    )
    job = launch("--max-restarts", "2", script=[str(script)], env={"MARKS": str(marks)})
    assert job.wait() == 0, job.said()
    for cycle in range(3):
        told = {path.read_text() for path in marks.glob(f"told.{cycle}.*")}
        (said,) = (json.loads(text) for text in told)
        assert (said["FT_CYCLE"], said["TORCHELASTIC_RESTART_COUNT"], said["TORCHELASTIC_MAX_RESTARTS"]) == (str(cycle), str(cycle), "2")
        assert cycle == 0 or f"restart {cycle} of 2" in said["FT_RESTART_REASON"]


def test_the_effective_configuration_is_in_the_journal_and_in_the_dry_run(launch: Launcher, tmp_path: Path) -> None:
    """A flag outranks the file, the file the environment; each says where it is from."""
    config = tmp_path / "ft.yaml"
    config.write_text("max-restarts: 7\nterm-grace: 8\nexit-grace: 9\n")
    env = {"FT_MAX_RESTARTS": "1", "FT_TERM_GRACE": "1", "FT_SPARE_WAIT": "11"}
    options = ("--config", str(config), "--max-restarts", "5")
    job = launch(*options, env=env, steps=1)
    assert job.wait() == 0, job.said()
    (begun,) = job.events("launch")
    dry = dry_run(tmp_path, *options, env=env)
    for name, value, origin in (
        ("max-restarts", "5", "flag"),
        ("term-grace", "8", "ft.yaml"),
        ("exit-grace", "9", "ft.yaml"),
        ("spare-wait", "11", "env FT_SPARE_WAIT"),
    ):
        assert begun["options"][name].startswith(value)
        assert origin in begun["options"][name]
        (line,) = [line for line in dry.stdout.splitlines() if line.split()[:1] == [name]]
        assert begun["options"][name] in line
    assert dry.returncode == 0, dry.stderr


def dry_run(folder: Path, *options: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "s.py").write_text("")
    command = [sys.executable, "-m", "ft_launcher", "--dry-run", "--nproc-per-node", "2", "--preload", "json", *options, "s.py"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "ft.yaml"
    config.write_text("term-grace: 8\nmax-restart: 3\n")
    done = dry_run(tmp_path, "--config", str(config), env={})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "max-restart" in line
    assert "max-restarts" in line.replace("'max-restart'", "")
    assert "ft.yaml:2" in line or "line 2" in line
