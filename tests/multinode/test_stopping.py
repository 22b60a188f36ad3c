"""Stop signals over several nodes."""

from __future__ import annotations

import signal

import pytest

from tests.multinode.conftest import Make


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
