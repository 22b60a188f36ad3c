"""The same run id again, whatever the former launch left in the store; and other runs on the same store."""

from __future__ import annotations

import time

import pytest

from tests.multinode.conftest import Make


def kill_all(job) -> None:  # type: ignore[no-untyped-def]
    for node in job.all:
        node.power_off()
        node.process.wait()


@pytest.mark.parametrize("nodes", [("n0", "n1"), ("m0", "m1")])
def test_again_after_kill_9_of_everything(make: Make, nodes: tuple[str, str]) -> None:
    """With other arguments, which a job that still lived would refuse; the same node ids, or others."""
    job = make().start("n0", "n1", plan=[{"rank": 1, "cycle": 0, "at": 3, "do": "exit", "value": 3}])
    job.until_step(1)
    kill_all(job)
    job.start(*nodes, steps=99_999)
    job.until(lambda: len({x["pid"] for x in job.life() if x["at"]}) >= 6, "two ranks more have begun")
    begun = job.life()[-2:]
    assert {x["node"] for x in begun} == set(nodes)
    state = job.stored("job") or {}
    assert state["generation"] == 1
    assert state["budgets"]["restarts"] == 0
    assert (job.folder / "logs" / f"{job.run_id}.1").is_dir()


@pytest.mark.parametrize("code", [0, 5])
def test_again_after_success_and_after_failure(make: Make, code: int) -> None:
    plan = [{"rank": 1, "at": 2, "do": "exit", "value": code}] if code else []
    job = make().start("n0", "n1", options=["--max-restarts", "0"], steps=4, plan=plan)
    assert {job[n].wait() for n in ("n0", "n1")} == {code}
    job.start("n0", "n1", options=["--max-restarts", "0"], steps=8)
    assert {n: job[n].wait() for n in ("n0", "n1")} == {"n0": 0, "n1": 0}, job.story()
    assert job.verdict(1)["outcome"] == "finished"
    assert job.verdict(0)["exit_code"] == code, "what the first launch left is still there to be read"


def test_a_late_node_of_a_finished_run_learns_so_at_once(make: Make) -> None:
    job = make(ttl_s=20).start("n0", "n1", steps=2)
    assert {job[n].wait() for n in ("n0", "n1")} == {0}
    began = time.monotonic()
    job.start("n2", steps=2)
    assert job["n2"].wait() == 0
    assert "has ended already (finished: all ranks finished)" in job["n2"].said()
    assert time.monotonic() - began < 20, "less than a lease time"
    assert (job.stored("job") or {})["generation"] == 0


def test_a_node_that_comes_back_when_its_run_has_just_finished_does_not_begin_another(make: Make) -> None:
    """Its agent was killed, and is started again: it waits for its predecessor's lease while the others finish."""
    job = make(ttl_s=4).start("n0", "n1", steps=30)
    job.until_step(0)
    job.set_pace(2)
    job.add_spares("s0", steps=30)
    job["s0"].power_off()
    job.start("s0", steps=30)
    job.until_said("s0", "node id s0 is registered already")
    job.finish()
    assert {job[n].wait() for n in ("n0", "n1")} == {0}
    assert job["s0"].wait() == 0
    assert "has ended already (finished: all ranks finished)" in job["s0"].said()
    assert (job.stored("job") or {})["generation"] == 0


def test_two_launches_of_a_scheduler(make: Make) -> None:
    """Slurm's job id tells one launch from the next: a late node of a launch that has ended is late, a requeue is a new generation."""
    job = make()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    again = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    job.start("n0", "n1", env=slurm)
    job.until_step(0)
    kill_all(job)
    job.start("n0", "n1", env=again, steps=3)
    assert {n: job[n].wait() for n in ("n0", "n1")} == {"n0": 0, "n1": 0}, job.story()
    assert (job.stored("job") or {})["generation"] == 1
    job.start("n1", env=again, steps=3)
    assert job["n1"].wait() == 0
    assert "has ended already" in job["n1"].said()
    assert (job.stored("job") or {})["generation"] == 1


def test_a_second_launch_while_the_first_runs_is_refused(make: Make) -> None:
    job = make(ttl_s=3).start("n0", "n1", env={"SLURM_JOB_ID": "7"})
    job.until_step(0)
    job.start("x0", env={"SLURM_JOB_ID": "8"})
    assert job["x0"].wait() == 2
    assert "launch 7.0 of it still runs" in job["x0"].said()
    assert job.cycle() == 0


def test_two_jobs_on_one_store_do_not_meet(make: Make) -> None:
    first = make(run_id="same").start("n0", "n1")
    second = make(run_id="same2", nproc=2).start("n0", "n1")
    first.until_step(0)
    second.until_step(0)
    first["n1"].power_off()
    first.start("n1")
    first.until_step(1)
    second.until_step(0, len(second.steps(0, 0)) + 5)
    assert second.cycle() == 0
    assert "n1" not in second["n0"].said().split("cycle 0 starts")[-1]


def test_a_frozen_agent_of_an_older_generation_leaves_and_its_ranks_with_it(make: Make) -> None:
    """All of a launch is gone but one machine, which sleeps; the next launch runs when it wakes up."""
    job = make().start("n0", "n1", commit_blindly=True, save_every=1)
    job.until_step(0, 3)
    sleeper = job["n0"]
    frozen = sleeper.freeze()
    ranks = sleeper.ranks()
    job["n1"].power_off()
    job.start("m0", "m1", steps=99_999, save_every=1)
    job.until(lambda: {x["node"] for x in job.life()} >= {"m0", "m1"}, "the next launch")
    assert (job.stored("job") or {})["generation"] == 1
    sleeper.thaw(frozen)
    assert sleeper.wait(10) in (0, 1)
    assert "launched anew (generation 1)" in sleeper.said()
    assert not [p for p in ranks if p in sleeper.tree()]
    before = len(job.lines("commits.jsonl"))
    job.until(lambda: len(job.lines("commits.jsonl")) > before + 3, "the new launch goes on")
    assert {x["fence"] for x in job.lines("commits.jsonl")[before:]} == {max(x["fence"] for x in job.lines("commits.jsonl"))}
    assert job["m0"].running()
