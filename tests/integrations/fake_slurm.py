"""A stand-in for Slurm on one machine: `sbatch`, `srun` and `scontrol` as programs on PATH, at the worst defaults that a site may have.

`python fake_slurm.py sbatch|srun|scontrol ARGUMENTS`. The state is a folder, FAKE_SLURM: `cluster.json` (nodes), `job.json` (the one job), `calls.jsonl` (every call). As Slurm does:

- `sbatch` chooses nodes that are not excluded, runs the batch script, and again whenever the job has been requeued and released.
- `scontrol requeue` makes a running job pending and ends the batch script (the group of its processes) with TERM. ExcNodeList of a job that is not pending is refused.
- `srun` runs the command once on each node (here: with other variables), ends with the highest code, and kills the step: when a task fails, unless --kill-on-bad-exit=0; a second
  after the first task has ended, unless --wait=0; when a node fails (here: a task died by KILL), unless --no-kill.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(os.environ.get("FAKE_SLURM", "."))
MOST_STARTS = 12


@contextmanager
def job() -> Iterator[dict[str, Any]]:
    """The job's record, locked; what is changed is written back."""
    with (HERE / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = HERE / "job.json"
        doc = json.loads(path.read_text()) if path.exists() else {}
        yield doc
        new = path.with_name(f"job.json.{os.getpid()}")  # whole at any moment, also for who reads without the lock
        new.write_text(json.dumps(doc))
        new.replace(path)


def nodes() -> list[str]:
    found: list[str] = json.loads((HERE / "cluster.json").read_text())["nodes"]
    return found


def expand(listed: str) -> list[str]:
    """`n[1-3,5],m` to names."""
    found = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", listed):
        for part in inside.split(",") if inside else [""]:
            low, dash, high = part.partition("-")
            found += [f"{prefix}{i}" for i in range(int(low), int(high) + 1)] if dash else [prefix + part]
    return found


# -- scontrol ---------------------------------------------------------------------------------------------------------------------------------


def scontrol(args: list[str]) -> int:
    words = [word for word in args if word != "--oneliner"]
    verb, rest = words[0], words[1:]
    if verb == "show" and rest[0] == "hostnames":
        print("\n".join(expand(rest[1])))
        return 0
    if verb in os.environ.get("FAKE_SLURM_FAILS", "").split(","):
        return refuse("Unable to contact slurm controller (connect failure)")
    if verb == "show":
        with job() as doc:
            print(
                f"JobId={doc['id']} JobName={doc['name']} JobState={doc['state']} ReqNodeList=(null) ExcNodeList={doc['exc'] or '(null)'} NodeList={doc['list']}"
            )
        return 0
    if verb in ("requeue", "requeuehold"):
        return requeue(rest[0], held=verb == "requeuehold")
    return {"update": update, "release": release}[verb](rest)


def requeue(number: str, held: bool) -> int:
    with job() as doc:
        if doc["id"] != number or doc["state"] != "RUNNING":
            return refuse("Job is not running")
        doc |= {"state": "PENDING", "held": held}
        group = doc["group"]
    os.killpg(group, signal.SIGTERM)
    return 0


def update(pairs: list[str]) -> int:
    given = dict(pair.split("=", 1) for pair in pairs)
    with job() as doc:
        if given["JobId"] != doc["id"]:
            return refuse("Invalid job id specified")
        if doc["state"] != "PENDING":
            return refuse("Job is no longer pending execution")
        if not set(expand(given["ExcNodeList"])) <= set(nodes()):
            return refuse("Invalid node name specified")
        doc["exc"] = given["ExcNodeList"]
    return 0


def release(rest: list[str]) -> int:
    with job() as doc:
        doc["held"] = False
    return 0


def refuse(why: str) -> int:
    print(f"slurm_update error: {why}", file=sys.stderr)
    return 1


# -- sbatch -----------------------------------------------------------------------------------------------------------------------------------


def sbatch(args: list[str]) -> int:
    """Runs the job to its end, in the foreground; its code is the last start's."""
    script = Path(args[0])
    said = dict(line.split()[1].lstrip("-").partition("=")[::2] for line in script.read_text().splitlines() if line.startswith("#SBATCH"))
    wanted = int(os.environ.get("FAKE_SLURM_NODES", said["nodes"]))
    with job() as doc:
        doc |= {
            "id": "77",
            "name": os.environ.get("FAKE_SLURM_NAME", said["job-name"]),
            "state": "PENDING",
            "held": False,
            "exc": "",
            "flags": sorted(said),
        }
    code = 0
    for start in range(MOST_STARTS):
        with job() as doc:
            free = [name for name in nodes() if name not in expand(doc["exc"])]
            if doc["state"] != "PENDING" or doc["held"] or len(free) < wanted:
                break
            doc |= {"state": "RUNNING", "list": ",".join(free[:wanted]), "starts": start + 1}
        code = run_batch([str(script), *args[1:]], start, wanted)
        with job() as doc:
            if doc["state"] == "RUNNING":
                doc["state"] = "COMPLETED" if code == 0 else "FAILED"
    return code


def run_batch(command: list[str], start: int, wanted: int) -> int:
    with job() as doc:
        variables = {
            "SLURM_JOB_ID": doc["id"], "SLURM_JOB_NAME": doc["name"], "SLURM_JOB_NODELIST": doc["list"], "SLURM_NNODES": str(wanted), "SLURM_SUBMIT_DIR": str(Path.cwd()),
            "SLURM_NODEID": "0", "SLURMD_NODENAME": doc["list"].split(",")[0],
        }  # fmt: skip
        if start:
            variables["SLURM_RESTART_COUNT"] = str(start)
        batch = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)
        doc["group"] = batch.pid
    code = batch.wait()
    return 128 - code if code < 0 else code


# -- srun -------------------------------------------------------------------------------------------------------------------------------------


def srun(args: list[str]) -> int:
    said, at = {"kill-on-bad-exit": "1", "wait": "1"}, 0
    while args[at].startswith("--"):
        name, _, value = args[at][2:].partition("=")
        said[name] = value
        at += 1
    with job() as doc:
        names = doc["list"].split(",")
    tasks = [start_task(args[at:], name, i, len(names)) for i, name in enumerate(names)]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: signal_all(tasks, n))
    codes = watch(tasks, said)
    return max(128 - code if code < 0 else code for code in codes)


def start_task(command: list[str], name: str, number: int, count: int) -> subprocess.Popen[bytes]:
    step = {
        "SLURM_NODEID": str(number),
        "SLURM_PROCID": str(number),
        "SLURMD_NODENAME": name,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
    }
    task = subprocess.Popen(command, env={**os.environ, **step}, start_new_session=True)
    (HERE / f"task.{name}.pid").write_text(str(task.pid))
    return task


def watch(tasks: list[subprocess.Popen[bytes]], said: dict[str, str]) -> list[int]:
    ended_at: float | None = None
    while any(task.poll() is None for task in tasks):
        codes = [task.poll() for task in tasks]
        done = [code for code in codes if code is not None]
        if done and ended_at is None:
            ended_at = time.monotonic()
        patience = float(said["wait"])
        bad = any(code > 0 for code in done) and said["kill-on-bad-exit"] != "0"
        lost = any(code == -signal.SIGKILL for code in done) and "no-kill" not in said
        late = ended_at is not None and patience and time.monotonic() - ended_at > patience
        if bad or lost or late:
            print(
                f"srun: the step is ended ({'a task failed' if bad else 'a node failed' if lost else 'waited long enough'})",
                file=sys.stderr,
            )
            signal_all(tasks, signal.SIGKILL)
        time.sleep(0.02)
    return [task.wait() for task in tasks]


def signal_all(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)


def main() -> int:
    program, args = sys.argv[1], sys.argv[2:]
    with (HERE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps([program, *args]) + "\n")
    return {"scontrol": scontrol, "sbatch": sbatch, "srun": srun}[program](args)


if __name__ == "__main__":
    sys.exit(main())
