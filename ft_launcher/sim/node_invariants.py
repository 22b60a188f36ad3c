"""What must hold before a node carries out an action, compared with what really runs on it."""

from __future__ import annotations

from ft_launcher.core.actions import KillRanks, Leave, Report, StartRanks
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.checks import NodeInvariant, NodeStep


def nothing_old_runs_at_a_start(step: NodeStep) -> str | None:
    """When a cycle's ranks are started on a node, no process of an earlier one is alive there, not even one that cannot be killed."""
    if not isinstance(step.action, StartRanks):
        return None
    old = [*step.agent.nursery.procs.values(), *step.agent.nursery.remains]
    return f"{step.agent.name} starts cycle {step.action.job.cycle} over a process of cycle {old[0].cycle}" if old else None


def one_process_per_rank(step: NodeStep) -> str | None:
    """No rank of the newest cycle is started where one of the same cycle is alive already."""
    action = step.action
    if not isinstance(action, StartRanks) or action.job.placement is None:
        return None
    for rank in action.job.placement.ranks_on(step.agent.name):
        for name, proc in step.launch.live.get(rank, ()):
            if proc.cycle == action.job.cycle:
                return f"rank {rank} of cycle {proc.cycle} is started on {step.agent.name} and alive on {name}"
    return None


def starts_are_decided(step: NodeStep) -> str | None:
    """Ranks are started only for a cycle that is in the store."""
    if not isinstance(step.action, StartRanks):
        return None
    job = step.launch.state
    if step.action.job.cycle > job.cycle:
        return f"{step.agent.name} starts cycle {step.action.job.cycle}, which the store does not know"
    return None


def kills_are_decided(step: NodeStep) -> str | None:
    """Ranks are killed only when the store says that their cycle is over."""
    if not isinstance(step.action, KillRanks):
        return None
    job = step.launch.state
    if job.cycle == step.action.cycle and job.phase is Phase.RUNNING:
        return f"{step.agent.name} kills ranks of cycle {step.action.cycle}, which runs"
    return None


def acknowledgements_are_true(step: NodeStep) -> str | None:
    """A node that says it is cleared has no process left, or says that it is unfit."""
    if not isinstance(step.action, Report) or not step.action.report.reaped or not step.agent.nursery.procs:
        return None
    return f"{step.agent.name} reports cycle {step.action.report.cycle} reaped, but {len(step.agent.nursery.procs)} of its ranks are alive"


def acknowledgements_are_final(step: NodeStep) -> str | None:
    """A node that says it is cleared has read what its ranks said of themselves: the cycle may be judged at once."""
    if not isinstance(step.action, Report) or not step.action.report.reaped or step.agent.reading != step.action.report.cycle:
        return None
    return f"{step.agent.name} reports cycle {step.action.report.cycle} reaped, and is still reading what its ranks said"


def nobody_leaves_living_ranks(step: NodeStep) -> str | None:
    """An agent ends only when its ranks have."""
    if not isinstance(step.action, Leave) or not step.agent.nursery.procs:
        return None
    return f"{step.agent.name} leaves while {len(step.agent.nursery.procs)} of its ranks are alive"


def everyone_leaves_with_the_verdict(step: NodeStep) -> str | None:
    """An agent that held ranks ends with the verdict's code, and only once there is a verdict. A spare, or who was asked to leave, may go before, with 0."""
    if not isinstance(step.action, Leave):
        return None
    job = step.launch.state
    if step.action.exit_code == 0 and any(_is_free(step, known) for known in (job, step.agent.machine.job)):
        return None
    if job.verdict is None:
        return f"{step.agent.name} leaves before there is a verdict"
    held = job.placement is not None and step.agent.name in job.placement.nodes
    if held and step.action.exit_code != job.verdict.exit_code:
        return f"{step.agent.name} leaves with {step.action.exit_code}, the verdict is {job.verdict.exit_code}"
    return None


def _is_free(step: NodeStep, job: JobState | None) -> bool:
    """It holds no ranks, or was asked to leave, as the store or the agent itself has it."""
    if job is None:
        return False
    spare = job.placement is not None and step.agent.name not in job.placement.nodes
    return spare or job.leaving.get(step.agent.name) == step.agent.incarnation


NODE: tuple[NodeInvariant, ...] = (
    nothing_old_runs_at_a_start,
    one_process_per_rank,
    starts_are_decided,
    kills_are_decided,
    acknowledgements_are_true,
    acknowledgements_are_final,
    nobody_leaves_living_ranks,
    everyone_leaves_with_the_verdict,
)
