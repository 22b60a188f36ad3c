"""Signals to a launcher with real ranks: who gets them, how often, and that nothing waits once the job is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.launch import Launch, alive, gone

FOREVER = "100000"

COUNTING = """
import os, signal, subprocess, sys, time
from pathlib import Path
MARKS, RANK = Path(os.environ["MARKS"]), os.environ["RANK"]
ROLE = sys.argv[1] if len(sys.argv) > 1 else "rank"
def note(number, _):
    with open(MARKS / f"{ROLE}.{RANK}", "a") as file:
        file.write(f"{signal.Signals(number).name} ")
    if ROLE == "rank" and number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        (MARKS / f"go.{RANK}").touch()
        writer.wait()
        sys.exit(0)
for name in ("TERM", "INT", "HUP", "USR1", "USR2", "WINCH", "CONT"):
    signal.signal(getattr(signal, f"SIG{name}"), note)
if ROLE == "rank":
    writer = subprocess.Popen([sys.executable, __file__, "writer"])
(MARKS / f"up.{ROLE}.{RANK}").touch()
while ROLE == "rank" or not (MARKS / f"go.{RANK}").exists():
    time.sleep(0.01)
time.sleep(0.2)  # what it would take to write a checkpoint: long enough for a signal that was meant for the group
(MARKS / f"saved.{RANK}").touch()
"""


def counting(launch: Launcher, tmp_path: Path, marks: Path, *options: str) -> Launch:
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    job = launch("--nproc-per-node", "2", "--term-grace", FOREVER, *options, script=[str(script)], env={"MARKS": str(marks)})
    job.wait_mark(marks, "up.*.*", 4)
    return job


@pytest.mark.parametrize(
    ("stop", "method", "forwarded"),
    [("TERM", "fork", ("USR1", "USR2", "WINCH")), ("INT", "spawn", ("USR2",)), ("HUP", "fork", ("WINCH", "USR1"))],
)
def test_each_rank_gets_each_signal_once_and_its_checkpoint_writer_none(
    launch: Launcher, tmp_path: Path, marks: Path, stop: str, method: str, forwarded: tuple[str, ...]
) -> None:
    job = counting(launch, tmp_path, marks, "--forward-signals", ",".join(forwarded), "--start-method", method)
    for name in (*(n for n in ("USR1", "USR2") if n not in forwarded), *forwarded):
        job.process.send_signal(signal.Signals[f"SIG{name}"])
    for name in forwarded:
        job.wait_for(lambda name=name: all(name in heard(marks, "rank", rank) for rank in (0, 1)), name)
    number = signal.Signals[f"SIG{stop}"]
    job.process.send_signal(number)
    assert job.wait() == 128 + number, job.said()
    assert job.verdict()["outcome"] == "stopped", "they left with 0, which is not to have finished"
    for rank in (0, 1):
        assert sorted(heard(marks, "rank", rank).split()) == sorted(f"SIG{name}" for name in (*forwarded, stop))
        assert heard(marks, "writer", rank) == "", "it is in the rank's group, and not the rank"
        assert (marks / f"saved.{rank}").exists()


def heard(marks: Path, role: str, rank: int) -> str:
    path = marks / f"{role}.{rank}"
    return path.read_text() if path.exists() else ""


def test_a_notice_ahead_of_the_stop(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    """As Slurm (`--signal=USR1@60`) and Kubernetes (a preStop hook) do: first USR1, then TERM, perhaps at once."""
    job = counting(launch, tmp_path, marks)
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert sorted(heard(marks, "rank", 0).split()) == ["SIGTERM", "SIGUSR1"]
    assert (marks / "saved.0").exists()


def test_no_restart_while_ranks_leave(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    """One crashes in its handler, one is killed, one takes its time: that one is not cut short, and nothing starts again."""
    script = tmp_path / "leave.py"
    script.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\nmarks, rank = Path(os.environ['MARKS']), os.environ['RANK']\n"
        "def leave(*_):\n"
        "    if rank == '0': raise ValueError('cannot save')\n"
        "    if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    while not (marks / 'go').exists(): time.sleep(0.01)\n"
        "    (marks / f'saved.{rank}').touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n(marks / f'up.{rank}').touch()\nwhile True: time.sleep(0.1)\n"
    )
    job = launch("--nproc-per-node", "3", "--tp", "1", "--term-grace", FOREVER, script=[str(script)], env={"MARKS": str(marks)})
    job.wait_mark(marks, "up.*", 3)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: len(list(job.events("ended"))) == 2, "two have left")
    (marks / "go").touch()
    assert job.wait() == 143, job.said()
    assert (marks / "saved.2").exists()
    assert (job.verdict()["outcome"], job.verdict()["cycles"]) == ("stopped", 1)


def test_a_stop_in_the_backoff_ends_it(launch: Launcher) -> None:
    job = launch(
        "--max-restarts", "50", "--no-progress-cycles", "50", "--fixed-timeouts", plan=[{"rank": 1, "at": 0, "do": "exit", "value": 9}]
    )
    job.wait_for(lambda: "next cycle in 4 s" in job.said(), "a pause between two cycles")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert job.said().split("next cycle in 4 s")[1].count("starts") == 0


@pytest.mark.parametrize("ignores", [False, True])
def test_a_stop_does_not_wait_for_an_import(launch: Launcher, tmp_path: Path, marks: Path, ignores: bool) -> None:
    """Neither for one that sleeps nor for one that has switched off its signals."""
    off = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n" if ignores else ""
    (tmp_path / "endless.py").write_text(f"{off}import time\nopen({str(marks / 'importing')!r}, 'w').close()\ntime.sleep(1000)\n")
    job = launch("--preload", "endless", env={"PYTHONPATH": str(tmp_path)})
    job.wait_mark(marks, "importing")
    below = [process.pid for process in job.below()]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert below
    assert gone(below)


def test_a_stop_does_not_wait_for_ranks_that_have_not_begun(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    """Between two cycles the sources changed: the next ranks wait for a new import, and it never ends."""
    shared = tmp_path / "shared.py"
    shared.write_text("x = 1\n")
    job = launch("--preload", "shared", "--term-grace", FOREVER, env={"PYTHONPATH": str(tmp_path)}, steps=100_000)
    job.wait_mark(marks, "steps.*", 4)
    shared.write_text(f"import time\nopen({str(marks / 'importing')!r}, 'w').close()\ntime.sleep(1000)\n")
    os.kill(job.rank_pid(2), signal.SIGKILL)
    job.wait_mark(marks, "importing")
    job.wait_for(lambda: [e for e in job.events("started") if e["cycle"] == 1], "the next cycle")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert not list(marks.glob("begin.*.1")), "none of them was started to be ended"


def test_a_second_signal_ends_survivors_in_their_grace(launch: Launcher, marks: Path) -> None:
    job = launch("--survivor-grace", FOREVER, steps=100_000, plan=[{"at": 1, "do": "ignore_term"}])
    job.wait_mark(marks, "ignore_term.*", 4)
    os.kill(job.rank_pid(2), signal.SIGKILL)
    job.wait_for(lambda: "ending the other 3 ranks" in job.said(), "the end of the cycle")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: "no further cycle will start" in job.said(), "the first signal")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()
    assert job.verdict()["cycles"] == 1


@pytest.mark.parametrize(("number", "when"), [(signal.SIGTERM, "run_folder"), (signal.SIGHUP, "below"), (signal.SIGINT, "said")])
def test_signals_to_a_launcher_that_has_just_begun(launch: Launcher, number: int, when: str) -> None:
    """Whenever it comes: the code is the signal's, or that of a job that was done, and nothing is left."""
    job = launch(steps=3)
    begun = {"run_folder": lambda: list(job.folder.glob("ft_logs/*")), "below": job.below, "said": job.said}
    job.wait_for(begun[when], "a beginning")
    below = [process.pid for process in job.below()]
    job.process.send_signal(number)
    assert job.wait() in (128 + number, -number, 0), job.said()
    assert gone(below)
    assert "Traceback" not in job.said()


def test_a_stuck_terminal_stalls_nobody(tmp_path: Path) -> None:
    """Both streams are pipes that nobody reads: ranks print far more than those hold, and the job ends well."""
    (tmp_path / "loud.py").write_text(
        "import os\nfor _ in range(20000):\n    print('x' * 100)\nopen(f'done.{os.environ[\"RANK\"]}', 'w').close()\n"
    )
    command = [sys.executable, "-m", "ft_launcher", "--nproc-per-node", "2", "--preload", "json", "loud.py"]
    job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.communicate()
    assert len(list(tmp_path.glob("done.*"))) == 2
    assert not alive(job.pid)
    logs = sorted(tmp_path.glob("ft_logs/*/cycle_0000/rank_*.log"))
    assert [log.stat().st_size for log in logs] == [20000 * 101] * 2


def full_pipe() -> tuple[int, int]:
    """Its two ends. A write to the second one waits for ever."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    return reading, writing


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--tp", "0", "s.py"], 2), (["--store", "etcd://127.0.0.1:9", "--nnodes", "2", "--run-id", "r", "--store-timeout", "1", "s.py"], 69)],
)
def test_a_stuck_terminal_does_not_keep_a_failed_launch_alive(tmp_path: Path, arguments: list[str], code: int) -> None:
    """The line about it waits for a while; then the code is all that there is, and whoever waits for it gets it."""
    (tmp_path / "s.py").write_text("")
    reading, writing = full_pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ft_launcher", *arguments],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=writing,
            timeout=60,
            check=False,
        )
        assert done.returncode == code
    finally:
        os.close(reading)
        os.close(writing)


def test_a_signal_after_the_end_does_not_change_the_code(tmp_path: Path) -> None:
    """The job is over, and the launcher only waits a little for a console that takes nothing."""
    (tmp_path / "s.py").write_text("")
    reading, writing = full_pipe()
    command = [sys.executable, "-m", "ft_launcher", "--nproc-per-node", "1", "--preload", "json", "--run-id", "r", "s.py"]
    job = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writing)
    sent = 0
    try:
        deadline = time.monotonic() + 60
        while job.poll() is None and time.monotonic() < deadline:
            if (tmp_path / "ft_logs" / "r.0" / "verdict.json").exists():
                job.send_signal(signal.SIGTERM)
                sent += 1
            time.sleep(0.02)
        assert job.returncode == json.loads((tmp_path / "ft_logs" / "r.0" / "verdict.json").read_text())["exit_code"] == 0
        assert sent > 10, "it was waiting"
    finally:
        job.kill()
        job.wait()
        os.close(reading)
        os.close(writing)
