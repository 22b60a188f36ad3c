"""Leaving politely: is the job meant, or a node? Rules 1 and 2 on the two machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core.actions import KillRanks, Leave, Reap, Say, SignalRanks
from ft_launcher.core.events import (
    DrainAsked,
    JobChanged,
    NodeJoined,
    NodeLost,
    RankEnded,
    RanksReaped,
    RanksStarted,
    SignalArrived,
    StandbyOpened,
    StopUnheard,
    Timer,
    TimerFired,
    ZygoteStarted,
)
from ft_launcher.core.evidence import Address, NodeInfo, RankExit
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
    assert "goes as soon as a spare can take its place" in job.said()
    job.join("s1", port=7001)
    assert job.state.phase is Phase.DRAINING, "it goes as soon as a spare has come"
    assert set(job.state.leaving) == {"s0", "n1"}


def test_a_drained_node_that_comes_back_is_a_node_like_any_other() -> None:
    job = cluster(spares=1)
    job.report("n1", signals=(15,))
    fire(job, Timer.DRAIN)
    for node in ("n0", "n1"):
        job.clear(node)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s0")
    job.names = ["n0", "s0"]
    job.forked()
    job.send(NodeLost("n1", "it has left"))
    job.send(NodeJoined(NodeInfo("n1", "127.0.0.1:1", 2, 0, incarnation="second")))
    job.reports.pop("n1")
    job.report("n1", reaped=True, standby=Address("127.0.0.1", 9), incarnation="second")
    job.send(NodeLost("s0", "gone"))
    job.clear("n0")
    assert job.state.placement.nodes == ("n0", "n1")
    assert [d.rule for d in job.decisions()] == [2, 5]
    job.names = ["n0", "n1"]
    for name in job.names:
        job.reports[name] = replace(job.reports[name], cycle=job.state.cycle, exits={}, reaped=False)
        job.report(name, started=True)
    for node, rank in (("n0", 0), ("n0", 1), ("n1", 2), ("n1", 3)):
        job.exit(node, rank, code=0)
    for node in job.names:
        job.clear(node)
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 0, job.state.verdict.reason


def test_a_spare_that_is_still_preparing_counts() -> None:
    job = cluster(spares=0)
    job.send(NodeJoined(NodeInfo("s0", "127.0.0.1:1", 2, 0)))
    job.report("n1", signals=(15,))
    assert job.state.phase is Phase.RUNNING
    fire(job, Timer.DRAIN)
    assert list(job.state.leaving) == ["n1"]


def test_two_are_to_go_and_there_is_one_spare() -> None:
    job = cluster(nodes=3, spares=1)
    job.send(DrainAsked("n1"))
    job.send(DrainAsked("n2"))
    assert list(job.state.leaving) == ["n1"], "the other one waits for the next spare"


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


def test_ranks_that_die_of_the_signal_themselves_are_no_crash() -> None:
    """A machine that shuts down signals every process: its ranks may be gone before it is clear that only this node is meant."""
    job = cluster()
    job.report("n1", signals=(15,))
    job.exit("n1", 2, signal=15)
    assert job.state.phase is Phase.ENDING
    for node in ("n0", "n1"):
        job.clear(node)
    assert job.state.phase is Phase.PAUSED, "the others may be told, too"
    fire(job, Timer.DRAIN)
    assert job.state.placement is not None
    assert (job.state.phase, job.state.placement.nodes) == (Phase.RUNNING, ("n0", "s0"))
    assert (job.state.budgets.restarts, job.state.budgets.node_failures) == (0, {})


def test_the_death_of_a_rank_and_the_signal_in_one_report_leave_the_others_their_grace() -> None:
    job = cluster(nodes=1, spares=0)
    exits = {0: RankExit(0, None, 15, failed_ns=1, order=0)}
    job.report("n0", signals=(15,), exits=exits)
    assert job.state.phase is Phase.DRAINING


def test_ranks_that_had_left_before_they_were_asked_are_not_waited_for() -> None:
    job = cluster()
    job.report("n1", signals=(15,))
    for rank in (2, 3):
        job.exit("n1", rank, code=0)
    fire(job, Timer.DRAIN)
    assert job.state.phase is Phase.DRAINING
    fire(job, Timer.SETTLE)
    assert job.state.phase is Phase.ENDING


def test_a_node_that_never_started_the_cycle_or_is_lost_is_not_waited_for() -> None:
    job = cluster(spares=0)
    job.report("n0", signals=(15,))
    assert job.state.phase is Phase.DRAINING
    job.report("n1", reaped=True, started=False)
    job.exit("n0", 0, code=0)
    assert job.state.phase is Phase.DRAINING
    job.send(NodeLost("n0", "its agent is gone"))
    assert job.state.phase is Phase.DONE
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 143


def unheard(*signals: int, running: bool = True) -> tuple[NodeMachine, list[Any]]:
    """A node whose signals nobody hears of."""
    job = cluster()
    node = NodeMachine(NodeOptions("n1", 0))
    for event in (ZygoteStarted(), StandbyOpened(Address("127.0.0.1", 1000))):
        node.handle(0, event)
    if running:
        node.handle(1, JobChanged(job.state, 1))
        node.handle(1, RanksStarted(0))
    for number in signals:
        node.handle(2, SignalArrived(number))
    return node, node.handle(3, StopUnheard())


def test_who_cannot_tell_anybody_passes_the_signal_on_and_leaves_when_its_ranks_have() -> None:
    node, actions = unheard(15)
    assert actions == [SignalRanks(0, 15, [2, 3])]
    assert node.handle(4, StopUnheard()) == [], "once"
    node.handle(5, RankEnded(0, 2, 0, None, 5))
    assert Reap(0) in node.handle(6, RankEnded(0, 3, 0, None, 6))
    assert Leave(143) in node.handle(7, RanksReaped(0, (), 0.1))


@pytest.mark.parametrize("more", [SignalArrived(15), StopUnheard(overdue=True)])
def test_a_second_signal_or_the_end_of_the_grace_ends_those_who_stay(more: Any) -> None:
    node, _ = unheard(15)
    actions = [*node.handle(4, more), *node.handle(4, StopUnheard())]
    assert KillRanks(0, [2, 3]) in actions


def test_who_waits_and_cannot_tell_anybody_leaves() -> None:
    _, actions = unheard(2, running=False)
    assert Leave(130) in actions
    assert "could not be told" in next(a.text for a in actions if isinstance(a, Say))
    _, actions = unheard(running=False)
    assert actions == [], "nobody has asked it to"


def test_a_word_of_the_job_takes_the_decision_back() -> None:
    node, _ = unheard(15)
    job = cluster()
    node.handle(4, JobChanged(job.state.but(phase=Phase.DRAINING, stop_signal=15), 2))
    for rank in (2, 3):
        assert Reap(0) not in node.handle(5, RankEnded(0, rank, 0, None, 5)), "the job says when"
