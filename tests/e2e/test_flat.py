"""Fifty restarts in a row leave nothing behind in the agent."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.e2e.conftest import Launcher

RESTARTS = 50
WARM = 10


def footprint(pid: int) -> tuple[int, int, int, int]:
    """Descriptors, threads, children and RSS (KiB) of the agent."""
    process = psutil.Process(pid)
    return process.num_fds(), process.num_threads(), len(process.children()), process.memory_info().rss // 1024


def test_fifty_restarts_leave_the_agent_flat(launch: Launcher, marks: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    plan = [{"rank": cycle % 4, "cycle": cycle, "after": 12, "do": "signal", "value": 9} for cycle in range(RESTARTS)]
    job = launch(
        "--max-restarts", "100", "--no-progress-cycles", "100", "--tee", "none", resume=True, steps=RESTARTS * 30, step_s=0.01, plan=plan
    )
    job.wait_mark(marks, f"begin.*.{WARM}", 4)
    before = footprint(job.process.pid)
    job.wait_mark(marks, f"begin.*.{RESTARTS}", 4)
    after = footprint(job.process.pid)
    assert after[0] <= before[0] + 2, "descriptors"
    assert after[1] <= before[1] + 1, "threads"
    assert after[2] == before[2], "children"
    assert after[3] <= before[3] + 4096, "memory grew by more than 4 MiB over 40 restarts"
    zygote = psutil.Process(job.zygote_pid())
    job.wait_for(
        lambda: len(zygote.children()) <= 4 + 3, "no more than ranks and a few stores below the zygote: used ones are ended a moment later"
    )
    assert job.wait() == 0, job.said()
    assert job.verdict()["cycles"] == RESTARTS + 1
    assert set(os.listdir("/dev/shm")) <= shm
