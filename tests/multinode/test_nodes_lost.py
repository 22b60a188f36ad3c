"""Nodes that go: killed, frozen, agent alone, several, the controller's, in the middle of a restart. A spare takes exactly the hole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multinode.cluster import gone
from tests.multinode.conftest import Make

WOKEN_S = 5.0


@pytest.mark.parametrize("how", ["whole", "agent"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_node_is_replaced_by_the_spare(make: Make, how: str, rank: int) -> None:
    job = make(nproc=2, ttl_s=20).start("n0", "n1", "n2")
    before = job.until_step(0, 2)
    victim = job.holder(rank, 0)
    other = next(n for n in before if n != victim)
    (spare,) = {"n0", "n1", "n2"} - set(before)
    ranks = job[victim].ranks()
    assert len(ranks) == 2
    places = ", ".join(f"{job.holder(first, 0)}: {first}-{first + 1}" for first in (0, 2))
    assert f"cycle 0: ranks are on {places}" in job.story()
    if how == "whole":
        job[victim].power_off()
    else:
        job[victim].kill_agent()
        assert gone(ranks, 5), "the ranks die with their agent"
    after = job.until_step(1, within_s=15)  # far less than the lease time
    assert after == {other: before[other], spare: before[victim]}
    assert job.stored("job")["budgets"]["restarts"] == 0, "victims cost nothing"
    (decision,) = job.decisions()
    assert (decision["rule"], decision["decision"]) == (5, "replace")
    assert victim in decision["reason"]
    assert "the agent process is gone" in decision["reason"]


def test_a_change_of_controller_leaves_the_history_in_ft_state_as_it_was(make: Make) -> None:
    """When the run and its cycles began, and where it is, is not for a successor to make up."""

    def state() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((job.folder / "ft_state.json").read_text())
        return found

    job = make(ttl_s=3).start("n0", "n1", "s0")
    job.until_step(0)
    job.signal_rank(1)
    job.until_step(1, 3)
    before = job.until(
        lambda: seen if (seen := state())["run"]["cycle"] == 1 and seen["run"]["iteration"] and len(seen["cycles"]) == 2 else None,
        "cycle 1 in ft_state",
    )
    first = job.leader()
    job[first].kill_agent()
    job.until(lambda: (job.stored("leader") or {}).get("node") not in (None, first), "a successor")
    after = job.until(lambda: seen if (seen := state())["run"]["revision"] > before["run"]["revision"] else None, "its first word")
    assert after["run"]["started"] == before["run"]["started"]
    assert [c["start"] for c in after["cycles"][:2]] == [c["start"] for c in before["cycles"]]
    assert after["cycles"][0] == before["cycles"][0]
    assert after["cycles"][1]["recovery_s"] == before["cycles"][1]["recovery_s"]
    assert after["run"]["iteration"] is not None


def test_a_frozen_machine_is_replaced_and_when_it_wakes_its_ranks_are_gone_and_commit_nothing(make: Make) -> None:
    job = make(nproc=2).start("n0", "n1", "n2", save_every=1, commit_blindly=True)
    before = job.until_step(0, 2)
    victim = job.holder(0, 0)
    frozen = job[victim].freeze()
    ranks = job[victim].ranks()
    after = job.until_step(1, 3)
    assert victim not in after
    assert after[next(n for n in after if n not in before)] == before[victim]
    (decision,) = job.decisions()
    assert "its lease ended" in decision["reason"]
    assert "does not answer" in decision["reason"]
    job.until(lambda: [x for x in job.lines("commits.jsonl") if x["cycle"] == 1 and x["what"] == "commit"], "a commit of cycle 1")
    committed = [x for x in job.lines("commits.jsonl") if x["cycle"] == 0 and x["what"] == "commit"]
    job[victim].thaw(frozen)
    assert gone(ranks, WOKEN_S), "the ranks of the woken machine"
    assert [x for x in job.lines("commits.jsonl") if x["cycle"] == 0 and x["what"] == "commit"] == committed
    job.until(lambda: job.stored(f"nodes/{victim}"), "the woken node registers again, as a spare")
    assert job[victim].running()
    assert f"node {victim} has been given up while it was away (its lease ended " in job[victim].said()
    job.until_step(1, len(job.steps(0, 1)) + 5)
    assert job.cycle() == 1, "its return disturbs nobody"


def test_a_woken_node_is_the_spare_of_last_resort(make: Make) -> None:
    """It comes back, and takes a hole only once there is nobody better."""
    job = make().start("n0", "n1")
    job.until_step(0)
    job.add_spares("n2")
    frozen = job["n1"].freeze()
    assert job.until_step(1)["n2"] == [1]
    job["n1"].thaw(frozen)
    job.until(lambda: job.stored("nodes/n1") and (job.stored("reports/n1") or {}).get("reaped"), "it is back and ready")
    job.add_spares("zz")
    job["n0"].power_off()
    assert job.until_step(2) == {"zz": [0], "n2": [1]}, "n1 has failed before, though it sorts before zz"
    job["zz"].power_off()
    assert job.until_step(3) == {"n1": [0], "n2": [1]}


@pytest.mark.parametrize("which", ["controller", "rank 0", "both"])
def test_the_controllers_node_is_lost(make: Make, which: str) -> None:
    """The controller sits on a node with ranks: on rank 0's, on the other one, or it is not the one that dies."""
    job = make(ttl_s=20).start("n0", "n1")
    job.until_step(0)
    leader = job.leader()
    job.add_spares("n2")
    victims = {"controller": leader, "rank 0": "n0", "both": "n0" if leader == "n0" else leader}
    victim = victims[which]
    before = job.holders(0)
    job[victim].power_off()
    after = job.until_step(1, within_s=15)
    assert after["n2"] == before[victim]
    if victim == leader:
        assert job.leader() == "n2", "a spare by preference"
    assert job.stored("job")["budgets"]["restarts"] == 0


def test_two_nodes_at_once_with_two_spares(make: Make) -> None:
    job = make(nnodes=3, ttl_s=20).start("n0", "n1", "n2", "n3", "n4")
    before = job.until_step(0)
    victims = [job.holder(0, 0), job.holder(2, 0)]
    for victim in victims:
        job[victim].freeze()
    for victim in victims:
        job[victim].power_off()
    after = job.until_step(job.until(lambda: job.cycle() >= 1 and job.cycle(), "the next cycle"), within_s=30)
    survivor = job.holder(1, 0)
    last = job.cycle()
    after = job.until_step(last)
    assert after[survivor] == [1]
    assert not set(after) & set(victims)
    assert set(before) - set(victims) == {survivor}
    assert job.stored("job")["budgets"]["restarts"] == 0


def test_two_frozen_at_once_the_controller_among_them(make: Make) -> None:
    job = make(nnodes=2).start("n0", "n1", "n2", "n3")
    before = job.until_step(0)
    leader = job.leader()
    victims = {leader, job.holder(0, 0)} if leader != job.holder(0, 0) else {leader, job.holder(1, 0)}
    frozen = {v: job[v].freeze() for v in victims}
    after = job.until_step(1)
    assert not set(after) & victims
    assert {n: r for n, r in after.items() if n in before} == {n: r for n, r in before.items() if n not in victims}
    for victim, pids in frozen.items():
        job[victim].thaw(pids)
    job.until(lambda: all(job.stored(f"nodes/{v}") for v in victims), "both are back")
    job.until_step(1, len(job.steps(0, 1)) + 5)
    assert job.cycle() == 1
    assert all(job[v].running() and not job[v].ranks() for v in victims)


def test_the_spare_dies_while_taking_over(make: Make) -> None:
    plan = [{"cycle": 1, "do": "slow_start", "value": 3}]
    job = make(ttl_s=20).start("n0", "n1", "s0", "s1", plan=plan)
    before = job.until_step(0)
    victim = job.holder(1, 0)
    job[victim].power_off()
    job.until(lambda: len(job.life(1)) == 2, "cycle 1 begins")
    spare = job.holder(1, 1)
    job[spare].power_off()
    after = job.until_step(2, within_s=30)
    assert not set(after) & {victim, spare}
    assert after[job.holder(0, 0)] == [0]
    assert len(before) == 2
    assert job.stored("job")["budgets"]["restarts"] == 0


def test_a_second_fault_in_the_middle_of_a_restart(make: Make) -> None:
    """A rank crashes; while its cycle is being ended a node goes."""
    plan = [{"rank": 1, "cycle": 0, "at": 5, "do": "exit", "value": 3}]
    job = make(ttl_s=20, nproc=2).start("n0", "n1", "n2", plan=plan)
    job.until(lambda: job.lines("acts.jsonl"), "the crash")
    before = job.holders(0)
    victim = job.holder(2, 0)
    job[victim].power_off()
    last = job.until(lambda: job.cycle() if job.cycle() >= 1 and len(job.steps(0, job.cycle())) > 2 else None, "training goes on")
    after = job.until_step(last)
    assert victim not in after
    assert after[job.holder(0, 0)] == before[job.holder(0, 0)]
    assert job.stored("job")["budgets"]["restarts"] <= 1


def test_without_a_spare_it_waits_says_so_and_gives_up_with_75(make: Make) -> None:
    job = make().start("n0", "n1", options=["--spare-wait", "7"])
    job.until_step(0)
    job["n1"].power_off()
    said = job.until_said("n0", "waiting up to 7 s for a spare in place of n1")
    assert "the agent process is gone" in said
    assert job["n0"].wait() == 75
    said = job["n0"].said()
    assert "not enough healthy nodes after 7 s" in said
    assert "n1" in said.rsplit("not enough healthy nodes", 1)[1]
    assert said.count("still waiting") >= 1, "who is missing, every few seconds"
    assert job.verdict()["exit_code"] == 75


def test_a_new_agent_takes_the_place_of_its_dead_predecessor(make: Make) -> None:
    """No spare: the machine is repaired and its agent started again under the same id."""
    job = make().start("n0", "n1")
    before = job.until_step(0)
    job["n1"].power_off()
    job.start("n1")
    assert job.until_step(1) == before
    assert job.stored("job")["budgets"]["restarts"] == 0


def test_a_crash_elsewhere_is_still_charged(make: Make) -> None:
    """The opposite of a victim: with all nodes there, the rank that failed first is at fault, and budgets survive the controllers."""
    plan = [{"rank": r, "cycle": r, "at": 10 * (r + 1), "do": "exit", "value": 3} for r in (0, 1)]
    job = make(ttl_s=20).start("n0", "n1", options=["--max-restarts", "1"], plan=plan, save_every=1)
    job.until_step(1)
    leader = job.leader()
    assert job.stored("job")["budgets"]["restarts"] == 1
    spare = "n2"
    job.start(spare, options=["--max-restarts", "1"], plan=plan, save_every=1)
    other = next(n for n in ("n0", "n1") if n != leader)
    assert job[other].wait() == 3
    assert job[leader].wait() == 3
    assert "--max-restarts 1 is used up" in job.verdict()["reason"]
    assert job.verdict()["first_cause"]["rank"] == 1
