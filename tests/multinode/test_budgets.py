"""Causes and budgets over several nodes: who was first, what is charged, and that neither a new controller nor a new node forgets it."""

from __future__ import annotations

import pytest

from tests.multinode.cluster import Cluster
from tests.multinode.conftest import Make


@pytest.mark.parametrize(
    ("guilty", "do", "value", "cause"),
    [(0, "signal", 9, "SIGKILL"), (2, "exit", 3, "code 3"), (2, "raise", "bad number", "ValueError: bad number")],
)
def test_the_first_cause_is_named_and_not_the_peers_that_died_of_it(make: Make, guilty: int, do: str, value: object, cause: str) -> None:
    """Every rank waits for every other: all fail within milliseconds, on both nodes, and each tells of a lost connection."""
    job = make(nproc=2)
    job.options = ("--max-restarts", "0")
    job.start("n0", "n1", plan=[{"rank": guilty, "at": 3, "do": do, "value": value}])
    codes = {n: job[n].wait() for n in ("n0", "n1")}
    assert len(set(codes.values())) == 1, "the same on every agent"
    verdict = job.verdict()
    assert (verdict["first_cause"]["rank"], verdict["first_cause"]["node"]) == (guilty, f"n{guilty // 2}"), job.story()
    assert cause in verdict["reason"]


def test_budgets_survive_the_controller_and_the_nodes_and_a_node_that_fails_twice_is_replaced(make: Make) -> None:
    job = make()
    job.options = ("--max-restarts", "3", "--no-progress-cycles", "9")
    job.start("n0", "n1").until_step(0, 2)
    job.add_spares("s0", "s1")
    job.signal_rank(1)
    assert "n1" in job.until_step(1, 2)
    job.signal_rank(1)
    assert "n1" not in job.until_step(2, 2), "it works, but it failed twice"
    assert "failure 2 of node n1" in job.decisions()[-1]["reason"]
    former = job.leader()
    for node in {"n0", former}:
        job[node].power_off()
    cycle = until_trains(job, after=2)
    assert job.leader() != former
    budgets = (job.stored("job") or {})["budgets"]
    assert budgets["restarts"] == 2, "a lost node is not charged, and nothing is forgotten"
    assert budgets["node_failures"]["n1"] >= 2
    job.signal_rank(0)
    cycle = until_trains(job, after=cycle)
    (told,) = {x["why"] for x in job.life(cycle)}
    assert "restart 3 of 3" in told, "all ranks are told the same"
    job.signal_rank(0)
    assert {job[n].wait() for n in job.holders(cycle)} == {137}, job.story()
    assert "--max-restarts 3 are used up" in job.verdict()["reason"]


def until_trains(job: Cluster, after: int) -> int:
    """Some later cycle runs (two nodes are not always noticed together); which."""
    job.until(lambda: job.cycle() > after and all(len(job.steps(r, job.cycle())) >= 2 for r in (0, 1)), f"a cycle after {after} trains")
    return job.cycle()
