"""A rank that calls NVRx's client as Megatron-Bridge does (docs/facts/nemo.md). argv[1]: folder of marks; argv[2]: the checkpoint folder.

Construction, `init_workload_monitoring()` without arguments, `load_state_dict`, `setup`; `step` after one warm-up iteration, evaluation steps too;
`checkpointing` around a save, then the timeouts are calculated and rank 0 writes `ft_state.json` atomically; `shutdown_workload_monitoring` at the end,
and on failure (here in cycle 0) from `abort()`, without collectives.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

MARKS, CHECKPOINTS = Path(sys.argv[1]), Path(sys.argv[2])
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
STATE = CHECKPOINTS / "ft_state.json"


def in_section(client, name, seconds):
    client.start_section(name)
    time.sleep(seconds)
    client.end_section(name)


def save(client):
    in_section(client, "checkpointing", 0.02)
    client.calculate_and_set_section_timeouts(selected_sections=["step"], calc_out_of_section=False)
    if RANK == 0:
        part = STATE.with_suffix(".tmp")
        part.write_text(json.dumps(client.state_dict()))
        part.replace(STATE)


def main():
    client = RankMonitorClient()
    client.init_workload_monitoring()
    if STATE.exists():
        client.load_state_dict(json.loads(STATE.read_text()))
    (MARKS / f"limits.{RANK}.{CYCLE}").write_text(json.dumps(client.section_timeouts.section))
    client.start_section("setup")
    dist.init_process_group("gloo")
    for i in range(14):
        if i == 0:
            client.end_section("setup")
        else:
            in_section(client, "step", 0.02)
        if i == 8:
            in_section(client, "step", 0.02)  # an evaluation step
            save(client)
        if i == 10 and CYCLE == 0:
            client.shutdown_workload_monitoring()
            os._exit(3)
    client.shutdown_workload_monitoring()
    (MARKS / f"done.{RANK}.{CYCLE}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
