"""Documents and foreign writers that the tests of ft_state share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ft_launcher.state import document as doc

AT = "2025-03-01T10:00:00.000Z"


def run_info(run_id: str = "job7", generation: int = 0) -> doc.RunInfo:
    topology = {"tp": 2, "pp": 2, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "order": "tp-cp-ep-dp-pp"}
    return doc.RunInfo(run_id, generation, AT, "train.py", ("--lr", "0.1"), 4, 1, 4, topology, "ft_logs", "0.1.0")


def cycle(n: int, generation: int = 0, cause: str | None = "crash") -> doc.CycleRecord:
    who = doc.Culprit(3, {"tp": 1, "cp": 0, "dp": 0, "pp": 1}, "node-a", 3, "killed by SIGKILL first")
    return doc.CycleRecord(
        n, generation, AT, AT, f"rank 3 was killed in cycle {n}", cause, "restart in place", who, 0.08, 0.01, n * 10, n * 10 + 9
    )


def full(run_id: str = "job7", generation: int = 0, at_cycle: int = 2, previous: doc.Document | None = None) -> doc.Document:
    """A document with something under every key."""
    made = doc.begin_run(previous, run_info(run_id, generation))
    for n in range(at_cycle):
        made = doc.with_cycle(made, cycle(n, generation))
    made = doc.with_cycle(made, doc.CycleRecord(at_cycle, generation, AT))
    timeouts = {
        "setup": doc.SectionTimeout(600, "fixed"),
        "step": doc.SectionTimeout(9.5, "learned from 200 samples", 6.0, True, {"samples": 200, "p99_s": 3.1}),
        doc.OUT_OF_SECTION: doc.SectionTimeout(300, "fixed"),
    }
    made = doc.with_timeouts(made, timeouts, AT)
    made = doc.with_device(made, "node-a/3", suspicions=1, verdict={"at": AT, "verdict": "transient"}, quarantine_until=None)
    made = doc.with_budget(made, "restarts", at_cycle, 3)
    return doc.at_position(made, AT, cycle=at_cycle, phase="running", since=AT, iteration=at_cycle * 10, revision=at_cycle)


def megatron_rewrites(path: Path, timeouts: dict[str, Any] | None = None) -> dict[str, Any]:
    """What Megatron's own writer does: open for writing in place, its own shape and nothing else."""
    mine = timeouts or {
        "section": {
            "section": {"setup": 600.0, "step": 4.25, "checkpointing": 420.0},
            "out_of_section": 300.0,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        }
    }
    with open(path, "w") as file:
        json.dump({"current_timeouts": mine}, file)
    return mine
