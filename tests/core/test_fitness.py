"""A health check that fails everywhere at once is at fault itself; one that fails somewhere tells of that node."""

from __future__ import annotations

import pytest

from ft_launcher.core.actions import Say, StartRanks
from ft_launcher.core.events import JobChanged, NodeJoined, NodeUnfit, ReportReceived, ZygoteStarted
from ft_launcher.core.evidence import Address, NodeInfo, NodeReport
from ft_launcher.core.fitness import by_check, failed_check, overruled
from ft_launcher.core.job import JobMachine
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.state import JobState, Outcome, Phase
from tests.core.machines import Job

BAD = failed_check("'check.sh': exit 1: no NIC")


def test_words_that_node_and_controller_share() -> None:
    assert by_check(BAD)
    assert not by_check(None)
    assert not by_check("processes [1] cannot be killed")
    assert not by_check("health checks are unknown here")


@pytest.mark.parametrize(
    ("unfit", "at_fault"),
    [
        ({}, False),
        ({"a": BAD}, False),  # one node cannot tell
        ({"a": BAD, "b": BAD}, True),
        ({"a": BAD, "b": None}, False),
        ({"a": BAD, "b": "GPU GPU-a: GPU is lost"}, False),
        (dict.fromkeys("abcdef", BAD), True),
    ],
)
def test_when_the_check_is_at_fault(unfit: dict[str, str | None], at_fault: bool) -> None:
    said = overruled(unfit)
    assert (said is not None) is at_fault
    if said is not None:
        assert f"fails on all {len(unfit)} nodes" in said
        assert "(a: health check: 'check.sh': exit 1: no NIC)" in said


def crashed(job: Job) -> None:
    """A rank fails, and its node and all others end the cycle."""
    job.start()
    job.exit("n0", 0, code=1)
    assert job.state.phase is Phase.ENDING


def test_failing_on_all_nodes_between_cycles_it_is_overruled() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    crashed(job)
    job.clear("n0", unfit=BAD)
    job.clear("n1", unfit=BAD)
    assert job.state.phase is Phase.RUNNING
    assert job.state.cycle == 1
    assert job.state.budgets.restarts == 1  # it was a crash, and is charged as one
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1")
    (said,) = [a for a in job.actions if isinstance(a, Say) and "health check" in a.text]
    assert said.level == "error"
    assert said.text == job.state.check_overruled


def test_failing_on_one_node_it_is_believed() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    crashed(job)
    job.join("spare")
    job.clear("n0", unfit=BAD)
    job.clear("n1")
    assert job.state.check_overruled == ""
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("spare", "n1")
    assert "no NIC" in job.state.restart_reason


def test_a_job_of_one_node_cannot_tell_and_stops() -> None:
    job = Job(nodes=1, nproc=1)
    crashed(job)
    job.clear("n0", unfit=BAD)
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.NOT_ENOUGH_NODES, 75)
    assert "no NIC" in job.state.verdict.reason


def check(job: Job, node: str, **changes: object) -> None:
    """A node registers and reports its first check."""
    job.send(NodeJoined(NodeInfo(node, "127.0.0.1:1", 1, 0)))
    job.report(node, reaped=True, **changes)


def test_failing_on_all_nodes_at_the_start_it_is_overruled() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    check(job, "n0", unfit=BAD)
    assert job.state.check_overruled == ""
    check(job, "n1", unfit=BAD)
    assert job.state.check_overruled
    for port, node in enumerate(("n0", "n1")):
        job.report(node, standby=Address("127.0.0.1", port))  # opened once the agents know; their reports may still say it
    assert job.state.phase is Phase.RUNNING


def test_a_node_that_has_not_been_checked_yet_keeps_the_question_open() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    check(job, "n0", unfit=BAD)
    job.send(NodeJoined(NodeInfo("n2", "127.0.0.1:1", 1, 0)))  # a third node, still importing
    check(job, "n1", unfit=BAD)
    assert job.state.check_overruled == ""
    job.report("n2", reaped=True, standby=Address("127.0.0.1", 9))
    assert job.state.check_overruled == ""  # it passes there: the others are at fault
    assert job.state.phase is Phase.FORMING


def test_a_successor_does_not_believe_it_again() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    crashed(job)
    job.clear("n0", unfit=BAD)
    job.clear("n1", unfit=BAD)
    heir = JobMachine(JobState.from_json(job.state.to_json()), job.machine.topology, job.options)
    heir.begin(1.0)
    heir.handle(1.0, NodeJoined(NodeInfo("n0", "127.0.0.1:1", 1, 0)))
    assert heir.handle(1.0, ReportReceived(NodeReport("n0", 0, 1, sequence=99, started=True, unfit=BAD))) == []
    assert heir.state.phase is Phase.RUNNING


def test_a_node_follows_although_its_check_has_failed() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    crashed(job)
    job.clear("n0", unfit=BAD)
    job.clear("n1", unfit=BAD)
    node = NodeMachine(NodeOptions("n1", 0))
    node.handle(1.0, NodeUnfit(-1, BAD))
    assert node.report.unfit == BAD
    node.handle(1.0, ZygoteStarted())
    assert any(isinstance(a, StartRanks) for a in node.handle(1.0, JobChanged(job.state, 7)))
    assert node.report.unfit is None


def test_who_waits_reads_why_a_node_that_is_there_takes_no_hole() -> None:
    job = Job(nodes=2, nproc=1, can_join=True)
    job.join("n0")
    check(job, "n1", unfit=BAD)
    said = job.machine.waiting() or ""
    assert "ready: n0" in said
    assert "preparing" not in said
    assert f"n1 is unfit: {BAD}" in said
