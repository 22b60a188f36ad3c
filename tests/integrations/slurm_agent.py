"""A stand-in for the batch script's Python: the Slurm module for real, and instead of ft-launch an agent that ends as the plan of this start says.

FAKE_PLAN: JSON, one entry a start: {"code": N, "verdict": {...} | null, "own": {node: code}}. Without an entry: code 0. Node 0 writes the verdict, as the controller would.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

args = sys.argv[1:]
if args[:2] != ["-m", "ft_launcher"]:
    os.execv(sys.executable, [sys.executable, *args])

start, node, job = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
logs = Path(os.environ["FT_LOG_DIR"])
logs.mkdir(parents=True, exist_ok=True)
with (logs / "agents.jsonl").open("a") as file:
    file.write(json.dumps({"start": start, "node": node, "order": os.environ["SLURM_NODEID"], "args": args[2:]}) + "\n")
plan = json.loads(os.environ["FAKE_PLAN"])
mine = plan[start] if start < len(plan) else {"code": 0}
if os.environ["SLURM_NODEID"] == "0" and mine.get("verdict", {}) is not None:
    folder = logs / f"{job}.{start}"
    folder.mkdir()
    (folder / "verdict.json").write_text(
        json.dumps({"exit_code": mine["code"], "reason": f"as planned for start {start}", **mine.get("verdict", {})})
    )
sys.exit(mine.get("own", {}).get(node, mine["code"]))
