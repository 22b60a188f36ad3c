"""Leaving politely: is the job meant, or a node? Rules 1 and 2 on the two machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core.actions import Leave, SignalRanks
from ft_launcher.core.events import (
    DrainAsked,
    JobChanged,
    RankEnded,
    RanksReaped,
    RanksStarted,
    StandbyOpened,
    Timer,
    TimerFired,
    ZygoteStarted,
)
from ft_launcher.core.evidence import Address
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.state import JobState, Phase
from tests.core.machines import Job


def cluster(nodes: int = 2, spares: int = 1, **options: Any) -> Job:
    job = Job(nodes=nodes, nproc=2, can_join=True, **options)
    job.start()
    for i in range(spares):
        job.join(f"s{i}", port=7000 + i)
    return job


def fire(job: Job, timer: Timer) -> None:
    assert timer in job.timers(), job.timers()
    job.send(TimerFired(timer, job.state.cycle))


def test_one_node_of_two_with_a_spare_is_drained_and_the_spare_takes_its_place() -> None:
    job = cluster()
    job.report("n1", signals=(15,))
    assert job.state.phase is Phase.RUNNING, "the others may be told, too"
    fire(job, Timer.DRAIN)
    assert job.state.phase is Phase.DRAINING
    assert list(job.state.leaving) == ["n1"]
    assert job.state.stop_signal is None
    for rank in (2, 3):
        job.exit("n1", rank, code=0)
    assert job.state.phase is Phase.DRAINING, "the others may be leaving with them"
    for rank in (0, 1):
        job.exit("n0", rank, code=0)
    assert job.state.phase is Phase.ENDING
    job.clear("n0")
    job.clear("n1")
    assert job.state.phase is Phase.RUNNING, "they have left, not finished"
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s0")
    assert job.state.budgets.restarts == 0
    assert job.state.budgets.stuck_cycles == 0
    assert [d.rule for d in job.decisions()] == [2]


def test_all_nodes_within_two_seconds_mean_the_job_also_with_spares() -> None:
    job = cluster(spares=2)
    job.report("n1", signals=(15,))
    job.report("n0", signals=(15,))
    assert job.state.phase is Phase.DRAINING
    assert job.state.stop_signal == 15
    assert not job.state.leaving


@pytest.mark.parametrize(("nodes", "spares"), [(1, 1), (2, 0)])
def test_one_node_alone_or_no_spare_means_the_job_at_once(nodes: int, spares: int) -> None:
    job = cluster(nodes, spares)
    job.report("n0", signals=(15,))
    assert job.state.phase is Phase.DRAINING
    assert job.state.stop_signal == 15


def test_the_other_nodes_signal_in_the_middle_turns_it_into_the_end_of_the_job() -> None:
    job = cluster()
    job.report("n1", signals=(15,))
    fire(job, Timer.DRAIN)
    job.report("n0", signals=(15,))
    assert job.state.stop_signal == 15
    job.clear("n0")
    job.clear("n1")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 143


def test_a_crash_elsewhere_ends_the_wait_and_costs_nothing() -> None:
    job = cluster()
    job.report("n1", signals=(15,))
    fire(job, Timer.DRAIN)
    job.exit("n0", 0, code=1)
    assert job.state.phase is Phase.ENDING
    job.clear("n0")
    job.clear("n1")
    assert job.state.budgets.restarts == 0
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s0")


def test_a_second_signal_and_the_end_of_the_grace_end_it() -> None:
    for how in ("signal", "grace"):
        job = cluster()
        job.report("n1", signals=(15,))
        fire(job, Timer.DRAIN)
        if how == "signal":
            job.report("n1", signals=(15, 15))
        else:
            fire(job, Timer.TERM_GRACE)
        assert job.state.phase is Phase.ENDING, how


def test_others_get_a_moment_once_the_leavers_are_gone() -> None:
    job = cluster()
    job.report("n1", signals=(15,))
    fire(job, Timer.DRAIN)
    for rank in (2, 3):
        job.exit("n1", rank, code=1)
    assert job.state.phase is Phase.DRAINING
    fire(job, Timer.SETTLE)
    assert job.state.phase is Phase.ENDING


def test_between_two_cycles_its_place_is_free_at_once() -> None:
    job = cluster(spares=0)
    job.exit("n0", 0, code=1)
    job.clear("n0")
    job.report("n1", reaped=False)
    job.join("s0", port=7000)
    job.report("n1", signals=(15,), reaped=True, standby=Address("127.0.0.1", 9))
    assert job.state.phase is Phase.PAUSED
    fire(job, Timer.DRAIN)
    assert job.state.phase is Phase.RUNNING
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s0")


def test_drain_asked_of_a_spare_of_a_holder_and_without_any_spare() -> None:
    job = cluster(spares=1)
    job.send(DrainAsked("s0"))
    assert list(job.state.leaving) == ["s0"]
    job.send(DrainAsked("n1"))
    assert job.state.phase is Phase.RUNNING, "s0 is no spare any more"
    assert "no spare" in job.said()
    job.join("s1", port=7001)
    assert job.state.phase is Phase.DRAINING, "it goes as soon as a spare has come"
    assert set(job.state.leaving) == {"s0", "n1"}


def test_drain_asked_of_an_unknown_node_changes_nothing() -> None:
    job = cluster()
    before = job.state
    job.send(DrainAsked("nobody"))
    assert job.state == before


def test_the_node_passes_the_signal_on_to_its_own_ranks_once_and_leaves_with_0() -> None:
    job = cluster()
    node = NodeMachine(NodeOptions("n1", 0))
    other = NodeMachine(NodeOptions("n0", 0))
    for machine in (node, other):
        machine.handle(0, ZygoteStarted())
        machine.handle(0, StandbyOpened(Address("127.0.0.1", 1000)))

    def both(state: JobState, revision: int) -> tuple[list[Any], list[Any]]:
        return node.handle(1, JobChanged(state, revision)), other.handle(1, JobChanged(state, revision))

    both(job.state, 1)
    for machine in (node, other):
        machine.handle(1, RanksStarted(0))
    job.report("n1", signals=(15,))
    fire(job, Timer.DRAIN)
    mine, others = both(job.state, 2)
    assert [a for a in mine if isinstance(a, SignalRanks)] == [SignalRanks(0, 15, [2, 3])]
    assert not [a for a in others if isinstance(a, SignalRanks)]
    ending = replace(job.state, phase=Phase.ENDING)
    for rank in (2, 3):
        node.handle(2, RankEnded(0, rank, 0, None, 5))
    both(ending, 3)
    node.handle(3, RanksReaped(0, (), 0.1))
    mine, _ = both(replace(ending, phase=Phase.PAUSED), 4)
    assert Leave(0) in mine
