"""A training script for end-to-end tests: no torch, starts in milliseconds, does what a plan says.

argv[1]: JSON {"steps": N, "step_s": s, "plan": [{"rank": r, "cycle": c, "at": i (or "after": steps of this cycle), "do": WHAT, ...}], "client": true, "resume": path}
WHAT: exit CODE | signal N | hang | stop | raise TEXT | ignore_term | orphans | sleep S | exit_hang | leave_on_term CODE
Every rank appends a line `cycle iteration` to <resume>.rank when it completes a step; with `resume` it goes on after the last one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from monitors.client import attach

CONF = json.loads(sys.argv[1])
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
MARK = Path(CONF["marks"])


def mark(name, text=""):
    (MARK / f"{name}.{RANK}.{CYCLE}").write_text(text or str(os.getpid()))


def orphans():
    """A child in the rank's session, one in its own, and one by double fork."""
    sleeper = "import time, os; open(os.environ['ORPHAN'] + '.' + str(os.getpid()), 'w').close(); time.sleep(1000)"
    base = {**os.environ, "ORPHAN": str(MARK / "orphan")}
    subprocess.Popen([sys.executable, "-S", "-c", sleeper], env=base)
    subprocess.Popen([sys.executable, "-S", "-c", sleeper], env=base, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-S", "-c", sleeper], base)
        os._exit(0)
    while len(list(MARK.glob("orphan.*"))) < 3:
        time.sleep(0.01)


def act(item):
    what, value = item["do"], item.get("value")
    mark(what)
    if what == "exit":
        sys.exit(value)
    if what == "signal":
        os.kill(os.getpid(), value)
    if what == "hang":
        time.sleep(1000)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raise":
        raise ValueError(value)
    if what == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "orphans":
        orphans()
    if what == "sleep":
        time.sleep(value)
    if what == "leave_on_term":
        signal.signal(signal.SIGTERM, lambda *_: (mark("got_term"), sys.exit(value)))
    if what == "count_usr1":
        signal.signal(signal.SIGUSR1, lambda *_: (MARK / f"usr1.{RANK}").open("a").write("x"))


def main():
    mine = [i for i in CONF.get("plan", []) if i.get("rank", RANK) == RANK and i.get("cycle", CYCLE) == CYCLE]
    mon = attach() if CONF.get("client", True) else None
    mark("begin")
    done = MARK / f"steps.{RANK}"
    start = len(done.read_text().split()) if CONF.get("resume") and done.exists() else 0
    for i in range(start, CONF["steps"]):
        section = mon.section("step", iteration=i) if mon else open(os.devnull)
        with section:
            for item in mine:
                if item.get("at") == i or item.get("after") == i - start:
                    act(item)
            time.sleep(CONF.get("step_s", 0.02))
        with done.open("a") as f:
            f.write(f"{CYCLE}:{i} ")
    for item in mine:
        if item.get("at") == "end":
            act(item)
    print(f"rank {RANK} is done")


if __name__ == "__main__":
    main()
