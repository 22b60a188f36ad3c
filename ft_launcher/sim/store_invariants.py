"""What must hold whenever a job state is written, whoever writes it: one history, that goes on over any number of controllers.

The store refuses what a deposed controller writes; these rules would see it if it did not. They know what was written before, not how it was decided.
"""

from __future__ import annotations

from ft_launcher.core.state import Phase
from ft_launcher.sim.checks import CommitInvariant, CommitStep
from ft_launcher.sim.job_invariants import survivors_moved


def a_deposed_controller_writes_nothing(step: CommitStep) -> str | None:
    """Once a later controller has written, no earlier one does."""
    if step.before is None or step.term >= step.before[0]:
        return None
    return f"the controller of term {step.term} has written after the one of term {step.before[0]}"


def a_successor_changes_nothing(step: CommitStep) -> str | None:
    """What a new controller writes before it has looked around is what it found: taking over touches nobody."""
    if step.before is None or not step.loading or step.job == step.before[1]:
        return None
    return (
        f"the controller of term {step.term} took over in phase {step.before[1].phase} and wrote phase {step.job.phase} ({step.job.reason})"
    )


def one_history(step: CommitStep) -> str | None:
    """Over all controllers: cycles only grow, a cycle has one placement, budgets never come back, and a verdict is the last word."""
    if step.before is None:
        return None
    old, new = step.before[1], step.job
    if old.phase is Phase.DONE and new != old:
        return f"the verdict of cycle {old.cycle} was written over by phase {new.phase} of cycle {new.cycle}"
    if new.cycle not in (old.cycle, old.cycle + 1):
        return f"cycle {old.cycle} is followed by cycle {new.cycle}"
    waits = old.phase is Phase.ENDING and new.phase is Phase.PAUSED
    if new.cycle == old.cycle and new.placement != old.placement and not waits:
        return f"cycle {new.cycle} has two placements"
    earned = step.launch.earned()
    if new.budgets.restarts < old.budgets.restarts - earned or new.budgets.platform < old.budgets.platform - earned:
        return f"a budget came back: restarts {old.budgets.restarts} -> {new.budgets.restarts}, platform {old.budgets.platform} -> {new.budgets.platform}"
    return _survivors_stay(step)


def _survivors_stay(step: CommitStep) -> str | None:
    """Spares take exactly the hole."""
    old = step.before[1].placement if step.before is not None else None
    new = step.job.placement
    if old is None or new is None or new is old:
        return None
    return survivors_moved(old, new, (step.before[1], step.job)) if step.before is not None else None


def commits_are_fenced(step: CommitStep) -> str | None:
    """A checkpoint that counts is never from an older cycle than one that counted before."""
    return step.launch.world.storage.disorder


COMMIT: tuple[CommitInvariant, ...] = (a_deposed_controller_writes_nothing, a_successor_changes_nothing, one_history, commits_are_fenced)
