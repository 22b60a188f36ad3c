"""The node machine: what one agent does with its ranks, told event by event."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import pytest

from ft_launcher.core import node as node_module
from ft_launcher.core.actions import (
    KillRanks,
    Leave,
    NodeAction,
    OpenStandby,
    ReadErrors,
    Reap,
    Report,
    Say,
    SetGrace,
    SignalRanks,
    StartRanks,
    StartZygote,
)
from ft_launcher.core.events import (
    ErrorsRead,
    ExceptionStamped,
    GraceExpired,
    HangFound,
    JobChanged,
    NodeEvent,
    NodeUnfit,
    RankEnded,
    RanksReaped,
    RanksStarted,
    SignalArrived,
    StandbyOpened,
    ZygoteDied,
    ZygoteStarted,
)
from ft_launcher.core.evidence import Address, Hang, NodeReport, RankError
from ft_launcher.core.machine import total
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.node_table import NodePhase
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Outcome, Phase, Verdict
from ft_launcher.errors import BugError

HERE = Address("127.0.0.1", 1000)


class Node:
    """A node machine fed with a made-up job; the last report is kept."""

    def __init__(self, node: str = "n0", **options: Any) -> None:
        generation = options.pop("generation", 0)
        self.machine = NodeMachine(NodeOptions(node, generation, **options))
        self.revision = 0
        self.job = JobState("job", generation)
        self.now = 1.0

    @property
    def report(self) -> NodeReport:
        return self.machine.report

    def send(self, event: NodeEvent) -> list[NodeAction]:
        self.now += 0.01
        return self.machine.handle(self.now, event)

    def change(self, **changes: Any) -> list[NodeAction]:
        self.revision += 1
        self.job = self.job.but(**changes)
        return self.send(JobChanged(self.job, self.revision))

    def warm(self) -> None:
        self.send(ZygoteStarted())
        self.send(StandbyOpened(HERE))

    def run(self, cycle: int = 0, nodes: tuple[str, ...] = ("n0",)) -> list[NodeAction]:
        placement = Placement(nodes=nodes, nproc=2)
        actions = self.change(phase=Phase.RUNNING, cycle=cycle, placement=placement, master=self.report.standby or HERE)
        self.send(RanksStarted(cycle))
        return actions

    def end(self, rank: int, code: int | None = None, signal: int | None = None, at_ns: int = 5) -> list[NodeAction]:
        return self.send(RankEnded(self.machine.cycle, rank, code, signal, at_ns))

    def stop(self) -> list[NodeAction]:
        return self.change(phase=Phase.ENDING)


def of(kind: type, actions: list[NodeAction]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def test_the_transition_table_is_total() -> None:
    events = typing.get_args(NodeEvent)
    assert set(node_module.TRANSITIONS) == set(itertools.product(NodePhase, events))
    for cell in node_module.TRANSITIONS.values():
        assert cell in ("ignore_stale", "impossible") or callable(getattr(NodeMachine, cell))


def test_a_forgotten_cell_is_refused_when_the_table_is_built() -> None:
    with pytest.raises(BugError, match="no cell for int in phase left"):
        total(NodePhase, {int: dict.fromkeys([NodePhase.IDLE, NodePhase.RUNNING, NodePhase.STOPPING], "on_job")})


def test_ready_means_a_store_listens() -> None:
    node = Node()
    actions = node.send(ZygoteStarted())
    assert of(OpenStandby, actions) == [OpenStandby(0.0)]
    (report,) = of(Report, node.send(StandbyOpened(HERE)))
    assert (report.report.standby, report.report.reaped, report.report.cycle) == (HERE, True, -1)


def test_start_uses_up_the_standby_and_orders_the_next() -> None:
    node = Node()
    node.warm()
    actions = node.run()
    assert [type(a) for a in actions] == [StartRanks, OpenStandby]
    assert node.report.standby is None
    assert (node.report.started, node.report.cycle) == (True, 0)


def test_a_job_that_starts_before_the_zygote_is_ready_is_started_when_it_is() -> None:
    node = Node()
    assert of(StartRanks, node.run(nodes=("head", "n0"))) == []
    assert len(of(StartRanks, node.send(ZygoteStarted()))) == 1


def test_an_exit_is_reported_at_once_and_the_end_kills_the_rest() -> None:
    node = Node()
    node.warm()
    node.run()
    (report,) = of(Report, node.end(1, signal=9))
    assert report.report.exits[1].failure
    actions = node.stop()
    assert of(KillRanks, actions) == [KillRanks(0, [0])]
    actions = node.end(0, signal=9)
    assert of(Reap, actions) == [Reap(0)]
    assert of(ReadErrors, actions) == [ReadErrors(0, [1])]
    assert node.report.exits[0].ended
    node.send(ErrorsRead(0, {1: RankError("boom")}))
    assert not node.report.reaped
    (report,) = of(Report, node.send(RanksReaped(0, (), 0.02)))
    assert report.report.reaped
    assert report.report.exits[1].error == RankError("boom")
    assert node.machine.phase is NodePhase.IDLE


def test_a_node_is_not_cleared_before_the_last_words_are_read_whatever_else_it_reports() -> None:
    """The next cycle's store listens meanwhile; and what was to be reported before is sent late, as it is then."""
    node = Node()
    node.warm()
    node.run()
    node.end(1, code=1)
    node.stop()
    node.end(0, signal=9)
    assert not of(Report, node.send(RanksReaped(0, (), 0.02)))
    assert not node.report.reaped
    (report,) = of(Report, node.send(StandbyOpened(Address("127.0.0.1", 1001))))
    assert not report.report.reaped
    (report,) = of(Report, node.send(ErrorsRead(0, {1: RankError("boom")})))
    assert report.report.reaped
    assert report.report.exits[1].error == RankError("boom")


def test_the_next_cycle_starts_where_the_store_is() -> None:
    node = Node()
    node.warm()
    node.run()
    node.end(0, code=1)
    node.end(1, code=1)
    node.stop()
    node.send(StandbyOpened(Address("127.0.0.1", 1001)))
    node.send(ErrorsRead(0, {}))
    node.send(RanksReaped(0, (), 0.0))
    actions = node.run(cycle=1)
    assert of(StartRanks, actions)[0].job.cycle == 1
    assert node.report.exits == {}


def test_missed_revisions_are_made_up_for() -> None:
    """A node that was frozen sees only the newest state: another cycle runs already, without it."""
    node = Node()
    node.warm()
    node.run()
    actions = node.change(phase=Phase.RUNNING, cycle=5, placement=Placement(nodes=("other",), nproc=2))
    assert of(KillRanks, actions) == [KillRanks(0, [0, 1])]


def test_old_revisions_and_generations_change_nothing() -> None:
    node = Node(generation=3)
    node.warm()
    node.run()
    assert node.send(JobChanged(node.job.but(phase=Phase.ENDING), 0)) == []
    assert node.send(JobChanged(node.job.but(phase=Phase.ENDING, generation=2), 99)) == []
    assert node.machine.phase is NodePhase.RUNNING


def test_events_of_an_old_cycle_are_ignored() -> None:
    node = Node()
    node.warm()
    node.run()
    assert node.send(RankEnded(9, 0, 1, None, 5)) == []
    assert node.machine.alive == {0, 1}


def test_an_early_exception_gets_a_second_for_its_last_words() -> None:
    node = Node()
    node.warm()
    node.run()
    node.send(ExceptionStamped(0, 0, 1_000_000_000, "ValueError: x"))
    node.end(1, code=1, at_ns=1_200_000_000)
    actions = node.stop()
    assert of(KillRanks, actions) == []
    assert of(SetGrace, actions) == [SetGrace(0, 1.0)]
    actions = node.send(GraceExpired(0))
    assert of(KillRanks, actions) == [KillRanks(0, [0])]


def test_a_rank_that_survives_its_sigkill_is_left_to_the_reaper() -> None:
    node = Node()
    node.warm()
    node.run()
    node.end(1, code=1)
    assert of(SetGrace, node.stop()) == [SetGrace(0, 10.0)]
    assert of(Reap, node.send(GraceExpired(0))) == [Reap(0)]
    node.send(ErrorsRead(0, {}))
    node.send(RanksReaped(0, (4711,), 5.0))
    assert node.report.unfit == "processes [4711] cannot be killed"
    assert node.report.reaped


def test_devices_or_a_check_that_fail_after_the_ranks_are_gone_make_the_node_unfit() -> None:
    node = Node()
    node.warm()
    node.run()
    node.end(0, code=0)
    node.end(1, code=0)
    node.stop()
    (report,) = of(Report, node.send(RanksReaped(0, (), 0.5, unfit="GPU-a: GPU is lost")))
    assert report.report.reaped
    assert report.report.unfit == "GPU-a: GPU is lost"
    assert of(StartRanks, node.change(phase=Phase.RUNNING, cycle=1)) == []


def test_a_node_without_ranks_can_become_unfit_too() -> None:
    node = Node()
    (report,) = of(Report, node.send(NodeUnfit(-1, "health check: no NIC")))
    assert report.report.unfit == "health check: no NIC"
    node.warm()
    assert of(StartRanks, node.run()) == []
    assert node.report.reaped and node.report.cycle == 0


def test_a_head_whose_store_is_gone_does_not_start() -> None:
    node = Node()
    node.warm()
    node.send(StandbyOpened(Address("127.0.0.1", 2000)))
    actions = node.change(phase=Phase.RUNNING, cycle=0, placement=Placement(nodes=("n0",), nproc=2), master=HERE)
    assert of(StartRanks, actions) == []
    assert node.report.platform_fault == "the store of cycle 0 ended before the cycle began"
    assert node.report.reaped


def test_a_cycle_that_never_started_here_is_acknowledged() -> None:
    node = Node()
    node.run(nodes=("head", "n0"))
    actions = node.stop()
    (report,) = of(Report, actions)
    assert (report.report.cycle, report.report.reaped, report.report.started) == (0, True, False)


def test_a_peers_exception_right_after_a_death_gets_no_grace() -> None:
    node = Node()
    node.warm()
    node.run()
    node.end(1, signal=9, at_ns=1_000_000_000)
    node.send(ExceptionStamped(0, 0, 995_000_000, "RuntimeError: Connection reset by peer"))
    actions = node.stop()
    assert of(KillRanks, actions) == [KillRanks(0, [0])]


def test_who_tells_of_a_lost_peer_gets_no_grace_however_early() -> None:
    node = Node()
    node.warm()
    node.run()
    node.send(ExceptionStamped(0, 0, 1_000_000_000, "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:60643: Connection reset by peer"))
    node.end(1, signal=9, at_ns=1_900_000_000)
    actions = node.stop()
    assert of(KillRanks, actions) == [KillRanks(0, [0])]


def test_the_stamp_dates_the_failure() -> None:
    node = Node()
    node.warm()
    node.run()
    node.send(ExceptionStamped(0, 0, 700, "ValueError: x"))
    node.end(0, code=1, at_ns=900)
    assert (node.report.exits[0].failed_ns, node.report.exits[0].stamp) == (700, "ValueError: x")


def test_a_stamp_without_a_failure_is_forgotten() -> None:
    """A script may call its excepthook and live on."""
    node = Node()
    node.warm()
    node.run()
    assert node.send(ExceptionStamped(0, 0, 700, "ValueError: x")) == []
    node.end(0, code=0, at_ns=900)
    assert node.report.exits[0].success
    assert node.report.exits[0].stamp is None


def test_survivor_grace_lets_survivors_save() -> None:
    node = Node(survivor_grace_s=5.0)
    node.warm()
    node.run()
    node.end(0, code=1)
    actions = node.stop()
    assert of(SignalRanks, actions) == [SignalRanks(0, 15, [1])]
    assert of(SetGrace, actions) == [SetGrace(0, 5.0)]
    assert of(KillRanks, actions) == []


def test_stop_signals_go_to_the_controller_others_to_the_ranks() -> None:
    node = Node(forward_signals=frozenset({10}))
    node.warm()
    node.run()
    assert of(SignalRanks, node.send(SignalArrived(10))) == [SignalRanks(0, 10, [0, 1])]
    (report,) = of(Report, node.send(SignalArrived(15)))
    assert report.report.signals == (15,)
    assert node.send(SignalArrived(12)) == []


def test_draining_forwards_the_signal_once() -> None:
    node = Node()
    node.warm()
    node.run()
    assert of(SignalRanks, node.change(phase=Phase.DRAINING, stop_signal=15)) == [SignalRanks(0, 15, [0, 1])]
    assert node.change(phase=Phase.DRAINING, stop_signal=15) == []


def test_hangs_are_reported_unless_the_rank_is_gone() -> None:
    node = Node()
    node.warm()
    node.run()
    hang = Hang(1, "step", 9.0, 5.0, 7, "no progress for 9 s")
    node.end(1, code=0)
    assert node.send(HangFound(0, hang)) == []
    assert of(Report, node.send(HangFound(0, Hang(0, "step", 9.0, 5.0, 7, "x"))))


def test_zygote_death_is_a_platform_fault_of_running_ranks() -> None:
    node = Node()
    node.warm()
    node.run()
    actions = node.send(ZygoteDied("it was killed by SIGKILL"))
    assert of(StartZygote, actions)
    assert node.report.platform_fault == "it was killed by SIGKILL"
    assert all(e.ended for e in node.report.exits.values())
    assert node.report.standby is None
    assert of(Reap, node.stop()) == [Reap(0)]


def test_zygote_death_without_ranks_is_no_fault() -> None:
    node = Node()
    node.warm()
    node.send(ZygoteDied("x"))
    assert node.report.platform_fault is None


def test_a_zygote_that_never_starts_makes_the_node_unfit() -> None:
    node = Node()
    for _ in range(3):
        assert of(StartZygote, node.send(ZygoteDied("import error")))
    node.send(ZygoteDied("import error"))
    assert node.report.unfit == "the zygote does not start: import error"


def test_what_cannot_be_killed_makes_the_node_unfit() -> None:
    node = Node()
    node.warm()
    node.run()
    node.end(0, code=1)
    node.end(1, code=1)
    node.stop()
    node.send(ErrorsRead(0, {}))
    node.send(RanksReaped(0, (4711,), 5.0))
    assert node.report.unfit == "processes [4711] cannot be killed"


def test_done_means_leave_with_the_code_only_after_clearing() -> None:
    node = Node()
    node.warm()
    node.run()
    verdict = Verdict(Outcome.FAILED, 7, "x")
    actions = node.change(phase=Phase.DONE, verdict=verdict)
    assert of(Leave, actions) == []
    assert of(KillRanks, actions)
    node.end(0, signal=9)
    node.end(1, signal=9)
    assert of(Leave, node.send(RanksReaped(0, (), 0.0))) == [Leave(7)]
    assert node.send(SignalArrived(15)) == []


def test_a_spare_leaves_with_0() -> None:
    node = Node("spare")
    node.warm()
    node.run(nodes=("n0",))
    assert node.change(phase=Phase.DONE, verdict=Verdict(Outcome.FAILED, 7, "x")) == [Leave(0)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"phase": Phase.ENDING, "lost": {"n0": "its lease ended 4.1 s ago"}}, "its lease ended 4.1 s ago"),
        ({"cycle": 3, "placement": Placement(("n9",), 2)}, "it has no place in cycle 3"),
    ],
    ids=["lost", "replaced"],
)
def test_a_node_that_was_given_up_while_it_was_away_says_so(change: dict[str, Any], why: str) -> None:
    node = Node()
    node.warm()
    node.run()
    actions = node.change(**change)
    (said,) = of(Say, actions)
    assert said.text == f"node n0 has been given up while it was away ({why}): ending its ranks of cycle 0"
    assert of(KillRanks, actions) == [KillRanks(0, [0, 1])]


def test_a_spare_that_is_told_to_go_says_what_the_job_does() -> None:
    going, ending = Node("spare"), Node("spare")
    for node in (going, ending):
        node.warm()
        node.run(nodes=("n0",))
    ending.change(stop_signal=15, phase=Phase.DRAINING)
    for node, job in ((going, "the job goes on"), (ending, "the job is being stopped")):
        said, left = node.send(SignalArrived(15))
        assert isinstance(said, Say)
        assert said.text == f"SIGTERM: node spare holds no ranks and leaves; {job}"
        assert left == Leave(0)


def test_an_impossible_event_tells_the_story() -> None:
    node = Node()
    node.warm()
    node.run()
    with pytest.raises(BugError, match=r"RanksReaped in phase running\nwhat led there:\n.*ZygoteStarted"):
        node.send(RanksReaped(0, (), 0.0))


def test_a_second_stop_signal_ends_survivors_in_their_grace() -> None:
    node = Node(survivor_grace_s=1000.0)
    node.warm()
    node.run()
    node.end(0, code=1)
    node.stop()
    node.send(SignalArrived(15))
    assert node.machine.phase is NodePhase.STOPPING
    (kill,) = of(KillRanks, node.send(SignalArrived(15)))
    assert list(kill.ranks) == [1]


def test_with_a_tracker_file_it_is_read_also_where_no_rank_failed() -> None:
    """The rank whose result was rejected may have been ended before it left: its peers' exits came first."""
    for tracker in (False, True):
        node = NodeMachine(NodeOptions("n0", 0, tracker=tracker))
        job = JobState("job", 0).but(phase=Phase.RUNNING, cycle=0, placement=Placement(("n0",), 1), master=HERE)
        node.handle(0, ZygoteStarted())
        node.handle(0, StandbyOpened(HERE))
        node.handle(1, JobChanged(job, 1))
        node.handle(1, RanksStarted(0))
        node.handle(2, JobChanged(job.but(phase=Phase.ENDING), 2))
        actions = node.handle(3, RankEnded(0, 0, None, 9, 5))
        assert any(isinstance(a, ReadErrors) for a in actions) is tracker
