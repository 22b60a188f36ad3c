"""Who takes part: any order, late ones, spares, labels, and those that must be refused."""

from __future__ import annotations

import json

import pytest

from tests.multinode.cluster import WORKER
from tests.multinode.conftest import Make


def test_any_order_late_nodes_more_than_max_and_all_spares_end_with_0(make: Make) -> None:
    job = make(nproc=2).start("b9", options=["--nnodes", "2:3"], steps=12)
    said = job.until_said("b9", "still waiting for nodes: 1 of 2 are ready (ready: b9; 1 more to come)")
    assert said.count("still waiting") == 1
    job.start("b10", options=["--nnodes", "2:3"], steps=12)
    job.until_step(0)
    assert job.holders(0) == {"b9": [0, 1], "b10": [2, 3]}, "natural order of the ids"
    job.set_pace(2)
    job.add_spares("a1", "a2", "a3", options=["--nnodes", "2:3"], steps=12)
    job.until(lambda: all(not job[n].ranks() for n in ("a1", "a2", "a3")), "spares hold no ranks")
    job.finish()
    assert {n: job[n].wait() for n in job.nodes} == dict.fromkeys(job.nodes, 0), job.story()
    assert job.verdict()["outcome"] == "finished"
    assert job.verdict()["cycles"] == 1
    assert "still waiting" not in job["b9"].said().split("cycle 0 starts")[-1], "quiet once it runs"


@pytest.mark.parametrize(
    ("options", "conf", "name", "values"),
    [
        (["--tp", "2"], {}, "--tp", ("'2'", "'1'")),
        (["--nproc-per-node", "4"], {}, "--nproc-per-node", ("'4'", "'2'")),
        (["--nnodes", "3"], {}, "--nnodes", ("'3'", "'2'")),
        ([], {"steps": 7}, "script arguments", ('"steps": 7', '"steps": 100000')),
    ],
)
def test_a_different_command_is_refused_naming_both_values(
    make: Make, options: list[str], conf: dict[str, int], name: str, values: tuple[str, str]
) -> None:
    job = make(nproc=2).start("n0")
    job.until(lambda: job.stored("nodes/n0"), "the first node")
    job.start("n1", options=options, **conf)
    assert job["n1"].wait() == 2
    (line,) = [x for x in job["n1"].said().splitlines() if x.strip()]
    assert name in line
    assert "n0" in line
    for value in values:
        assert value in line


def test_a_different_script_is_refused(make: Make) -> None:
    job = make().start("n0")
    job.until(lambda: job.stored("nodes/n0"), "the first node")
    other = job.folder / "other.py"
    other.write_text(WORKER.read_text())
    job.start("n1", script=[str(other), json.dumps(job.conf)])
    assert job["n1"].wait() == 2
    assert str(other) in job["n1"].said()
    assert str(WORKER) in job["n1"].said()


def test_not_enough_nodes_within_the_join_wait_is_75(make: Make) -> None:
    job = make(nnodes=3).start("n0", "n1", options=["--join-wait", "3"])
    assert job["n0"].wait() == 75
    assert job["n1"].wait() == 75
    assert "not enough healthy nodes after 3 s: 2 of 3 ready" in job.verdict()["reason"]
    assert job.verdict()["outcome"] == "not_enough_nodes"


def test_the_spare_that_shares_the_lost_nodes_label_is_chosen(make: Make) -> None:
    job = make(ttl_s=20)
    for node, rack in (("n0", "a"), ("n1", "b")):
        job.start(node, options=["--node-label", f"rack={rack}"])
    job.until_step(0)
    for node, rack in (("s0", "a"), ("s1", "c"), ("s2", "b")):
        job.add_spares(node, options=["--node-label", f"rack={rack}"])
    job["n1"].power_off()
    assert job.until_step(1) == {"n0": [0], "s2": [1]}
    job["n0"].power_off()
    assert job.until_step(2) == {"s0": [0], "s2": [1]}


def test_a_node_id_in_use_is_refused_naming_the_holder(make: Make) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    first = job["n1"]
    address = (job.stored("nodes/n1") or {})["address"]
    job.start("n1")
    assert job["n1"].wait() == 2
    assert f"has a live agent of this id at {address}" in job["n1"].said()
    assert f"waiting up to {job.ttl_s + 1:g} s" in job["n1"].said()
    assert first.running()
    assert job.cycle() == 0
