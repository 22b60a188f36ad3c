"""Nothing that a benchmark started outlives it; nothing else is touched. In a process of its own, for it kills everything below itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
LIMIT_S = 60
PREAMBLE = f"""
import sys, os, time
sys.path.insert(0, {str(BENCH)!r})
from pathlib import Path
from _common.processes import BenchError, Job, become_subreaper, below, kill_below, kill_rank
become_subreaper()
folder = Path(sys.argv[1])
"""
# A launcher whose worker leaves its session and parent and ignores every polite request.
STUBBORN = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    open('worker.part', 'w').write(str(os.getpid())); os.rename('worker.part', 'worker')\n"
    "time.sleep(1000)\n"
)


def _python(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code, *args], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_that_left_its_session_ends_with_the_job(tmp_path: Path) -> None:
    out = _python(
        f"""
import _common.processes as p
p._TERM_S = 0.2
job = Job([sys.executable, "-c", {STUBBORN!r}], dict(os.environ), folder)
with job:
    job.wait_for((folder / "worker").exists, "worker", 30)
    print((folder / "worker").read_text())
print(len(below()))
""",
        str(tmp_path / "job"),
    )
    worker, left = map(int, out.split())
    assert left == 0
    assert not psutil.pid_exists(worker)


def test_only_own_processes_are_signalled(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        out = _python(
            """
try:
    kill_rank(int(sys.argv[2]))
except BenchError as error:
    print(error)
""",
            str(tmp_path),
            str(stranger.pid),
        )
        assert f"process {stranger.pid} was not started" in out
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_contestant_that_ends_early_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    out = _python(
        """
try:
    with Job([sys.executable, "-c", "raise SystemExit('no such port')"], dict(os.environ), folder) as job:
        job.wait_for(lambda: False, "first step", 30)
except BenchError as error:
    print(error)
""",
        str(tmp_path / "job"),
    )
    assert "ended while waiting for first step" in out and "no such port" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_told_to_stop_takes_its_job_along(tmp_path: Path, number: int) -> None:
    stamps_at = tmp_path / "t"
    stamps_at.mkdir()
    command = [sys.executable, str(BENCH / "recovery.py"), "--contestants", "floor", "--runs", "50"]
    bench = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(stamps_at)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ranks = _wait_for_ranks(bench, stamps_at)
        bench.send_signal(number)
        assert bench.wait(LIMIT_S) != 0
    finally:
        if bench.poll() is None:
            bench.kill()
            bench.wait()
    assert [pid for pid in ranks if psutil.pid_exists(pid)] == []
    assert list(stamps_at.iterdir()) == []


def _wait_for_ranks(bench: subprocess.Popen[bytes], folder: Path) -> list[int]:
    end = time.monotonic() + LIMIT_S
    while len(list(folder.glob("*/*/stamps/rank*"))) < 4:
        assert bench.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    return [process.pid for process in psutil.Process(bench.pid).children(recursive=True)]
