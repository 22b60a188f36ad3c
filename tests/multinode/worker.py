"""A training script for tests with several nodes: no torch, every step depends on every rank, and it leaves evidence.

argv[1]: JSON {"marks": folder, "steps": N, "step_s": s, "plan": [{"rank": r, "cycle": c, "at": i, "do": WHAT, "value": v}], "save_every": n, "pace": file, "until": file that ends it}
WHAT: exit CODE | signal N | hang | raise TEXT | leave_on_term CODE (after save_s seconds) | slow_start S (before the first step)

Rank 0 is a barrier over TCP: whoever dies breaks everybody's connection, whoever is frozen blocks everybody, as collectives would. Evidence in `marks`:
`life.jsonl` (who began where), `steps.<rank>` (`cycle:iteration` of each completed step), `commits.jsonl` (claims, commits and refusals of the
checkpoint folder `ckpt`). A lock file for each (cycle, rank) makes two living ranks of one number and cycle visible at once: `DOUBLE.*`.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

from monitors.client import attach
from monitors.fence import CheckpointFence, FenceLost

CONF = json.loads(sys.argv[1])
RANK, WORLD, CYCLE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["FT_CYCLE"])
MARKS = Path(CONF["marks"])
CONNECT_S = 120.0
GENERATION = int(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent.name.rpartition(".")[2])


def append(name, **what):
    """One line, in one write: files with O_APPEND are shared by all ranks."""
    with open(MARKS / name, "ab", buffering=0) as file:
        who = {"rank": RANK, "cycle": CYCLE, "generation": GENERATION, "pid": os.getpid(), "at": time.monotonic()}
        file.write(json.dumps({**who, **what}).encode() + b"\n")


def claim_number():
    """The lock is held as long as this process lives."""
    lock = open(MARKS / f"alive.{GENERATION}.{CYCLE}.{RANK}", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        append(f"DOUBLE.{RANK}.{CYCLE}")
    return lock


class Barrier:
    """Everybody's step ends when everybody's has. `tell` is what rank 0 says to all at the start."""

    def __init__(self, tell):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.links = []
        if RANK == 0:
            server = self.listen(address)
            self.links = [server.accept()[0] for _ in range(WORLD - 1)]
            server.close()
            self.told = tell
            for link in self.links:
                link.sendall(tell.to_bytes(8, "big", signed=True))
        else:
            self.links = [self.connect(address)]
            self.told = int.from_bytes(self.take(self.links[0], 8), "big", signed=True)
        for link in self.links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def listen(address):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return socket.create_server(address, family=family, backlog=64)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def connect(address):
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                link = socket.create_connection(address, timeout=5)
                link.settimeout(None)
                return link
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def take(link, size):
        data = b""
        while len(data) < size:
            more = link.recv(size - len(data))
            if not more:
                raise ConnectionError("connection closed by peer")
            data += more
        return data

    def wait(self):
        """Returns whether it was the last step: rank 0 finds the file `until` and tells everybody."""
        if RANK == 0:
            for link in self.links:
                self.take(link, 1)
            word = b"!" if Path(CONF.get("until", "/dev/null/no")).exists() else b"."
            for link in self.links:
                link.sendall(word)
            return word == b"!"
        self.links[0].sendall(b".")
        return self.take(self.links[0], 1) == b"!"


def act(item):
    what, value = item["do"], item.get("value")
    append("acts.jsonl", do=what)
    if what == "exit":
        sys.exit(value)
    if what == "signal":
        os.kill(os.getpid(), value)
    if what == "hang":
        time.sleep(10_000)
    if what == "raise":
        raise ValueError(value)
    if what == "slow_start":
        time.sleep(value)
    if what == "leave_on_term":
        signal.signal(signal.SIGTERM, lambda *_: (append("term.jsonl"), time.sleep(item.get("save_s", 0)), sys.exit(value)))


def pace():
    """Seconds a step takes; a test may change its mind while training goes on."""
    if "pace" in CONF:
        with contextlib.suppress(OSError, ValueError):
            return float(Path(CONF["pace"]).read_text())
    return CONF.get("step_s", 0.05)


def save(mon, fence, i):
    """Commit, if we may; `commit_blindly` goes by the storage's fence alone."""
    name = f"step_{i}.{fence.number}"
    (fence.folder / name).write_text(str(i))
    if not (mon.commit_allowed() or CONF.get("commit_blindly")):
        append("commits.jsonl", what="hint", i=i, fence=fence.number)
        return
    try:
        fence.commit(name)
    except FenceLost:
        append("commits.jsonl", what="refused", i=i, fence=fence.number)
        raise
    append("commits.jsonl", what="commit", i=i, fence=fence.number)


def main():
    lock = claim_number()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mon = attach()
    place = {
        "node": os.environ["FT_NODE_ID"],
        "slot": int(os.environ["FT_SLOT"]),
        "master": os.environ["MASTER_ADDR"],
        "why": os.environ.get("FT_RESTART_REASON", ""),
    }
    append("life.jsonl", **place)
    mine = [i for i in CONF.get("plan", []) if i.get("rank", RANK) == RANK and i.get("cycle", CYCLE) == CYCLE]
    fence, last = None, -1
    if RANK == 0:
        fence = CheckpointFence.claim(MARKS / "ckpt", lambda name: (MARKS / "ckpt" / name).exists())
        last = int(re.match(r"step_(\d+)", fence.chosen)[1]) if fence.chosen else -1
        append("commits.jsonl", what="claim", i=last, fence=fence.number)
    for item in mine:
        if item["do"] == "slow_start":
            act(item)
    barrier = Barrier(last)
    every = CONF.get("save_every", 5)
    with open(MARKS / f"steps.{RANK}", "ab", buffering=0) as steps:
        for i in range(barrier.told + 1, CONF["steps"]):
            with mon.section("step", iteration=i):
                for item in mine:
                    if item.get("at") == i:
                        act(item)
                time.sleep(pace())
                last = barrier.wait()
            steps.write(f"{CYCLE}:{i} ".encode())
            if fence is not None and (i + 1) % every == 0:
                save(mon, fence, i)
            if last:
                break
    barrier.wait()
    print(f"rank {RANK} is done")
    lock.close()


if __name__ == "__main__":
    main()
