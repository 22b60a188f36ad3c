"""Health checks, devices and the progress file in real launches."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Launcher, launch, marks
from tests.e2e.launch import gone
from tests.health.conftest import GIB, Driver, Gpu

__all__ = ["launch", "marks"]
pytestmark = pytest.mark.serial
CRASH = [{"rank": 1, "cycle": 0, "at": 2, "do": "exit", "value": 3}]


def test_a_check_is_asked_before_the_first_cycle_and_before_the_next(launch: Launcher, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    check = f"echo $FT_NODE_ID $FT_CYCLE $FT_HEALTH_REASON $FT_DEVICES >> {asked}"
    job = launch("--health-check", check, "--node-id", "a", env={"FT_DEVICES": "d0,d1,d2,d3"}, steps=5, plan=CRASH)
    assert job.wait() == 0, job.said()
    assert asked.read_text() == "a 0 start d0,d1,d2,d3\na 1 restart d0,d1,d2,d3\n"
    checks = list(job.events("health-check"))
    assert [check["reason"] for check in checks] == [None, None]
    assert "no effect" not in job.said()


@pytest.mark.parametrize(("passes", "cycles"), [("none", 0), ("start", 1)])
def test_one_node_that_fails_ends_the_job_with_75(launch: Launcher, passes: str, cycles: int) -> None:
    check = f"echo the third card is gone; [ $FT_HEALTH_REASON = {passes} ]"
    job = launch("--health-check", check, steps=5, plan=CRASH)
    assert job.wait() == 75, job.said()
    verdict = job.verdict()
    assert verdict["outcome"] == "not_enough_nodes"
    assert "health check: " in verdict["reason"] and verdict["reason"].endswith("exit 1: the third card is gone")
    assert len(list(job.run_folder.glob("cycle_*"))) == cycles


def test_a_check_that_hangs_does_not_keep_a_job_that_is_told_to_stop(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    pid = tmp_path / "pid"
    check = f"[ $FT_HEALTH_REASON = start ] || {{ trap '' TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 1000; }}"
    job = launch("--health-check", check, steps=5, plan=CRASH)
    job.wait_for(pid.exists, "the check")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143, job.said()
    assert gone([int(pid.read_text())])


def is_zygote(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith("ft-launch: zygote")
    except psutil.Error:
        return False


def test_a_zygote_that_dies_takes_no_check_along(launch: Launcher, tmp_path: Path) -> None:
    """Everything below the agent is cleared then, but for what is none of the zygote's."""
    go, running = tmp_path / "go", tmp_path / "running"
    check = f"touch {running}; until [ -e {go} ]; do sleep 0.02; done"
    job = launch("--health-check", check, steps=3)
    job.wait_for(running.exists, "the check")
    (zygote,) = job.wait_for(lambda: [p for p in psutil.Process(job.process.pid).children() if is_zygote(p)], "the zygote")
    zygote.send_signal(signal.SIGKILL)
    job.wait_for(lambda: "starting a new zygote" in job.said() or "spawn" in job.said(), "another zygote")
    go.touch()
    assert job.wait() == 0, job.said()
    assert [check["reason"] for check in job.events("health-check")] == [None]


def test_a_crash_is_followed_by_a_wait_for_the_devices(launch: Launcher, driver: Driver, tmp_path: Path) -> None:
    """With a driver that tells more memory in use than before: the next cycle starts when it has fallen."""
    job = launch("--node-id", "a", "--nproc-per-node", "2", env=driver.env, steps=5, plan=[{**CRASH[0], "at": 4}], step_s=0.1)
    job.wait_for(lambda: any(job.events("forked")), "the first cycle")
    driver.set(Gpu("GPU-a", used=40 * GIB), Gpu("GPU-b"))
    job.wait_for(lambda: list(job.events("ended")), "the crash")
    job.wait_for(lambda: "cycle 0: rank 1" in job.said(), "the end of the cycle")
    assert "cycle 1 starts" not in job.said()
    driver.set(Gpu("GPU-a"), Gpu("GPU-b"))
    assert job.wait() == 0, job.said()
    assert "cycle 1 starts" in job.said()


def test_a_lost_device_takes_the_node_out(launch: Launcher, driver: Driver) -> None:
    job = launch("--nproc-per-node", "2", env=driver.env, steps=5, plan=[{**CRASH[0], "at": 4}], step_s=0.1)
    job.wait_for(lambda: any(job.events("forked")), "the first cycle")
    driver.set(Gpu("GPU-a", error=15), Gpu("GPU-b"))
    assert job.wait() == 75, job.said()
    assert "GPU GPU-a: nvmlDeviceGetMemoryInfo: GPU is lost (error 15)" in job.verdict()["reason"]


STUCK = """
import os, sys
path = os.environ["PROGRESS"]
def tell(iteration):
    with open(path + ".new", "w") as file:
        file.write(str(iteration))
    os.replace(path + ".new", path)
cycle = int(os.environ["FT_CYCLE"])
if os.environ["RANK"] == "0":
    tell(min(cycle, 2) * 10)
sys.exit(3)
"""


def test_no_progress_by_the_file_is_93(launch: Launcher, tmp_path: Path) -> None:
    """Iterations 0, 10, 20, 20, 20: written a moment before the crash, by a script that has no client."""
    script, path = tmp_path / "stuck.py", tmp_path / "iteration"
    script.write_text(STUCK)
    options = ("--progress-file", str(path), "--no-progress-cycles", "2", "--max-restarts", "9", "--nproc-per-node", "1")
    job = launch(*options, script=[str(script)], env={"PROGRESS": str(path)})
    assert job.wait() == 93, job.said()
    assert job.verdict()["cycles"] == 5
    assert "without going beyond iteration 20" in job.verdict()["reason"]
    assert job.incidents()[-1]["ranks"]["0"]["iteration"] == 20
