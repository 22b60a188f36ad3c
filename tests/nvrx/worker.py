"""A rank that uses the unmodified client of the installed nvidia_resiliency_ext, as a plan says.

argv[1]: JSON {"marks": folder, "steps": N, "style": "sections" | "heartbeats" | "megatron", "plan": [{"rank": r, "cycle": c, "at": i | "setup" | "end", "do": WHAT}]}
WHAT: hang | sleep S | exclude | shutdown | calculate | exit CODE | garbage SECONDS | strangers
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest

CONF = json.loads(sys.argv[1])
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
MARKS = Path(CONF["marks"])


def mark(name, value):
    part = MARKS / f".{name}.{RANK}.{CYCLE}"
    part.write_text(json.dumps(value))
    part.rename(MARKS / f"{name}.{RANK}.{CYCLE}")


def act(client, item):
    what, value = item["do"], item.get("value")
    if what == "hang":
        time.sleep(1000)
    if what == "sleep":
        time.sleep(value)
    if what == "exit":
        os._exit(value)
    if what in ("exclude", "shutdown"):
        action = {"exclude": WorkloadAction.ExcludeThisNode, "shutdown": WorkloadAction.ShutdownWorkload}[what]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        client.send_workload_control_request(WorkloadControlRequest(action, "ECC errors\x1b[2J"))
        mark(what, True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if what == "calculate":
        calculate(client)
    if what == "garbage":
        client.rank_monitor_socket.sendall(b"\x00\x00\x00\x05hello")
        time.sleep(value)
    if what == "strangers":
        strangers()


def calculate(client):
    """Needs a process group: one of this rank alone does."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if CONF["style"] == "heartbeats":
        client.calculate_and_set_hb_timeouts()
    else:
        client.calculate_and_set_section_timeouts(selected_sections=["step"], calc_out_of_section=False)
    mark("calculated", client.state_dict())
    dist.destroy_process_group()


def strangers():
    """Tells the path, for others to try, and goes on when told to."""
    path = os.environ["FT_RANK_MONITOR_IPC_SOCKET"]
    mark("path", path)
    while not (MARKS / "go_on").exists():
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(path)


def items(at):
    return [i for i in CONF.get("plan", []) if i["at"] == at and i.get("rank", RANK) == RANK and i.get("cycle", CYCLE) == CYCLE]


def sections(client):
    client.init_workload_monitoring()
    mark("config", [client.cfg.rank_section_timeouts, client.cfg.rank_out_of_section_timeout, client.state_dict()])
    for item in items("setup"):
        act(client, item)
    for i in range(CONF["steps"]):
        client.start_section("step")
        for item in items(i):
            act(client, item)
        time.sleep(0.02)
        client.end_section("step")
        for item in items(f"after {i}"):
            act(client, item)
    client.shutdown_workload_monitoring()


def heartbeats(client):
    client.init_workload_monitoring()
    for i in range(CONF["steps"]):
        client.send_heartbeat()
        for item in items(i):
            act(client, item)
        time.sleep(0.02)
    client.shutdown_workload_monitoring()


def megatron(client):
    """The order of calls of megatron/training/ft_integration.py, core_v0.16 (docs/facts/megatron.md)."""
    state = MARKS / "ft_state.json"
    client.init_workload_monitoring()
    if state.exists():
        client.load_state_dict(json.loads(state.read_text()))
    mark("timeouts", [client.section_timeouts.section, client.section_timeouts.out_of_section])
    client.start_section("setup")
    for item in items("setup"):
        act(client, item)
    for i in range(CONF["steps"]):
        if i == 0:
            client.end_section("setup")
        if i >= 2:  # after the warm-up iterations
            client.start_section("step")
        for item in items(i):
            act(client, item)
        time.sleep(0.02)
        if i >= 2:
            client.end_section("step")
        client.start_section("checkpointing")  # async saves are finalised in every iteration
        for item in items(f"save {i}"):
            act(client, item)
        client.end_section("checkpointing")
        if i == CONF.get("save_at"):
            act(client, {"do": "calculate"})
            if RANK == 0:
                state.write_text(json.dumps(client.state_dict()))
    client.shutdown_workload_monitoring()


def main():
    mark("begin", os.getpid())
    client = RankMonitorClient()
    {"sections": sections, "heartbeats": heartbeats, "megatron": megatron}[CONF["style"]](client)
    for item in items("end"):
        act(client, item)
    mark("done", True)


if __name__ == "__main__":
    main()
