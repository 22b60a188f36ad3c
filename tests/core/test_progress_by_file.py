"""Rule 7 for scripts without a client, whose iteration comes from a progress file: ranks report it, no client is attached."""

from __future__ import annotations

from ft_launcher.core.events import Timer, TimerFired
from ft_launcher.core.state import Outcome, Phase
from tests.core.machines import Job


def crash_at(job: Job, iteration: int | None) -> None:
    """The cycle ends with a crash; the file says `iteration`."""
    job.exit("n0", 0, code=1)
    job.clear("n0", iteration=iteration)
    if job.state.phase is Phase.PAUSED:
        job.tick(100)
        job.send(TimerFired(Timer.BACKOFF, job.state.cycle))
    if job.state.phase is Phase.RUNNING:
        job.forked()


def test_cycles_that_go_no_further_by_the_file_stop_the_job() -> None:
    job = Job(nproc=1, no_progress_cycles=2, max_restarts=20)
    job.start()
    for iteration in (5, 9):
        crash_at(job, iteration)
        assert job.state.budgets.stuck_cycles == 0
    crash_at(job, 9)
    assert job.state.budgets.stuck_cycles == 1
    crash_at(job, 3)
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.NO_PROGRESS, 93)
    assert "without going beyond iteration 9" in job.state.verdict.reason


def test_a_cycle_that_ends_before_it_writes_is_one_without_progress_once_a_file_is_known() -> None:
    job = Job(nproc=1, no_progress_cycles=5, max_restarts=20)
    job.start()
    crash_at(job, None)
    assert job.state.budgets.stuck_cycles == 0  # nothing is known of such a script
    crash_at(job, 5)
    crash_at(job, None)
    assert job.state.budgets.stuck_cycles == 1
    assert not job.state.budgets.client_known  # silence of its ranks is still no hang
