"""Cut off from the store, or the store itself in trouble: training that goes on is never touched, and nobody acts who may not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode.cluster import Cluster, Detour
from tests.multinode.conftest import Make
from tests.store.etcd_server import EtcdServer, cluster, free_port, leader

Way = Callable[[tuple[str, int]], Detour]


def steps_on(job: Cluster, cycle: int, seconds: float) -> None:
    """Training goes on in this cycle for so long, and nothing else begins."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        at = len(job.steps(0, cycle))
        job.until(lambda at=at: len(job.steps(0, cycle)) > at, "a further step", 20)
    assert job.cycle() == cycle
    assert not job.decisions() or max(d["cycle"] for d in job.decisions()) < cycle


def test_a_node_cut_off_from_the_store_alone_is_kept(make: Make, shared_etcd: EtcdServer, detour: Way) -> None:
    job, way = make(), detour(shared_etcd.endpoint)
    job.start("n0").start("n1", way=way)
    job.until_step(0)
    job.add_spares("s0")
    pids = job["n1"].ranks()
    way.cut()
    job.until(lambda: job.stored("nodes/n1") is None, "its lease ends")
    said = job.until(lambda: "cut off from the store only" in job.story(), "the controller says that it keeps it")
    assert said
    steps_on(job, 0, 3)
    assert job["n1"].ranks() == pids
    way.mend()
    job.until(lambda: job.stored("nodes/n1"), "it registers again")
    steps_on(job, 0, 1)
    assert job["n1"].ranks() == pids
    job["n1"].power_off()
    assert job.until_step(1)["s0"], "and when it is really lost, it is replaced"


def test_the_verdict_of_a_node_that_was_cut_off_alone_does_not_stand(make: Make, shared_etcd: EtcdServer, detour: Way) -> None:
    """Its ranks fail, it can tell nobody and concludes that the store is away: the others know better."""
    job, way = make(), detour(shared_etcd.endpoint)
    options = ["--store-timeout", "6"]
    job.start("n0", options=options).start("n1", way=way, options=options)
    job.until_step(0)
    job.add_spares("s0", options=options)
    way.cut()
    job.until(lambda: job.stored("nodes/n1") is None, "its lease ends")
    job.signal_rank(job.holders(0)["n1"][0])
    assert job["n1"].wait() == 69
    assert job.until_step(1)["s0"]
    job.until(lambda: not list((job.folder / "logs").glob("*/verdict.json")), "nothing is concluded")
    for node in ("n0", "s0"):
        job[node].terminate()
    assert {n: job[n].wait() for n in ("n0", "s0")} == {"n0": 143, "s0": 143}, job.story()
    assert job.verdict()["outcome"] == "stopped"


def test_a_controller_cut_off_from_the_store_is_succeeded_and_writes_nothing(make: Make, shared_etcd: EtcdServer, detour: Way) -> None:
    job, way = make(), detour(shared_etcd.endpoint)
    job.start("s0", way=way)
    assert job.leader() == "s0"
    job.start("n0", "n1", "s1", options=["--node-label", "x=y"])
    job.until(lambda: all(job.stored(f"nodes/{n}") for n in ("n0", "n1", "s1")), "all are there")
    job.until_step(0)
    way.cut()
    successor = job.until(lambda: (job.stored("leader") or {"node": "s0"})["node"] not in ("s0",) and job.stored("leader"), "a successor")[
        "node"
    ]
    steps_on(job, 0, 1)
    assert job.holders(0) == job.holders(job.cycle())
    way.mend()
    job.until(lambda: job.stored("nodes/s0"), "the old one registers again")
    victim = job.holder(1, 0)
    job[victim].power_off()
    job.until_step(1)
    assert job.leader() == successor or victim == successor
    by_node = {e["node"] for e in job.journal("job") if e["job"]["cycle"] == 1}
    assert "s0" not in by_node, "the deposed controller has decided nothing"


def test_a_deposed_controller_does_not_keep_the_progress_to_itself(make: Make, shared_etcd: EtcdServer, detour: Way) -> None:
    """It holds ranks, is cut off, succeeded, and comes back: the successor must hear of its ranks' progress."""
    job, way = make(), detour(shared_etcd.endpoint)
    job.start("n0", way=way)
    assert job.leader() == "n0"
    job.start("n1")
    job.until_step(0)
    way.cut()
    job.until(lambda: (job.stored("leader") or {"node": "n0"})["node"] == "n1", "a successor")
    steps_on(job, 0, 1)
    way.mend()
    job.until(lambda: job.stored("nodes/n0"), "the old one registers again")
    job.signal_rank(0)
    job.until_step(1)
    job.until(lambda: [e for e in job.journal("recovered") if e["cycle"] == 1], "all ranks' first step is told to the controller")
    assert job.leader() == "n1"


@pytest.mark.parametrize("trouble", ["down for three TTLs", "restarted", "frozen for 5 s"])
def test_trouble_of_the_store_touches_no_rank(make: Make, etcd: EtcdServer, trouble: str) -> None:
    job = make([etcd.endpoint])
    job.start("n0", "n1")
    job.until_step(0)
    job.add_spares("s0")
    pids = {n: job[n].ranks() for n in job.holders(0)}
    if trouble == "frozen for 5 s":
        etcd.pause()
        steps_on(job, 0, 5)
        etcd.resume()
    else:
        etcd.kill()
        steps_on(job, 0, 3 * job.ttl_s if "TTL" in trouble else 0.5)
        etcd.start()
    job.until(
        lambda: all(job.stored(f"nodes/{n}") for n in ("n0", "n1", "s0")) and job.stored("leader"),
        "all are registered again, with a controller",
    )
    steps_on(job, 0, 2 * job.ttl_s)
    assert {n: job[n].ranks() for n in job.holders(0)} == pids
    job[job.holder(0, 0)].power_off()
    assert job.until_step(1)["s0"] == [0], "and the next fault is dealt with"


def test_a_node_comes_back_while_the_store_restarts(make: Make, etcd: EtcdServer) -> None:
    """A store that restarts renews every lease in full, also a dead agent's: its successor waits for longer, and is not refused."""
    job = make([etcd.endpoint], ttl_s=8).start("n0", "n1")  # the successor has to come while the lease is there
    job.until_step(0)
    job["n1"].power_off()
    job.start("n1")
    job.until_said("n1", "node id n1 is registered already")
    time.sleep(2)
    etcd.kill()
    etcd.start()
    assert job.until_step(1) == {"n0": [0], "n1": [1]}


def test_a_crash_during_an_outage_of_the_store_waits_for_it(make: Make, etcd: EtcdServer) -> None:
    job = make([etcd.endpoint]).start("n0", "n1")
    job.until_step(0)
    etcd.kill()
    job.signal_rank(1)
    steps = len(job.steps(0, 0))
    etcd.start()
    job.until_step(1)
    assert len(job.steps(0, 0)) <= steps + 1
    assert job.stored("job")["budgets"]["restarts"] == 1


def test_a_crash_during_an_outage_ends_with_69_after_the_timeout(make: Make, etcd: EtcdServer) -> None:
    job = make([etcd.endpoint]).start("n0", "n1", options=["--store-timeout", "4"])
    job.until_step(0)
    etcd.kill()
    steps_on(job, 0, 7)  # longer than the timeout: healthy training is not bounded by it
    job.signal_rank(1)
    assert {job[n].wait() for n in ("n0", "n1")} == {69}
    assert "--store-timeout" in job["n1"].said()
    verdict = job.verdict()
    assert (verdict["outcome"], verdict["exit_code"], verdict["cycles"]) == ("store_unreachable", 69, 1)
    assert "; on this node rank " in verdict["reason"], "nobody else could be told what happened"


@pytest.mark.parametrize("how", ["while they train", "at a fault"])
def test_a_store_that_comes_back_empty_is_said_and_ends_everybody_with_69(make: Make, etcd: EtcdServer, how: str) -> None:
    """Nobody has taken a node over, and no spare may wait for a job that the store does not know any more."""
    job = make([etcd.endpoint], ttl_s=3).start("n0", "n1")
    job.until_step(0)
    job.add_spares("s0")
    etcd.kill()
    if how == "at a fault":
        job.signal_rank(1)
    etcd.wipe()
    etcd.start()
    if how == "while they train":
        assert job["s0"].wait() == 69
        steps_on(job, 0, 3)
        job.signal_rank(1)
    assert {n: job[n].wait() for n in ("n0", "n1", "s0")} == {"n0": 69, "n1": 69, "s0": 69}, job.story()
    assert "taken over" not in job.story()
    for node in ("n0", "n1", "s0"):
        assert re.search("the store has lost run|lost what it had confirmed", job[node].said()), job.story()
    assert job.verdict()["outcome"] == "store_unreachable"


def test_a_slow_store_disturbs_nobody(make: Make, shared_etcd: EtcdServer, detour: Way) -> None:
    job, way = make(), detour(shared_etcd.endpoint)
    way.slow(0.08)
    job.start("n0", "n1", way=way)
    job.until_step(0)
    job.add_spares("s0", way=way)
    steps_on(job, 0, 3)
    job[job.holder(1, 0)].power_off()
    assert job.until_step(1)["s0"] == [1]


def test_an_unreachable_store_at_start_is_69_in_one_line(make: Make) -> None:
    job = make([("127.0.0.1", free_port())]).start("n0", options=["--store-timeout", "1"])
    assert job["n0"].wait() == 69
    lines = [x for x in job["n0"].said().splitlines() if x.strip()]
    assert len(lines) == 1, lines
    assert "store" in lines[0]
    assert "127.0.0.1" in lines[0]


def test_the_leader_of_three_etcd_servers_is_killed(make: Make, tmp_path: Path) -> None:
    servers: list[EtcdServer] = []
    try:
        cluster(tmp_path, into=servers)
        job = make([s.endpoint for s in servers]).start("n0", "n1")
        job.until_step(0)
        job.add_spares("s0")
        leader(servers).kill()
        steps_on(job, 0, 2 * job.ttl_s)
        job[job.holder(1, 0)].power_off()
        assert job.until_step(1)["s0"] == [1]
        job.close()
    finally:
        for server in servers:
            server.kill()
