"""Four ranks in lock-step over gloo, one of which does something odd: argv[1] is JSON {"rank": r, "cycle": 0, "at": i, "do": WHAT, "steps": N, "marks": folder}.

WHAT: sleep | stop | spin | queue | talk (other threads beat and print) | save | setup (before the first section) | between (out of section) | exit (after the last section) | mismatch
(it calls recv where the others call all_reduce: all of them wait).
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from monitors.client import attach

CONF = json.loads(sys.argv[1])
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
MINE = CONF.get("cycle", 0) == CYCLE and CONF["rank"] == RANK


def talk():
    mon = attach()
    while True:
        with mon.section("beat"):
            print(".", flush=True)
        time.sleep(0.01)


def stand_still(what):
    (Path(CONF["marks"]) / f"{what}.{RANK}").write_text(str(os.getpid()))
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "spin":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if what == "queue":
        queue.Queue().get()
    if what == "talk":
        threading.Thread(target=talk, daemon=True).start()
    time.sleep(1000)


def step(i):
    x = torch.ones(4) * RANK
    if MINE and i == CONF["at"] and CONF["do"] in ("sleep", "stop", "spin", "queue", "talk"):
        stand_still(CONF["do"])
    if MINE and i == CONF["at"] and CONF["do"] == "mismatch":
        dist.recv(x, (RANK + 1) % 4)
    dist.all_reduce(x)


def save(i):
    if MINE and i == CONF["at"] and CONF["do"] == "save":
        stand_still("save")
    dist.barrier()


def main():
    torch.set_num_threads(1)
    mon = attach()
    if MINE and CONF["do"] == "setup":
        stand_still("setup")
    with mon.section("setup"):
        dist.init_process_group("gloo")
    for i in range(CONF["steps"]):
        with mon.section("step", iteration=i):
            step(i)
        if MINE and i == CONF["at"] and CONF["do"] == "between":
            stand_still("between")
        with mon.section("checkpointing"):
            save(i)
    if MINE and CONF["do"] == "exit":
        stand_still("exit")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
