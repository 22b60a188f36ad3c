"""A rank that hangs (SIGSTOP in a step, step timeout 5 s): how long after the hard timeout the first rank is ended, and until training goes on.

    python bench/hang.py [--runs 5] [--json FILE] [--contestants ft-launch]

The clock of the timeout starts with the step: when the slowest-to-notice rank's neighbours had stamped the end of the step before. Overshoot is the
time from that start plus 5 s until the first process of the old cycle has ended, seen through a pidfd. NVRx runs with its own client, at its default check
interval and (NVRx-1s) at one second, half as often as ft-launch. torchrun has no such detection.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from _common.contestants import FT, NVRX, SCRIPTS, Plan, launch
from _common.figures import Options, Results, parse, progress, run
from _common.outage import RECOVERY_LIMIT_S, START_LIMIT_S, settle
from _common.processes import BenchError, Job, kill_rank
from _common.stamps import Stamps

TIMEOUT_S = 5.0
LIMIT_S = 0.25
NOTICE_LIMIT_S = 60.0
NVRX_1S = "NVRx-1s"
"""NVRx, looking for hangs once a second instead of at its default interval."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Seconds after the hard timeout until the first old rank had ended, and until all ranks had made a new step."""

    overshoot_s: float
    recovered_s: float


def hangs(name: str, runs: int, folder: Path) -> Iterator[Hang]:
    """One job of contestant `name`, `runs` hangs."""
    sections = {"setup": 120.0, "step": TIMEOUT_S, "checkpointing": 120.0}
    client, look_s = ((), None) if name == FT else (("nvrx",), 1.0 if name == NVRX_1S else None)
    plan = Plan(SCRIPTS / "steps.py", client, tp=2, timeouts=sections, out_of_section_s=120.0, check_every_s=look_s)
    job, stamps = launch(FT if name == FT else NVRX, plan, folder)
    with job:
        job.wait_for(lambda: stamps.first_on_all("step") is not None, "first step of all ranks", START_LIMIT_S)
        for number in range(runs):
            settle(job, stamps)
            yield _one(job, stamps, number % stamps.world)


def _one(job: Job, stamps: Stamps, victim: int) -> Hang:
    pids = stamps.pids()
    known = frozenset(moment.pid for moments in stamps.read().values() for moment in moments)
    stopped_ns = kill_rank(pids[victim], signal.SIGSTOP)
    ended_ns = _first_end(pids)
    began_ns = min(max(m.at_ns for m in moments if m.pid == pids[rank]) for rank, moments in stamps.read().items())
    if began_ns > ended_ns:
        raise BenchError("a rank made steps after the hang")
    due_ns = began_ns + int(TIMEOUT_S * 1e9)
    job.wait_for(lambda: stamps.first_on_all("step", stopped_ns, known) is not None, "new step of all ranks", RECOVERY_LIMIT_S)
    again_ns = stamps.first_on_all("step", stopped_ns, known)
    assert again_ns is not None
    return Hang((ended_ns - due_ns) / 1e9, (again_ns - due_ns) / 1e9)


def _first_end(pids: dict[int, int]) -> int:
    """CLOCK_MONOTONIC nanoseconds at which the first of these processes had ended."""
    poll = select.poll()
    with ExitStack() as stack:
        for pid in pids.values():
            fd = os.pidfd_open(pid)
            stack.callback(os.close, fd)
            poll.register(fd, select.POLLIN)
        if not poll.poll((TIMEOUT_S + NOTICE_LIMIT_S) * 1000):
            raise BenchError(f"the hang was not noticed within {NOTICE_LIMIT_S:.0f} s after the timeout")
        return time.monotonic_ns()


def measure(options: Options, folder: Path) -> Results:
    """One job of each."""
    results = Results("hang")
    for name in options.contestants:
        progress(f"hang: {name}")
        seen = list(hangs(name, options.runs if name == FT else -(-options.runs // 2), folder / name))
        overshoot = results.add(f"{name}: overshoot beyond the hard timeout", "s", [hang.overshoot_s for hang in seen])
        results.add(f"{name}: hard timeout -> first new step on all ranks", "s", [hang.recovered_s for hang in seen])
        if name == FT:
            results.check("overshoot beyond the hard timeout, ft-launch", overshoot, LIMIT_S)
    return results


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, (FT, NVRX, NVRX_1S)), measure))
