"""The script that `ft-launch selftest` trains: counts steps, and commits each fault of its plan once.

argv[1] is a folder: `plan.json` maps a cycle to {"rank", "do"}; `progress.<rank>` is how far a rank got; `fault.<cycle>` holds the CLOCK_MONOTONIC nanosecond at which the
fault was committed. It stands for any training script: all it knows of the launcher is its client and its environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ft_launcher.core.rerun_report import RerunStatus
from monitors.client import attach

STEP_S = 0.02
STEPS_PER_CYCLE = 15
WRONG = {
    "wrong number once": (RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE, 17),
    "wrong number again": (RerunStatus.FIRST_RERUN_REPRODUCIBLE, 16),
}
"""As Megatron's rerun machine leaves: all ranks with the same code, the one whose result was rejected having said so."""
FAULT_AT = 12
"""So many steps after every rank has been seen to make one: the launcher has had the time to see it, too."""


def commit_fault(folder: Path, cycle: int, do: str) -> None:
    """Note the time, then do it."""
    if do == "strays":
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / f"fault.{cycle}").write_text(str(time.monotonic_ns()))
    if do in ("SIGKILL", "SIGSEGV", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, do))
    elif do == "exception":
        raise ValueError("selftest")
    elif do in ("exit code 3", "strays"):
        sys.exit(3)
    elif do in WRONG:
        status, code = WRONG[do]
        attach().report_rerun(int(status), FAULT_AT, "selftest: a result was rejected")
        sys.exit(code)
    elif do == "hang":
        time.sleep(600)
    elif do == "zygote killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif do == "zygote stopped":
        os.kill(os.getppid(), signal.SIGSTOP)


def all_are_beyond(folder: Path, step: int) -> bool:
    """Every rank has made a step since."""
    made = [int(path.read_text() or 0) for path in folder.glob("progress.*")]
    return len(made) == int(os.environ["WORLD_SIZE"]) and min(made) > step


def main() -> None:
    """Train: one file write a step, a fault where the plan says so, one segment of steps for each cycle of the plan."""
    folder, rank, cycle = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
    plan = json.loads((folder / "plan.json").read_text())
    mine = plan.get(str(cycle))
    progress = folder / f"progress.{rank}"
    start = max((int(p.read_text() or 0) for p in folder.glob("progress.*")), default=0)
    mon, guilty, due = attach(), mine is not None and mine["rank"] == rank, 0
    for i in range(start, start + STEPS_PER_CYCLE if mine is None else start + 10_000):
        with mon.section("step", iteration=i):
            if guilty and not due and all_are_beyond(folder, start):
                due = i + FAULT_AT
            if guilty and mine is not None and i == due > 0:
                commit_fault(folder, cycle, mine["do"])
            if mine is not None and mine["do"] in WRONG and (folder / f"fault.{cycle}").exists():
                sys.exit(WRONG[mine["do"]][1])
            time.sleep(STEP_S)
        progress.write_text(str(i + 1))


if __name__ == "__main__":
    main()
