"""What fails twice: a node is left for a spare, an error at the same place is said to be the same, and a healthy stretch gives restarts back."""

from __future__ import annotations

from typing import Any

import pytest

from ft_launcher.core.evidence import RankError
from ft_launcher.core.state import Phase
from tests.core.machines import Job


def cluster(spares: int = 1, **options: Any) -> Job:
    job = Job(nodes=2, nproc=2, can_join=True, **options)
    job.start()
    for i in range(spares):
        job.join(f"s{i}", port=7000 + i)
    return job


def crash(job: Job, rank: int, error: RankError | None = None, iteration: int = 5) -> None:
    """`rank` fails, the cycle is cleared, the next one runs."""
    assert job.state.placement is not None
    node = job.state.placement.node_of(rank)
    job.exit(node, rank, code=None if error is None else 1, signal=9 if error is None else None, error=error)
    for name in job.state.placement.nodes:
        job.clear(name, iteration=iteration, client=True)
    if job.state.phase is Phase.RUNNING:
        job.names = list(job.state.placement.nodes)
        job.forked()


def error(line: int) -> RankError:
    return RankError(
        "ValueError: loss is nan",
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n  File "model.py", line {line}, in step\n',
    )


def test_a_node_that_fails_a_second_time_is_left_for_a_spare() -> None:
    job = cluster()
    crash(job, 2, iteration=5)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1")
    crash(job, 3, iteration=6)
    assert job.state.placement.nodes == ("n0", "s0")
    assert job.state.budgets.restarts == 2, "it is charged all the same"
    assert job.state.budgets.node_failures == {"n1": 2}
    assert "failure 2 of node n1" in job.state.restart_reason


def test_without_a_spare_or_on_another_node_it_stays() -> None:
    job = cluster(spares=0)
    crash(job, 2)
    crash(job, 3, iteration=6)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1")
    job = cluster()
    crash(job, 0)
    crash(job, 2, iteration=6)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1")


def test_a_spare_that_failed_before_takes_nobodys_place_for_this() -> None:
    job = cluster(max_restarts=9)
    for iteration in range(4):
        crash(job, 2, iteration=iteration)
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "s0"), "n1 is free again, and no better"


def test_the_same_error_at_the_same_place_is_said_and_moves_nobody() -> None:
    job = cluster()
    crash(job, 2, error(17), iteration=5)
    assert "same error" not in job.state.restart_reason
    crash(job, 2, error(17), iteration=6)
    assert "the same error at the same place as the time before" in job.state.restart_reason
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("n0", "n1"), "a bug is not cured by another machine"
    crash(job, 2, error(18), iteration=7)
    assert "same error" not in job.state.restart_reason


def test_a_healthy_stretch_gives_a_restart_back() -> None:
    job = cluster(spares=0, healthy_stretch_s=100.0)
    crash(job, 2, iteration=5)
    assert job.state.budgets.restarts == 1
    job.tick(250)
    crash(job, 0, iteration=50)
    assert job.state.budgets.restarts == 1, "two given back at most what there was, one charged"
    job.tick(250)
    crash(job, 0, iteration=50)
    assert job.state.budgets.restarts == 2, "time without progress is no healthy stretch"


LOST = "monitors.fence.FenceLost: fence 3 is superseded by fence 4{of}: a newer owner has /ckpt, commit nothing and end"


def lose_fence(of: str) -> Job:
    job = cluster()
    job.exit("n0", 0, code=1, stamp=LOST.format(of=of))
    for name in ("n0", "n1"):
        job.clear(name, iteration=5, client=True)
    return job


def test_a_fence_lost_to_another_run_is_no_reason_to_restart() -> None:
    job = lose_fence(" of run other-7")
    verdict = job.state.verdict
    assert verdict is not None
    assert verdict.exit_code == 1
    assert "run other-7 has taken the checkpoint folder" in verdict.reason
    assert job.state.budgets.restarts == 0


@pytest.mark.parametrize(
    "of", ["", " of run job"], ids=["nobody knows to whom", "to this very run: a rank of an older cycle woke up and claimed last"]
)
def test_a_fence_that_this_run_may_have_lost_to_itself_is_a_crash(of: str) -> None:
    job = lose_fence(of)
    assert job.state.phase is Phase.RUNNING
    assert job.state.budgets.restarts == 1


def test_a_sentence_that_only_mentions_a_fence_is_a_crash() -> None:
    job = cluster()
    job.exit("n0", 0, code=1, stamp="ValueError: no FenceLost here")
    for name in ("n0", "n1"):
        job.clear(name, iteration=5, client=True)
    assert job.state.phase is Phase.RUNNING
