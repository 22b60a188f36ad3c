"""What hostile users did to the launcher, and what it must do: each of these was once a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.launch import gone

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
        "time.sleep(5 if os.environ['RANK'] == '0' else 0)\nm.end_section('checkpointing')\nprint('saved', flush=True)\n"
    )
    job = launch("--exit-grace", "2", script=[str(script)])
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


@pytest.mark.parametrize("name", ["torch.py", "torch/__init__.py"])
def test_a_stand_in_for_torch_beside_the_script_is_named_and_the_job_runs(launch: Launcher, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    script = tmp_path / "s.py"
    script.write_text("import torch\nprint('x is', torch.x)\n")
    job = launch("--preload", "torch", script=[str(script)])
    assert job.wait() == 0, job.said()
    assert f"'torch' is {tmp_path / name}, which is not PyTorch; if that is not meant, rename it" in job.said()
    assert job.verdict()["cycles"] == 1
    assert job.out.read_text().count("x is 1") == 4


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


# -- surroundings that only a namespace can give ----------------------------------------------------------------------------------------


def can_unshare() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


namespaces = pytest.mark.skipif(not can_unshare(), reason="needs root and mount namespaces")


def in_namespace(flags: list[str], before: str, folder: Path, *options: str, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`ft-launch` on 2 ranks of `script` in new namespaces, after the shell commands `before`; its standard error is the result's."""
    (folder / "s.py").write_text(script)
    launch = f"exec {sys.executable} -m ft_launcher --nproc-per-node 2 --preload json --max-restarts 0 {' '.join(options)} s.py"
    command = ["unshare", *flags, "bash", "-ec", f"{before}\n{launch}"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


FULL = """
import os, sys
for _ in range(300):
    print("x" * 1000)
print("to the other stream " * 100, file=sys.stderr)
if os.environ["RANK"] == "0":
    os.unlink("disk/fill")
    print("after")
print("done", file=open(f"done.{os.environ['RANK']}", "w"))
"""


@namespaces
def test_a_full_log_disk_costs_lines_and_no_training(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    fill = "mount -t tmpfs -o size=300k none disk; head -c 200000 /dev/zero > disk/fill; mkdir keep"
    # the mount ends with the namespace, so what is to be looked at is copied out by a last process of it
    copy = "trap 'cp -r disk/*.0/cycle_0000 keep/ 2>/dev/null' EXIT"
    (tmp_path / "s.py").write_text(FULL)
    launch = f"{sys.executable} -m ft_launcher --nproc-per-node 2 --preload json --max-restarts 0 --tee none --log-dir disk s.py"
    done = subprocess.run(
        ["unshare", "-m", "bash", "-ec", f"{fill}\n{copy}\n{launch}"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "when it is full, training goes on and what ranks print is lost" in done.stderr
    assert len(list(tmp_path.glob("done.*"))) == 2
    log = (tmp_path / "keep" / "cycle_0000" / "rank_00000.log").read_text()
    assert "bytes of output are missing here (No space left on device)\nafter" in log


FIRST_PROCESS = """
import os, time
def orphan(seconds):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(seconds)
        os._exit(0)
    os.wait()
for _ in range(20):
    orphan(0)
orphan(1000)
def dead():
    states = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                states.append(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0])
            except OSError:
                pass
    return states.count("Z")
deadline = time.monotonic() + 30
while dead() and time.monotonic() < deadline:
    time.sleep(0.02)
print("dead and not collected:", dead(), flush=True)
if os.environ.get("STAY"):
    open(f"up.{os.environ['RANK']}", "w").close()
    time.sleep(1000)
"""


@namespaces
def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """Nobody else collects the dead there, and when it ends everything must be gone already."""
    done = in_namespace(["-pf", "--mount-proc"], "true", tmp_path, script=FIRST_PROCESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dead and not collected: 0") == 2
    assert "cannot be killed" not in done.stderr


@namespaces
def test_a_signal_to_the_first_process_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(FIRST_PROCESS)
    launch = [sys.executable, "-m", "ft_launcher", "--nproc-per-node", "2", "--preload", "json", "--term-grace", "5", "s.py"]
    job = subprocess.Popen(["unshare", "-pf", "--kill-child", "--mount-proc", *launch], cwd=tmp_path, env={**os.environ, "STAY": "1"})
    try:
        wait_for(lambda: len(list(tmp_path.glob("up.*"))) == 2)
        (first,) = psutil.Process(job.pid).children()
        below = first.children(recursive=True)
        first.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
        assert gone([process.pid for process in below])
    finally:
        job.kill()
        job.wait()


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@namespaces
@pytest.mark.parametrize(
    "before",
    [
        "mount -t tmpfs -o ro none /dev/shm",
        "mount -t tmpfs -o size=4k none /dev/shm",
        "mount -t tmpfs -o ro none /dev/shm; mount -t tmpfs -o ro none /var/tmp; export TMPDIR=/var/tmp",
    ],
)
def test_shared_memory_and_temporary_folders_that_take_nothing(tmp_path: Path, before: str) -> None:
    done = in_namespace(
        ["-m"],
        before,
        tmp_path,
        script="from monitors.client import attach\nwith attach().section('step', iteration=1):\n    print('hello')\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello") == 2
    assert "warning" not in done.stderr


@pytest.mark.parametrize("name", ["x" * 200, "not/there"])
def test_odd_temporary_folders(tmp_path: Path, launch: Launcher, name: str) -> None:
    folder = tmp_path / name
    if "/" not in name:
        folder.mkdir()
    job = launch(env={"TMPDIR": str(folder)}, steps=3, plan=[{"rank": 1, "cycle": 0, "at": 1, "do": "exit", "value": 3}])
    assert job.wait() == 0, job.said()
    assert not folder.exists() or list(folder.iterdir()) == []


# -- what people read ----------------------------------------------------------------------------------------------------------------------


def test_a_recovery_costs_few_lines(launch: Launcher) -> None:
    """From the fault to the first new step, everything in between included."""
    job = launch("--tee", "none", steps=8, plan=[{"rank": 2, "cycle": 0, "at": 4, "do": "signal", "value": 9}])
    assert job.wait() == 0, job.said()
    lines = [line for line in job.said().splitlines() if line.startswith("ft-launch: ")]
    begin = next(i for i, line in enumerate(lines) if "SIGKILL" in line)
    end = next(i for i, line in enumerate(lines) if "training again" in line)
    assert end - begin + 1 < 15, lines


def test_many_recoveries_cost_few_lines_each(launch: Launcher) -> None:
    plan = [{"rank": c % 4, "cycle": c, "after": 2, "do": "raise", "value": f"fault {c}"} for c in range(4)]
    job = launch("--tee", "none", "--max-restarts", "6", steps=20, plan=plan, resume=True)
    assert job.wait() == 0, job.said()
    assert len(job.said().splitlines()) < 8 + 4 * 15, job.said()


def test_the_last_words_of_a_killed_rank_are_in_its_log(launch: Launcher, tmp_path: Path) -> None:
    """Unfinished and unflushed, on both streams; and the next cycle has a file of its own."""
    script = tmp_path / "words.py"
    script.write_text(
        "import os, signal, sys\nif os.environ['FT_CYCLE'] == '0':\n    print('first', end='')\n    sys.stderr.write(' last')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nprint('again')\n"
    )
    job = launch("--nproc-per-node", "1", script=[str(script)])
    assert job.wait() == 0, job.said()
    assert (job.run_folder / "cycle_0000" / "rank_00000.log").read_text() == "first last"
    assert (job.run_folder / "cycle_0001" / "rank_00000.log").read_text() == "again\n"
    assert "[r0] first last\n" in job.out.read_text()


def test_tee_chooses_the_ranks_that_are_shown(launch: Launcher) -> None:
    for tee, shown in (("none", []), ("0,3", [0, 3])):
        job = launch("--tee", tee, steps=1)
        assert job.wait() == 0, job.said()
        out = job.out.read_text()
        assert [rank for rank in range(4) if f"[r{rank}] rank {rank} is done" in out] == shown
        assert all("is done" in path.read_text() for path in job.run_folder.glob("cycle_0000/rank_*.log"))
