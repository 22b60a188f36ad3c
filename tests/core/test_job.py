"""The job machine: a cycle's life, told event by event."""

from __future__ import annotations

import itertools
import typing

import pytest

from ft_launcher.core import job as job_module
from ft_launcher.core.actions import Commit, RecordRecovery, SetTimer
from ft_launcher.core.events import JobEvent, NodeJoined, NodeLost, ProgressSeen, ReportReceived, Timer, TimerFired
from ft_launcher.core.evidence import Address, NodeInfo, NodeReport, RankError, RankProgress
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Outcome, Phase
from tests.core.machines import Job


def test_the_transition_table_is_total() -> None:
    events = typing.get_args(JobEvent)
    assert set(job_module.TRANSITIONS) == set(itertools.product(Phase, events))
    for cell in job_module.TRANSITIONS.values():
        assert cell in ("ignore_stale", "impossible") or callable(getattr(JobMachine, cell))


def test_one_node_starts_when_it_is_ready() -> None:
    job = Job()
    job.send(NodeJoined(NodeInfo("n0", "a", 4, 0)))
    assert job.state.phase is Phase.FORMING
    job.report("n0", reaped=True)
    assert job.state.phase is Phase.FORMING, "no store listens yet"
    job.report("n0", reaped=True, standby=Address("h", 7))
    assert (job.state.phase, job.state.cycle, job.state.master) == (Phase.RUNNING, 0, Address("h", 7))


def test_nodes_are_ordered_naturally_and_all_are_waited_for() -> None:
    job = Job(nodes=2)
    job.join("n10")
    assert job.state.phase is Phase.FORMING
    job.join("n9")
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n9", "n10")


def test_crash_ends_the_cycle_at_once_and_restarts_when_acknowledged() -> None:
    job = Job()
    job.start()
    job.tick(5)
    job.exit("n0", 2, signal=9)
    assert job.state.phase is Phase.ENDING
    assert "rank 2 (tp=0,cp=0,dp=1,pp=0; node n0 slot 2) was killed by SIGKILL; ending the other 3 ranks" in job.said()
    job.clear("n0", iteration=41, client=True)
    assert (job.state.phase, job.state.cycle, job.state.budgets.restarts) == (Phase.RUNNING, 1, 1)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0",)
    (decision,) = job.decisions()
    assert (decision.rule, decision.cause, decision.decision) == (10, "crash", "restart")
    assert decision.culprit is not None
    assert decision.culprit["rank"] == 2
    assert "at iteration 41" in decision.reason
    assert "(restart 1 of 3)" in decision.reason


def test_recovery_is_told_twice_forked_and_stepping() -> None:
    job = Job()
    job.start()
    job.exit("n0", 2, signal=9)
    job.tick(0.05)
    job.clear("n0")
    job.tick(0.05)
    job.forked()
    job.tick(0.1)
    job.send(ProgressSeen("n0", 1, 12, 1))
    found = [a for a in job.actions if isinstance(a, RecordRecovery)]
    assert [(round(r.seconds, 3), r.complete, r.iteration) for r in found] == [(0.1, False, None), (0.2, True, 12)]


def test_restart_waits_for_a_store() -> None:
    job = Job()
    job.start()
    job.exit("n0", 2, signal=9)
    job.clear("n0", standby=None)
    assert job.state.phase is Phase.PAUSED
    job.report("n0", standby=Address("h", 9))
    assert (job.state.phase, job.state.master) == (Phase.RUNNING, Address("h", 9))


def test_budget_is_used_up_and_the_ranks_own_code_is_passed_on() -> None:
    job = Job(max_restarts=2)
    job.start()
    for _ in range(3):
        job.exit("n0", 1, code=7)
        job.tick(20)
        job.clear("n0")
        if job.state.phase is Phase.PAUSED:
            job.tick(60)
            job.send(TimerFired(Timer.BACKOFF, job.state.cycle))
        if job.state.phase is Phase.RUNNING:
            job.forked()
            job.tick(20)
    assert job.state.phase is Phase.DONE
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.FAILED, 7)
    assert "--max-restarts 2 are used up" in job.state.verdict.reason


@pytest.mark.parametrize(
    ("code", "signal", "expected"), [(7, None, 7), (69, None, 1), (75, None, 1), (93, None, 1), (None, 11, 139), (2, None, 2)]
)
def test_exit_codes(code: int | None, signal: int | None, expected: int) -> None:
    job = Job(max_restarts=0)
    job.start()
    job.exit("n0", 1, code=code, signal=signal)
    job.clear("n0", steps=3, client=True)
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == expected


def test_repeated_failures_without_progress_back_off() -> None:
    job = Job(max_restarts=10, no_progress_cycles=0)
    job.start()
    delays = []
    for _ in range(5):
        job.exit("n0", 1, code=1)
        actions = job.clear("n0")
        wait = [a.delay_s for a in actions if isinstance(a, SetTimer) and a.timer is Timer.BACKOFF]
        delays.append(wait[0] if wait else 0.0)
        if wait:
            job.tick(wait[0])
            job.send(TimerFired(Timer.BACKOFF, job.state.cycle))
        job.forked()
        job.tick(1)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_no_progress_stops_with_93() -> None:
    job = Job(max_restarts=10)
    job.start()
    for iteration in (50, 60, 60, 60, 55):
        if job.state.phase is Phase.DONE:
            break
        job.exit("n0", 1, code=1, error=RankError("ValueError: x"))
        job.clear("n0", iteration=iteration, client=True)
        if job.state.phase is Phase.PAUSED:
            job.tick(60)
            job.send(TimerFired(Timer.BACKOFF, job.state.cycle))
        if job.state.phase is Phase.RUNNING:
            job.forked()
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.NO_PROGRESS, 93)
    assert "3 cycles in a row without going beyond iteration 60" in job.state.verdict.reason
    assert "ValueError: x" in job.state.verdict.reason


@pytest.mark.parametrize(
    "message", ["ModuleNotFoundError: No module named 'megatro'", "SyntaxError: invalid syntax", "FileNotFoundError: [Errno 2] data.bin"]
)
def test_bad_start_stops_at_once(message: str) -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1, error=RankError(message))
    job.clear("n0")
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code, job.state.budgets.restarts) == (Outcome.FAILED, 1, 0)
    assert message in job.state.verdict.reason


def test_the_same_error_after_a_step_is_a_crash() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1, error=RankError("FileNotFoundError: gone"))
    job.clear("n0", steps=1, client=True)
    assert job.state.phase is Phase.RUNNING


def test_a_victim_is_not_the_first_cause() -> None:
    job = Job()
    job.start()
    job.exit("n0", 0, code=1, stamp="RuntimeError: Connection closed by peer", failed_ns=1_000_000_000)
    assert "rank 0" in job.state.reason, "all that is known so far"
    job.exit("n0", 3, code=5, failed_ns=1_200_000_000)
    job.clear("n0")
    (decision,) = job.decisions()
    assert decision.culprit is not None
    assert decision.culprit["rank"] == 3
    assert "1 other rank failed because of it" in decision.reason


def test_a_killed_rank_comes_before_peers_that_stamped_while_it_died() -> None:
    job = Job()
    job.start()
    job.exit("n0", 0, code=1, stamp="ValueError: nan", failed_ns=1_000_000_000)
    job.exit("n0", 3, signal=9, failed_ns=1_010_000_000)
    job.clear("n0")
    assert job.decisions()[0].culprit["rank"] == 3  # type: ignore[index]


LOST_PEER = "RuntimeError: [pair.cc:538] Connection closed by peer [10.0.0.7]:34561"


def test_the_rank_that_left_with_0_while_others_were_at_work_is_the_cause_of_what_they_say() -> None:
    job = Job()
    job.start()
    job.exit("n0", 2, code=0, failed_ns=1_000_000_000)
    for rank in (0, 1, 3):
        job.exit("n0", rank, code=1, stamp=LOST_PEER, failed_ns=1_005_000_000 + rank)
    job.clear("n0", iteration=41)
    decision = job.decisions()[0]
    assert decision.cause == "crash"
    assert decision.culprit["rank"] == 2  # type: ignore[index]
    assert (
        "rank 2 (tp=0,cp=0,dp=1,pp=0; node n0 slot 2) left with exit 0 at iteration 41 while others were at work; 3 other ranks failed because of it, first rank 0"
        in decision.reason
    )
    assert job.state.budgets.restarts == 1


def test_without_restarts_left_the_code_is_that_of_who_failed() -> None:
    job = Job(max_restarts=0)
    job.start()
    job.exit("n0", 2, code=0, failed_ns=1_000_000_000)
    job.exit("n0", 1, code=7, stamp=LOST_PEER, failed_ns=1_005_000_000)
    job.clear("n0")
    verdict = job.state.verdict
    assert verdict is not None
    assert verdict.exit_code == 7
    assert verdict.first_cause is not None
    assert (verdict.first_cause["rank"], verdict.first_cause["exit"], verdict.first_cause["error"]) == (2, 0, None)


@pytest.mark.parametrize(
    "exits",
    [
        [(2, 0, None, 9), (0, 1, LOST_PEER, 7)],
        [(2, 0, None, 5), (0, 1, "ValueError: nan", 7)],
    ],
    ids=["it left afterwards", "the failure has a reason of its own"],
)
def test_a_rank_that_left_with_0_is_not_blamed_without_reason(exits: list[tuple[int, int, str | None, int]]) -> None:
    job = Job()
    job.start()
    for rank, code, stamp, at_s in exits:
        job.exit("n0", rank, code=code, failed_ns=at_s * 1_000_000_000, **({"stamp": stamp} if stamp else {}))
    job.clear("n0")
    decision = job.decisions()[0]
    assert decision.culprit["rank"] == 0  # type: ignore[index]
    assert "1 rank left with exit 0 (2)" in decision.reason


def test_where_several_left_with_0_nobody_is_named_for_it_may_be_the_jobs_end() -> None:
    """A broken connection says that a peer is gone, and of all who could be meant none is known to have left too early."""
    job = Job(max_restarts=1)
    job.start()
    for cycle in (0, 1):
        for rank in (2, 3):
            job.exit("n0", rank, code=0, failed_ns=5_000_000_000)
        job.exit("n0", 0, code=1, stamp=LOST_PEER, failed_ns=7_000_000_000)
        job.clear("n0", progress={rank: RankProgress(41 + cycle, 41, None, 0.5, client=True) for rank in range(4)})
        job.forked()
    for decision in job.decisions():
        assert decision.culprit is None
        assert "ranks 2, 3 left with exit 0; 1 other lost its peers: rank 0 (" in decision.reason
        assert "whether those left too early cannot be told" in decision.reason
    assert not job.state.budgets.node_failures
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.exit_code, verdict.first_cause) == (1, None)


def test_of_several_that_left_with_0_the_first_inside_a_section_is_the_cause() -> None:
    """All ranks of a node leave; on the other all connections break."""
    job = Job(nodes=2, nproc=2)
    job.start()
    for rank in (2, 3):
        job.exit("n1", rank, code=0, failed_ns=1_000_000_000)
    for rank in (0, 1):
        job.exit("n0", rank, code=1, stamp=LOST_PEER, failed_ns=2_000_000_000)
    where = {rank: RankProgress(32, 32, None if rank == 2 else "setup", 0.5, client=True) for rank in range(4)}
    job.clear("n1", progress={rank: where[rank] for rank in (2, 3)})
    job.clear("n0", progress={rank: where[rank] for rank in (0, 1)})
    decision = job.decisions()[0]
    assert decision.culprit["rank"] == 3  # type: ignore[index]
    assert (
        "node n1 slot 1) left with exit 0 at iteration 32, as rank 2 did, while others were at work; 2 other ranks failed because of it"
        in decision.reason
    )
    assert dict(job.state.budgets.node_failures) == {"n1": 1}


def test_one_that_leaves_after_the_first_failure_does_not_make_a_victim_the_culprit() -> None:
    """Two leave, 30 ms apart, and a peer of theirs fails in between."""
    job = Job()
    job.start()
    job.exit("n0", 1, code=0, failed_ns=1_000_000_000)
    job.exit("n0", 0, code=1, stamp=LOST_PEER, failed_ns=1_001_000_000)
    job.exit("n0", 2, code=0, failed_ns=1_030_000_000)
    job.clear("n0", progress={rank: RankProgress(None, 0, "setup" if rank in {1, 2} else None, 0.5, client=True) for rank in range(4)})
    assert job.decisions()[0].culprit["rank"] == 1  # type: ignore[index]


def test_finish_waits_for_stragglers_and_then_succeeds() -> None:
    job = Job()
    job.start()
    for rank in range(3):
        job.exit("n0", rank, code=0)
    assert Timer.EXIT_GRACE in job.timers()
    assert job.state.phase is Phase.RUNNING
    job.tick(61)
    job.send(TimerFired(Timer.EXIT_GRACE, 0))
    assert (job.state.phase, job.state.finished) == (Phase.ENDING, True)
    job.clear("n0")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 0
    assert "rank 3, which had not left after 60 s without a step or a section, was ended" in job.state.verdict.reason


def test_a_straggler_that_still_trains_is_left_alone() -> None:
    job = Job()
    job.start()
    job.exit("n0", 0, code=0)
    job.tick(59)
    job.send(ProgressSeen("n0", 0, 77, 3))
    job.tick(2)
    actions = job.send(TimerFired(Timer.EXIT_GRACE, 0))
    assert job.state.phase is Phase.RUNNING
    assert [a.timer for a in actions if isinstance(a, SetTimer)] == [Timer.EXIT_GRACE]


def test_a_straggler_inside_a_section_is_left_alone_until_it_leaves_it() -> None:
    job = Job()
    job.start()
    job.exit("n0", 0, code=0)
    job.send(ProgressSeen("n0", 0, 77, 3, busy=True))
    job.tick(500)
    job.send(TimerFired(Timer.EXIT_GRACE, 0))
    assert job.state.phase is Phase.RUNNING
    job.send(ProgressSeen("n0", 0, 77, 3, busy=False))
    job.tick(1)
    actions = job.send(TimerFired(Timer.EXIT_GRACE, 0))
    assert job.state.phase is Phase.RUNNING, "it has just finished its last save and is on its way out"
    assert [(a.timer, a.delay_s) for a in actions if isinstance(a, SetTimer)] == [(Timer.EXIT_GRACE, 59)]
    job.tick(60)
    job.send(TimerFired(Timer.EXIT_GRACE, 0))
    assert job.state.finished


def test_all_exit_zero_is_done() -> None:
    job = Job()
    job.start()
    for rank in range(4):
        job.exit("n0", rank, code=0)
    job.clear("n0")
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.FINISHED, 0)


def test_drain_passes_the_signal_on_and_never_counts_as_finished() -> None:
    job = Job()
    job.start()
    job.report("n0", signals=(15,))
    assert (job.state.phase, job.state.stop_signal) == (Phase.DRAINING, 15)
    for rank in range(4):
        job.exit("n0", rank, code=0)
    assert job.state.phase is Phase.ENDING
    job.clear("n0")
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.STOPPED, 143)


def test_a_second_signal_shortens_the_grace() -> None:
    job = Job()
    job.start()
    job.report("n0", signals=(2,))
    assert job.state.phase is Phase.DRAINING
    job.report("n0", signals=(2, 2))
    assert job.state.phase is Phase.ENDING
    job.clear("n0")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 130


def test_a_stop_during_a_restart_starts_nothing_more() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1)
    job.report("n0", signals=(15,))
    assert job.state.phase is Phase.ENDING
    job.clear("n0", signals=(15,))
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 143


def test_stop_while_forming_and_while_paused() -> None:
    forming = Job()
    forming.report("n0", signals=(15,))
    assert forming.state.verdict is not None
    assert forming.state.verdict.exit_code == 143
    paused = Job()
    paused.start()
    paused.exit("n0", 1, code=1)
    paused.clear("n0", standby=None)
    paused.report("n0", signals=(2,))
    assert paused.state.verdict is not None
    assert paused.state.verdict.exit_code == 130


def test_old_cycles_and_generations_change_nothing() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1)
    job.clear("n0")
    assert job.state.cycle == 1
    before = job.state
    assert job.send(ReportReceived(NodeReport("n0", 0, 0, sequence=10_000))) == []
    assert job.send(ReportReceived(NodeReport("n0", 7, 1, sequence=10_000))) == []
    assert job.send(TimerFired(Timer.REAP, 0)) == []
    assert job.send(ProgressSeen("n0", 0, 999, 5)) == []
    assert job.state == before


def test_a_repeated_report_changes_nothing() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1)
    job.clear("n0")
    job.forked()
    assert job.send(ReportReceived(job.reports["n0"])) == []


def test_a_node_that_does_not_clear_in_time_is_unfit_and_alone_means_75() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1)
    job.tick(30)
    job.send(TimerFired(Timer.REAP, 0))
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 75
    assert "not cleared 30 s after the end of cycle 0" in job.state.verdict.reason


def test_unfit_node_is_75() -> None:
    job = Job()
    job.start()
    job.exit("n0", 1, code=1)
    job.clear("n0", unfit="processes [77] cannot be killed")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 75
    assert "processes [77] cannot be killed" in job.state.verdict.reason


def test_platform_fault_costs_no_restart_but_is_bounded() -> None:
    job = Job(max_restarts=0, max_platform_faults=2)
    job.start()
    for _ in range(3):
        job.report("n0", platform_fault="the zygote was killed by SIGKILL", standby=None)
        job.clear("n0", platform_fault="the zygote was killed by SIGKILL")
        if job.state.phase is Phase.PAUSED:
            job.tick(60)
            job.send(TimerFired(Timer.BACKOFF, job.state.cycle))
        if job.state.phase is Phase.RUNNING:
            job.forked()
            job.tick(20)
    assert job.state.cycle == 2
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 75


@pytest.mark.parametrize("code", [16, 17])
def test_16_and_17_reach_the_scheduler_and_win_over_signals(code: int) -> None:
    job = Job(nodes=2, nproc=1, max_reruns=0)
    job.start()
    job.exit("n0", 0, code=code)
    assert job.state.phase is Phase.RUNNING, "its peers are given the time to leave as well"
    assert Timer.SETTLE in job.timers()
    job.exit("n1", 1, signal=15)
    assert job.state.phase is Phase.ENDING
    job.clear("n0")
    job.clear("n1")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == code
    assert job.state.budgets.restarts == 0


def test_spare_takes_exactly_the_hole() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    job.join("s1", port=5000)
    job.tick(1)
    job.send(NodeLost("n0", "connection closed and refused"))
    assert job.state.phase is Phase.ENDING
    job.names.remove("n0")
    job.clear("n1")
    assert job.state.phase is Phase.RUNNING
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("s1", "n1")
    assert job.state.master == Address("127.0.0.1", 5000)
    assert job.state.budgets.restarts == 0


def test_no_spare_waits_and_then_gives_up_with_75() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    job.send(NodeLost("n1", "gone"))
    job.clear("n0")
    assert job.state.phase is Phase.PAUSED
    assert "waiting up to 600 s for a spare in place of n1" in job.said()
    job.tick(600)
    job.send(TimerFired(Timer.SPARE_WAIT, 0))
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 75


def test_state_survives_json_at_every_step() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    job.join("s1")
    job.exit("n0", 1, code=1, error=RankError("boom", "trace"))
    job.clear("n0")
    job.clear("n1")
    job.forked()
    job.send(NodeLost("n1", "gone"))
    job.clear("n0")
    states = [a.job for a in job.actions if isinstance(a, Commit)]
    assert len(states) >= 5
    for state in states:
        assert JobState.from_json(state.to_json()) == state
    for report in job.reports.values():
        assert NodeReport.from_json(report.to_json()) == report


def test_budgets_survive_a_change_of_controller() -> None:
    job = Job(max_restarts=1)
    job.start()
    job.exit("n0", 1, code=4)
    job.clear("n0")
    job.forked()
    successor = JobMachine(JobState.from_json(job.state.to_json()), job.machine.topology, job.options)
    successor.begin(0.0)
    job.machine = successor
    job.exit("n0", 1, code=4)
    job.clear("n0")
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 4


def rejoin(job: Job, node: str, incarnation: str, port: int = 7000) -> None:
    """A new agent registers under an old node id and becomes ready."""
    job.send(NodeJoined(NodeInfo(node, "127.0.0.1:1", job.options.nproc, 0, incarnation=incarnation)))
    job.reports[node] = NodeReport(node, 0, -1, incarnation=incarnation)
    job.report(node, reaped=True, standby=Address("127.0.0.1", port))


def test_an_agent_started_anew_has_lost_its_ranks() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    job.send(NodeJoined(NodeInfo("n1", "127.0.0.1:1", 4, 0, incarnation="second")))
    assert job.state.phase is Phase.ENDING
    assert "its agent was started anew" in job.state.reason


def test_the_same_agent_registering_again_changes_nothing() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    job.send(NodeJoined(NodeInfo("n1", "127.0.0.1:9", 4, 0)))
    assert job.state.phase is Phase.RUNNING


def test_a_returning_node_takes_its_own_hole_only_as_a_last_resort() -> None:
    alone = Job(nodes=2, can_join=True)
    alone.start()
    alone.send(NodeLost("n1", "gone"))
    alone.clear("n0")
    assert alone.state.phase is Phase.PAUSED
    rejoin(alone, "n1", "second")
    assert alone.state.phase is Phase.RUNNING
    assert alone.state.placement is not None
    assert alone.state.placement.nodes == ("n0", "n1")
    assert alone.state.incarnations["n1"] == "second"

    spared = Job(nodes=2, can_join=True)
    spared.start()
    spared.join("s1", port=5000)
    spared.send(NodeLost("n1", "gone"))
    rejoin(spared, "n1", "second")
    spared.clear("n0")
    assert spared.state.placement is not None
    assert spared.state.placement.nodes == ("n0", "s1")


def test_reports_of_a_former_agent_change_nothing() -> None:
    job = Job(nodes=2, can_join=True)
    job.start()
    old = job.reports["n1"]
    rejoin(job, "n1", "second")
    assert job.send(ReportReceived(NodeReport("n1", 0, 0, sequence=old.sequence + 50, reaped=True))) == []
    assert job.state.phase is Phase.ENDING, "n0 has not acknowledged"


def test_too_few_spares_and_a_returning_node_together_fill_two_holes() -> None:
    job = Job(nodes=3, can_join=True)
    job.start()
    job.join("s1", port=5000)
    job.send(NodeLost("n0", "gone"))
    job.clear("n1")
    job.clear("n2", unfit="processes [9] cannot be killed")
    assert job.state.phase is Phase.PAUSED
    rejoin(job, "n0", "second")
    assert job.state.phase is Phase.RUNNING
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1", "s1")


def test_what_the_fastest_reached_before_all_had_attached_is_no_progress_to_beat() -> None:
    job = Job(max_restarts=10, no_progress_cycles=2)
    job.start()
    job.exit("n0", 1, code=1)
    job.clear("n0", iteration=10, client=True)
    job.forked()
    job.exit("n0", 1, code=1)
    fast = {0: RankProgress(900, 5, "step", 0.1, True), **{r: RankProgress(None, 0, None, 0.1, False) for r in (1, 2, 3)}}
    job.clear("n0", progress=fast)
    assert job.state.budgets.best_iteration == 10
