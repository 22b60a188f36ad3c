"""What must hold after every event of the job machine, whatever happened to it.

The rules are stated anew here, from the design and not from the code that they judge. Some compare with the truth of the fake world, which the
machine cannot see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ft_launcher.core.actions import Commit, RecordDecision
from ft_launcher.core.events import ProgressSeen, ReportReceived, TimerFired
from ft_launcher.core.placement import Placement, moved
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.checks import JobInvariant, JobStep

STATE_MAX_BYTES = 256 * 1024
_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.DRAINING, Phase.ENDING, Phase.PAUSED, Phase.RUNNING, Phase.DONE}),
    Phase.DRAINING: frozenset({Phase.ENDING, Phase.PAUSED, Phase.RUNNING, Phase.DONE}),
    Phase.ENDING: frozenset({Phase.PAUSED, Phase.RUNNING, Phase.DONE}),
    Phase.PAUSED: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""Which phase may follow which; several at once where one event settles all."""


def placement_is_a_bijection(step: JobStep) -> str | None:
    """Every rank has one place and every place one rank; the world never changes; survivors keep their places."""
    old, new = step.before.placement, step.after.placement
    if new is old or new is None:
        return None if new is old else "the placement is gone"
    new.validate()
    if new.world != step.launch.world.setting.ranks:
        return f"{new.world} ranks are placed, not {step.launch.world.setting.ranks}"
    if old is None:
        return None
    return survivors_moved(old, new, (step.before, step.after))


def survivors_moved(old: Placement, new: Placement, states: Sequence[JobState]) -> str | None:
    """Only ranks of replaced nodes move; and, within its node, whoever shares it with a rank whose result is in doubt."""
    for rank in moved(old, new):
        node = old.node_of(rank)
        exchanged = node in new and new.position_of(node) != old.position_of(node) and any(job.rerun is not None for job in states)
        if node not in new or exchanged:  # with a result in dispute a whole node may go elsewhere
            continue
        if new.node_of(rank) != node or not any(_in_doubt(job, new, node) for job in states):
            return f"rank {rank} has moved although its node {node} stays"
    return None


def _in_doubt(job: JobState, placement: Placement, node: str) -> bool:
    """The result of a rank of this node is disputed, or was spoiled by a device in quarantine; or nobody knows whose is."""
    if job.rerun is not None and not job.rerun.suspects:
        return True
    ranks = {*(job.rerun.suspects if job.rerun is not None else ()), *(r.rank for r in job.hardware.values() if r.quarantined)}
    return any(rank is not None and placement.node_of(rank) == node for rank in ranks)


def cycles_only_grow(step: JobStep) -> str | None:
    """The cycle number goes up by one with a start, and never otherwise."""
    old, new = step.before.cycle, step.after.cycle
    if new == old or (new == old + 1 and step.after.phase is Phase.RUNNING):
        return None
    return f"cycle {old} became {new} in phase {step.after.phase}"


def an_old_cycle_has_no_effect(step: JobStep) -> str | None:
    """What belongs to a cycle that is over, or to another launch, changes nothing and causes nothing."""
    event, before = step.event, step.before
    if isinstance(event, TimerFired | ProgressSeen):
        old = event.cycle != before.cycle
    elif isinstance(event, ReportReceived):
        placed = before.placement.nodes if before.placement else ()
        node = event.report.node_id
        superseded = node in placed and node not in before.lost and event.report.cycle < before.cycle
        old = event.report.generation != before.generation or superseded
    else:
        return None
    if old and (step.actions or step.after != before):
        return f"{type(event).__name__} of an old cycle led to {[type(a).__name__ for a in step.actions]}"
    return None


def a_repeated_report_has_no_effect(step: JobStep) -> str | None:
    """What was heard before, or is older than what was heard, changes nothing."""
    event = step.event
    if not isinstance(event, ReportReceived):
        return None
    report, heard = event.report, step.controller.heard.get(event.report.node_id)
    again = heard is not None and heard[0] == report.incarnation and report.sequence <= heard[1]
    if again and (step.actions or step.after != step.before):
        return f"report {report.sequence} of {report.node_id} came again and led to {[type(a).__name__ for a in step.actions]}"
    return None


def budgets_hold(step: JobStep) -> str | None:
    """No more restarts than allowed; what has been used is given back for healthy stretches only, moves and verdicts about wrong numbers for any progress."""
    old, new, options = step.before.budgets, step.after.budgets, step.launch.world.setting.options
    if new is old:
        return None
    if new.restarts > options.max_restarts:
        return f"{new.restarts} restarts were charged, {options.max_restarts} allowed"
    earned = step.launch.earned()
    further = new.best_iteration != old.best_iteration or new.best_steps > old.best_steps or new.stuck_cycles == 0
    reruns_back = new.reruns < old.reruns - earned and not further
    if new.restarts < old.restarts - earned or new.platform < old.platform - earned or reruns_back:
        return f"restarts {old.restarts} -> {new.restarts}, platform {old.platform} -> {new.platform}: a budget came back"
    if new.restarts > old.restarts + 1:
        return f"{new.restarts - old.restarts} restarts were charged at once"
    return None


def durable_before_acting(step: JobStep) -> str | None:
    """A change is committed, first of all, and the last commit is what is remembered."""
    commits = [i for i, action in enumerate(step.actions) if isinstance(action, Commit)]
    if step.after == step.before and not commits:
        return None
    if not commits:
        return f"{type(step.event).__name__} changed the state without a commit"
    last = step.actions[commits[-1]]
    if commits[0] != 0:
        return f"{type(step.actions[0]).__name__} comes before the commit"
    if isinstance(last, Commit) and last.job != step.after:
        return "the last commit is not the state that is remembered"
    return None


def the_state_survives_json(step: JobStep) -> str | None:
    """What is written can be read, is the same, and is small enough for one key."""
    for job in commits(step):
        text = json.dumps(job.to_json())
        if JobState.from_json(json.loads(text)) != job:
            return f"cycle {job.cycle} in phase {job.phase} reads back as something else"
        if len(text) > STATE_MAX_BYTES:
            return f"the job state takes {len(text)} bytes"
    return None


def phases_follow_each_other(step: JobStep) -> str | None:
    """Only the changes of phase that the design knows; done is for ever."""
    old, new = step.before.phase, step.after.phase
    if new is old and old is not Phase.DONE:
        return None
    if new is not old and new in _NEXT[old]:
        return None
    return f"{old} became {new}" if new is not old or step.after != step.before else None


def commits(step: JobStep) -> list[JobState]:
    """The states that this event made durable, in order."""
    return [action.job for action in step.actions if isinstance(action, Commit)]


def decisions_have_reasons(step: JobStep) -> str | None:
    """Every decision says in one sentence, with a number, what was decided by which rule."""
    for action in step.actions:
        if not isinstance(action, RecordDecision):
            continue
        if not 1 <= action.rule <= 10 or not action.reason.strip() or "\n" in action.reason:
            return f"rule {action.rule} decided {action.decision} because of {action.reason!r}"
        if not any(char.isdigit() for char in action.reason) and action.rule not in (1, 6):
            return f"rule {action.rule} gives no number: {action.reason!r}"
    return None


JOB: tuple[JobInvariant, ...] = (
    placement_is_a_bijection,
    cycles_only_grow,
    an_old_cycle_has_no_effect,
    a_repeated_report_has_no_effect,
    budgets_hold,
    durable_before_acting,
    the_state_survives_json,
    phases_follow_each_other,
    decisions_have_reasons,
)
