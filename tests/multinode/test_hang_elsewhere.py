"""A hang whose culprit is on another node than the first suspect: that node looks at its ranks as well, before anybody is killed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.multinode.conftest import Make

SCRIPT = """
import os, sys, time
from monitors.client import attach

mon, rank = attach(), int(os.environ["RANK"])


def stuck_in_the_save():
    while True:
        time.sleep(0.5)


for i in range(3):
    with mon.section("step", iteration=i):
        time.sleep(0.05)
if rank == 1 and os.environ["FT_CYCLE"] == "0":
    with mon.section("checkpointing"):
        stuck_in_the_save()
with mon.section("step", iteration=3):
    time.sleep(1000 if os.environ["FT_CYCLE"] == "0" else 0.05)
"""


def test_the_culprits_node_looks_when_another_node_suspects(make: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--timeouts", "setup=60,step=3,checkpointing=120", "--fixed-timeouts")
    job = make(nproc=1, ttl_s=20).start("n0", "n1", script=[str(script)], options=options)
    for node in ("n0", "n1"):
        assert job[node].wait() == 0, job.story()
    (hung,) = [d for d in job.decisions() if d["rule"] == 9]
    seen = [e for e in job.journal("seen") if "1" in e["ranks"]]
    assert seen, "the node of rank 1 had no reason of its own to look"
    assert hung["culprit"] is not None
    assert hung["culprit"]["rank"] == 1, hung["reason"]
    summary = json.loads(next((job.folder / "logs").glob("*/incidents/0001/summary.json")).read_text())
    assert summary["culprit"]["rank"] == 1
    stacks = next((job.folder / "logs").glob("*/incidents/0001/stacks/rank_00001.txt")).read_text()
    assert "stuck_in_the_save" in stacks
