"""One rank that opens and closes a section many times and writes what that cost: `sections.py native|nvrx RESULT_FILE BATCHES PER_BATCH`."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path


def native() -> Callable[[], None]:
    """One open and close with `monitors.client`."""
    from monitors.client import attach

    mon = attach()
    if not mon.attached:
        raise SystemExit("no section page: not under ft-launch")

    def use() -> None:
        mon.start_section("step")
        mon.end_section("step")

    return use


def nvrx() -> Callable[[], None]:
    """One open and close with NVRx's client."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()

    def use() -> None:
        client.start_section("step")
        client.end_section("step")

    return use


def main() -> None:
    """Measure, write, and wait to be ended."""
    use = {"native": native, "nvrx": nvrx}[sys.argv[1]]()
    batches, per_batch = int(sys.argv[3]), int(sys.argv[4])
    took_us = []
    for _ in range(batches):
        began_ns = time.perf_counter_ns()
        for _ in range(per_batch):
            use()
        took_us.append((time.perf_counter_ns() - began_ns) / per_batch / 1e3)
    part = Path(sys.argv[2] + ".part")
    part.write_text(json.dumps({"median_us": statistics.median(took_us)}))
    part.rename(sys.argv[2])
    while True:  # ended by the benchmark: no launcher's way of noticing an exit is in the figure
        time.sleep(60)


main()
