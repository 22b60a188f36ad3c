"""What hostile users did to the launcher, and what it must do: each of these was once a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher

GRACE = """
import os, signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(1.0)
    Path(os.environ["MARKS"], f"saved.{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
Path(os.environ["MARKS"], f"up.{os.environ['RANK']}").touch()
while True:
    time.sleep(0.1)
"""


def test_a_signal_to_all_processes_at_once_leaves_ranks_their_grace(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    """Slurm's scancel and systemd's control-group kill signal everybody."""
    script = tmp_path / "grace.py"
    script.write_text(GRACE)
    job = launch(script=[str(script)], env={"MARKS": str(marks)})
    job.wait_mark(marks, "up.*", 4)
    for process in job.below():
        process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert len(list(marks.glob("saved.*"))) == 4
    assert "new zygote" not in job.said()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_zygote_ends_nothing(launch: Launcher, marks: Path, number: int) -> None:
    job = launch("--max-restarts", "0", steps=60)
    job.wait_mark(marks, "steps.*", 4)
    os.kill(job.zygote_pid(), number)
    assert job.wait() == 0, job.said()
    assert job.verdict()["cycles"] == 1


def test_a_last_save_that_outlasts_the_exit_grace_is_not_cut_off(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\nfrom monitors.client import attach\nm = attach()\nm.start_section('checkpointing')\n"
        "time.sleep(4 if os.environ['RANK'] == '0' else 0)\nm.end_section('checkpointing')\nprint('saved', flush=True)\n"
    )
    job = launch("--exit-grace", "1", script=[str(script)])
    assert job.wait() == 0, job.said()
    assert "saved" in (job.run_folder / "cycle_0000" / "rank_00000.log").read_text()
    assert job.verdict()["reason"] == "all ranks finished"


def test_closed_standard_descriptors(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print('hello')\n")
    command = f"exec {sys.executable} -m ft_launcher --nproc-per-node 1 --preload json s.py <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    logs = list(tmp_path.glob("ft_logs/*/cycle_0000/rank_00000.log"))
    assert [log.read_text() for log in logs] == ["hello\n"]
    assert list(tmp_path.glob("ft_logs/*/verdict.json"))


def test_a_module_that_hides_ours_is_explained(tmp_path: Path) -> None:
    hiding = tmp_path / "lib"
    hiding.mkdir()
    (hiding / "monitors.py").write_text("")
    (tmp_path / "s.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(hiding)}
    command = [sys.executable, "-m", "ft_launcher", "--nproc-per-node", "1", "s.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(hiding / "monitors.py") in done.stderr


def test_a_preload_that_kills_the_zygote_falls_back_to_spawn(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(5)\n")
    job = launch("--preload", "deadly", env={"PYTHONPATH": str(tmp_path)}, steps=3)
    assert job.wait() == 0, job.said()
    assert "while it imported 'deadly'" in job.said()
    assert "from now on ranks are started by spawn" in job.said()


def test_a_signal_that_nobody_forwards_does_not_end_the_launcher(launch: Launcher, marks: Path) -> None:
    job = launch("--forward-signals", "none", steps=60)
    job.wait_mark(marks, "steps.*", 4)
    job.process.send_signal(signal.SIGUSR2)
    assert job.wait() == 0, job.said()


def test_the_launcher_itself_out_of_descriptors_leaves_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print('hello')\n")
    command = f"ulimit -n 40; exec {sys.executable} -m ft_launcher --nproc-per-node 24 --preload json s.py"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode not in (0, 2)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("ft_logs/*/verdict.json"))
