"""A training script with a device that computes wrong numbers, and Megatron's way of finding that out, without torch and in milliseconds.

argv[1]: JSON {"folder", "steps", "at", "rank", "device": "node/slot" or "*", "kind": "persistent" | "transient" | "application", "times",
"report": "page" | "file" | "none", "tracker": path, "late": s, "dying": rank, "crash": {"cycle"}, "gate": path to wait for}. The result of step `at`
on `rank` is rejected on `device` ("*": on every one). What a checkpoint would carry of the rerun is in <folder>/rerun.json; each rank appends
"cycle node/slot iteration" to <folder>/steps.R. Every rank leaves with the code that the suspect rank decides, as in Megatron.
"""

import json
import os
import sys
import time
from pathlib import Path

from ft_launcher.core.rerun_report import RerunStatus
from monitors.client import attach
from rerun import tracker

CONF = json.loads(sys.argv[1])
FOLDER = Path(CONF["folder"])
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
DEVICE = f"{os.environ['FT_NODE_ID']}/{os.environ['FT_SLOT']}"
STATE, LEAVE = FOLDER / "rerun.json", FOLDER / f"leave.{CYCLE}"
SUSPECT, AT = CONF["rank"], CONF["at"]
mon = attach()


def write(path, text):
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def wrong():
    """Whether this device spoils the result now."""
    if CONF["kind"] == "application":
        return True
    if CONF["device"] not in ("*", DEVICE):
        return False
    if CONF["kind"] == "persistent":
        return True
    struck = FOLDER / "struck"
    count = int(struck.read_text()) if struck.exists() else 0
    write(struck, str(count + 1))
    return count < CONF.get("times", 1)


def say(status):
    text = f"step {AT}: unexpected result"
    if CONF.get("report", "page") == "page":
        mon.report_rerun(int(status), AT, text)
    if CONF.get("report") == "file":
        tracker.append(CONF["tracker"], tracker.TrackerEntry(RANK, AT, status, "host", "0", text, "666", tracker.now()))


def leave(code):
    write(LEAVE, str(code))
    sys.exit(code)


def judge():
    """The suspect rank at the disputed step: as Megatron's machine decides, with its exits."""
    known = json.loads(STATE.read_text()) if STATE.exists() and not os.environ.get("FT_RERUN_VERDICT") else None
    bad = wrong()
    if known is None and not bad:
        return
    if known is None:
        if CONF["kind"] == "transient":
            say(RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE)
            leave(17)
        write(STATE, json.dumps({"device": DEVICE}))
        say(RerunStatus.FIRST_RERUN_REPRODUCIBLE)
        leave(16)
    if known["device"] == DEVICE:
        leave(16)  # the same place again: it asks again, and has nothing new to say
    say(RerunStatus.SECOND_RERUN_REPRODUCIBLE if bad else RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE)
    leave(17)


def follow_the_others():
    """Every rank leaves with the code of the one that decides; `late`: one after the other."""
    if not LEAVE.exists():
        return
    time.sleep(CONF.get("late", 0) * RANK)
    if CONF.get("dying") == RANK:
        time.sleep(1.0)  # the one that decides has left by then: as when an agent ends what is left
        os.kill(os.getpid(), 15)
    sys.exit(int(LEAVE.read_text()))


def main():
    done = FOLDER / f"steps.{RANK}"
    begun = max((int(line.split()[2]) + 1 for line in done.read_text().splitlines()), default=0) if done.exists() else 0
    for i in range(min(begun, AT) if not (FOLDER / "past").exists() else begun, CONF["steps"]):
        with mon.section("step", iteration=i):
            time.sleep(0.02)
            if i == AT and RANK == SUSPECT:
                while "gate" in CONF and not Path(CONF["gate"]).exists():
                    time.sleep(0.01)
                crash = CONF.get("crash", {})
                if crash.get("cycle") == CYCLE:
                    os.kill(os.getpid(), 9)
                judge()
                (FOLDER / "past").touch()
            while i == AT and RANK != SUSPECT and not (FOLDER / "past").exists():
                follow_the_others()
                time.sleep(0.01)
        with done.open("a") as file:
            file.write(f"{CYCLE} {DEVICE} {i}\n")
    print(f"rank {RANK} is done on {DEVICE} after verdict {os.environ.get('FT_RERUN_VERDICT', 'none')}", flush=True)


main()
