"""Real collectives: torch with gloo, a node's death breaks them, the survivors are victims and meet again in the spare's company."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multinode.cluster import Cluster
from tests.multinode.conftest import Make

pytest.importorskip("torch")
WORKER = Path(__file__).with_name("torch_worker.py")


def start(job: Cluster, *nodes: str) -> Cluster:
    script = [str(WORKER), json.dumps({"steps": 100_000, "marks": str(job.marks)})]
    return job.start(
        *nodes, options=["--preload", "torch"], script=script, env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, torch=True
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_node_of_a_gloo_job(make: Make, rank: int) -> None:
    job = make(ttl_s=20)
    start(job, "n0", "n1")
    before = job.until_step(0, 2)
    start(job, "s0")
    job.until(lambda: (job.stored("reports/s0") or {}).get("standby"), "a spare")
    job[job.holder(rank, 0)].power_off()
    after = job.until_step(1, 2)
    assert after["s0"] == [rank]
    assert {n: r for n, r in after.items() if n != "s0"} == {n: r for n, r in before.items() if r != [rank]}
    assert job.stored("job")["budgets"]["restarts"] == 0, "whose connections broke is a victim"
    assert {x["store"] for x in job.life()} == {"True"}, "the agents' standby stores are used"


def test_a_frozen_node_of_a_gloo_job(make: Make) -> None:
    job = make()
    start(job, "n0", "n1")
    job.until_step(0, 2)
    start(job, "s0")
    job.until(lambda: (job.stored("reports/s0") or {}).get("standby"), "a spare")
    frozen = job["n1"].freeze()
    assert job.until_step(1, 2) == {"n0": [0], "s0": [1]}
    ranks = job["n1"].ranks()
    job["n1"].thaw(frozen)
    job.until(lambda: not job["n1"].ranks(), "its ranks are gone", 5)
    assert ranks
    assert job.cycle() == 1
