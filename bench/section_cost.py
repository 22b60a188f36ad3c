"""What a section costs in the rank, with the native client: median of one open and close, in nanoseconds.

Each figure is the median over batches of the mean within a batch (one use is too short for the clock). The page is a real one, owned by this process; at the end
the agent's side is measured too: CPU of looking at 8 pages 20 times a second while all of them change. The last line is JSON.

    python bench/section_cost.py [--batches 200] [--per-batch 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from monitors import layout
from monitors.client import Monitor, attach
from monitors.detect import HangDetector, Limits
from monitors.page import SectionPage, claim
from monitors.rank_page import RankPage


def own_monitor(page: SectionPage) -> Monitor:
    """This process as the page's rank."""
    claim(page.fd)
    os.environ[layout.ENV_PAGE] = f"{layout.FD_PREFIX}{page.fd}"
    monitor = attach()
    if not monitor.attached:
        raise SystemExit("the client did not attach to its own page")
    return monitor


def median_ns(batch: Callable[[int], None], batches: int, per_batch: int) -> float:
    """Median over `batches` of the nanoseconds that one of `per_batch` uses took."""
    took = []
    for _ in range(batches):
        begin_ns = time.perf_counter_ns()
        batch(per_batch)
        took.append((time.perf_counter_ns() - begin_ns) / per_batch)
    return statistics.median(took)


def ways(mon: Monitor) -> dict[str, Callable[[int], None]]:
    """The ways of using a section that are measured."""
    start, end, count = mon.start_section, mon.end_section, iter(range(sys.maxsize))

    def nothing(n: int) -> None:
        for _ in range(n):
            pass

    def with_step(n: int) -> None:
        first = next(count) * n
        for i in range(first, first + n):
            with mon.section("step", iteration=i):
                pass

    def with_named(n: int) -> None:
        for _ in range(n):
            with mon.section("forward"):
                pass

    def start_end(n: int) -> None:
        for _ in range(n):
            start("data")
            end("data")

    return {"empty_loop_ns": nothing, "with_step_ns": with_step, "with_section_ns": with_named, "start_end_ns": start_end}


def agent_share(looks: int) -> float:
    """Share of a core for looking at 8 busy pages 20 times a second and judging them, from `looks` rounds."""
    pages = [SectionPage.create(rank=r, cycle=0) for r in range(8)]
    ranks = [Monitor(RankPage(page._words)) for page in pages]
    for page in pages:
        page._words[layout.ATTACHED] = 1
    detector = HangDetector(Limits({"setup": 600, "step": 180, "checkpointing": 420}, 300))
    spent_ns = 0
    for i in range(looks):
        for rank in ranks:
            rank.start_section("step", iteration=i)
            with rank.section("forward"), rank.section("comm"):
                pass
            rank.end_section("step")
        now_ns = time.monotonic_ns()
        begin_ns = time.thread_time_ns()
        for r, page in enumerate(pages):
            detector.observe(now_ns, r, page.sample(), now_ns)
        spent_ns += time.thread_time_ns() - begin_ns
    del ranks
    return spent_ns / looks * 20 / 1e9


def main() -> None:
    """Prints a line a figure and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--per-batch", type=int, default=1000)
    options = parser.parse_args()
    page = SectionPage.create(rank=0, cycle=0)
    monitor = own_monitor(page)
    result = {name: round(median_ns(batch, options.batches, options.per_batch), 1) for name, batch in ways(monitor).items()}
    result["agent_8_pages_20_hz_core_share"] = round(agent_share(2000), 5)
    for name, value in result.items():
        print(f"{name:34} {value}")
    print(json.dumps({"bench": "section_cost", "client": "native", **result}))


if __name__ == "__main__":
    main()
