"""Stop signals over several nodes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.multinode.cluster import PATIENCE_S, SAVE_S, Cluster, gone
from tests.multinode.conftest import Make
from tests.store.etcd_server import EtcdServer

LONG_S = PATIENCE_S * 10
"""No test waits that long: who ends before has not waited for it."""


def take_away(etcd: EtcdServer, how: str) -> None:
    if how == "frozen":
        etcd.pause()
    else:
        etcd.kill()


def stop_all(job: Cluster, number: int = signal.SIGTERM) -> dict[str, int]:
    """All at once, as a scheduler does; the codes."""
    began = time.monotonic()
    nodes = [n for n in job.nodes if job[n].running()]
    for node in nodes:
        job[node].process.send_signal(number)
    codes = {n: job[n].wait() for n in nodes}
    print("ALL ENDED", time.monotonic() - began)
    return codes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_agents_are_told_to_stop(make: Make, number: int) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    job.add_spares("s0")
    for node in ("s0", "n0", "n1"):
        job[node].process.send_signal(number)
    assert {n: job[n].wait() for n in ("n0", "n1", "s0")} == {"n0": 128 + number, "n1": 128 + number, "s0": 0}, job.story()
    assert job.verdict()["outcome"] == "stopped"


def test_a_spare_that_is_told_to_stop_leaves_and_nobody_notices(make: Make) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    job.add_spares("s0", "s1")
    job["s0"].terminate()
    assert job["s0"].wait() == 0
    assert "holds no ranks and leaves; the job goes on" in job["s0"].said()
    job.until_step(0, len(job.steps(0, 0)) + 5)
    job["n1"].power_off()
    assert job.until_step(1) == {"n0": [0], "s1": [1]}


def test_the_spare_that_is_the_controller_leaves(make: Make) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    job.add_spares("s0")
    job[job.leader()].power_off()
    job.until_step(1)
    job.until(lambda: job.stored("leader"), "a controller")
    job.add_spares("t0", "t1")
    first = job.leader()
    if first.startswith("t"):
        job[first].terminate()
        assert job[first].wait() == 0
    second = job.until(lambda: (job.stored("leader") or {}).get("node"), "a successor")
    job[job.holder(0, 1)].power_off()
    job.until_step(2)
    assert second


def test_agents_that_wait_for_others_stop_with_the_signal(make: Make) -> None:
    job = make(nnodes=3).start("n0", "n1")
    job.until(lambda: all((job.stored(f"reports/{n}") or {}).get("standby") for n in ("n0", "n1")), "two are ready")
    for node in ("n0", "n1"):
        job[node].terminate()
    assert {job[n].wait() for n in ("n0", "n1")} == {143}


def test_a_stop_while_waiting_for_a_spare(make: Make) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    job["n1"].power_off()
    job.until_said("n0", "for a spare in place of n1")
    job["n0"].terminate()
    assert job["n0"].wait() == 143


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_all_stop_while_the_store_is_away_and_their_ranks_leave_first(make: Make, etcd: EtcdServer, how: str) -> None:
    job = make([etcd.endpoint], nproc=2)
    job.options = ("--store-timeout", f"{LONG_S:g}", "--term-grace", f"{LONG_S:g}")
    job.conf["plan"] = [{"at": 1, "do": "leave_on_term", "value": 0, "save_s": SAVE_S}]
    job.start("n0", "n1")
    job.until(lambda: len(job.lines("acts.jsonl")) == 4, "handlers are there")
    job.add_spares("s0")
    ranks = [pid for n in ("n0", "n1") for pid in job[n].ranks()]
    take_away(etcd, how)
    assert stop_all(job) == {"n0": 143, "n1": 143, "s0": 0}, job.story()
    assert sorted(x["rank"] for x in job.lines("term.jsonl")) == [0, 1, 2, 3], "each of them once"
    assert gone(ranks, 5)
    assert job.cycle() == 0


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_who_waits_for_others_stops_though_the_store_is_away(make: Make, etcd: EtcdServer, how: str) -> None:
    job = make([etcd.endpoint], nnodes=3)
    job.options = ("--store-timeout", f"{LONG_S:g}", "--join-wait", f"{LONG_S:g}")
    job.start("n0", "n1")
    job.until(lambda: all((job.stored(f"reports/{n}") or {}).get("standby") for n in ("n0", "n1")), "two are ready")
    take_away(etcd, how)
    assert stop_all(job) == {"n0": 143, "n1": 143}, job.story()


def test_who_waits_for_a_spare_stops_though_the_store_is_away(make: Make, etcd: EtcdServer) -> None:
    job = make([etcd.endpoint])
    job.options = ("--store-timeout", f"{LONG_S:g}", "--spare-wait", f"{LONG_S:g}")
    job.start("n0", "n1")
    job.until_step(0)
    job["n1"].power_off()
    job["n1"].wait()
    job.until_said("n0", "for a spare in place of n1")
    take_away(etcd, "frozen")
    assert stop_all(job) == {"n0": 143}, job.story()


def test_who_waits_for_the_store_at_the_start_stops_and_overlooks_a_notice(make: Make, etcd: EtcdServer) -> None:
    """Slurm and Kubernetes send USR1 ahead of TERM: before there are ranks, nobody is to be told."""
    job = make([etcd.endpoint])
    job.options = ("--store-timeout", f"{LONG_S:g}")
    take_away(etcd, "frozen")
    job.start("n0")
    job.until(lambda: handles(job["n0"].pid, signal.SIGTERM), "it catches signals")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job["n0"].process.send_signal(number)
    assert stop_all(job) == {"n0": 143}, job.story()
    assert "stopped by SIGTERM while joining" in job["n0"].said()


def handles(pid: int, number: int) -> bool:
    """The process has a handler for this signal."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
