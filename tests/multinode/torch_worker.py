"""A training script with torch and gloo: one all_reduce a step. argv[1]: JSON {"marks": folder, "steps": N, "step_s": s}; evidence as in worker.py."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from monitors.client import attach

CONF = json.loads(sys.argv[1])
RANK, CYCLE, WORLD = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"]), int(os.environ["WORLD_SIZE"])
MARKS = Path(CONF["marks"])


def main():
    place = {"node": os.environ["FT_NODE_ID"], "slot": int(os.environ["FT_SLOT"]), "store": os.environ.get("TORCHELASTIC_USE_AGENT_STORE")}
    with open(MARKS / "life.jsonl", "ab", buffering=0) as life:
        life.write(json.dumps({"rank": RANK, "cycle": CYCLE, "generation": 0, "pid": os.getpid(), **place}).encode() + b"\n")
    mon = attach()
    dist.init_process_group("gloo")
    with open(MARKS / f"steps.{RANK}", "ab", buffering=0) as steps:
        for i in range(CONF["steps"]):
            with mon.section("step", iteration=i):
                value = torch.tensor([float(RANK)])
                dist.all_reduce(value)
                assert value.item() == WORLD * (WORLD - 1) / 2
                time.sleep(CONF.get("step_s", 0.05))
            steps.write(f"{CYCLE}:{i} ".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
