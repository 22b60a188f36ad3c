"""What must be true when a node is declared lost, or a cycle ended: compared with who really is there, who can be reached, and what happened.

The rules are those of docs/design.md section 6, stated anew: nobody is lost who has a lease, or answers, or trains on (for ten lease times); nobody who is gone is kept for
longer; and losing a controller is no reason to touch anybody's ranks.
"""

from __future__ import annotations

from ft_launcher.core.events import NodeLost
from ft_launcher.core.membership import Rules
from ft_launcher.core.state import Phase
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.checks import JobInvariant, JobStep
from ft_launcher.sim.job_invariants import commits

LATELY_S = 4.0
"""Who was out of reach within this may not have been able to answer."""
SHAKEN_S = 30.0
"""A zygote's death may be told in the cycle after."""
SAME_S = 0.01


def _out_of_reach(step: JobStep, agent: Agent, within_s: float) -> bool:
    """It could not answer this controller at some moment of the last seconds."""
    launch, host = step.launch, step.controller.host
    then = launch.clock.now - within_s
    until = max(agent.life.until, agent.host.isolated_until, host.isolated_until, agent.host.lossy_until, host.lossy_until)
    return max(until, launch.gov.network.cut_until(host, agent.host)) > then


def the_lost_are_gone(step: JobStep) -> str | None:
    """A node whose agent lives is declared lost only when it has no lease, could not be reached, and nobody trained on (or for ten lease times)."""
    event, launch = step.event, step.launch
    agent = launch.agents.get(event.node_id) if isinstance(event, NodeLost) else None
    if agent is None or not agent.live or launch.alone or not isinstance(event, NodeLost):
        return None
    given = step.before.incarnations.get(event.node_id)
    if given is not None and given != agent.incarnation:
        return None
    now, presence = launch.clock.now, launch.presences[event.node_id]
    if not presence.joined or now - presence.joined_at < LATELY_S:
        return None  # it was its predecessor that was lost
    gone_at = launch.lease_gone_at.get(event.node_id)
    if not _out_of_reach(step, agent, LATELY_S):
        return f"{event.node_id} is declared lost ({event.reason}), but its agent lives and can be reached"
    if gone_at is None and f"nodes/{event.node_id}" in launch.store.keys and _leased_long(step, event.node_id):
        return f"{event.node_id} is declared lost ({event.reason}), but its agent has a lease"
    return _trained_on(step, event)


def _leased_long(step: JobStep, name: str) -> bool:
    """The controller must have heard of the registration."""
    launch = step.launch
    entry = launch.store.keys[f"nodes/{name}"]
    return entry.modified <= launch.store.modified("job") or launch.clock.now - launch.gov.since > LATELY_S


def _trained_on(step: JobStep, event: NodeLost) -> str | None:
    """This controller has been told of a step that was begun after it knew that the lease had ended."""
    since, now = step.controller.unleased.get(event.node_id), step.launch.clock.now
    if (
        since is None
        or now - since >= Rules(step.launch.ttl_s).patience * step.launch.ttl_s
        or step.controller.step_heard <= since + SAME_S
    ):
        return None
    return f"{event.node_id} is declared lost ({event.reason}), but a step begun {step.controller.step_heard - since:.1f} s after its lease ended was completed"


def cycles_end_for_a_reason(step: JobStep) -> str | None:
    """A running cycle is ended only when something has happened to it: never because its controller is another one."""
    launch, truth, before = step.launch, step.launch.truth, step.before
    ends = before.phase is Phase.RUNNING and any(job.phase is Phase.ENDING and job.cycle == before.cycle for job in commits(step))
    if not ends or truth.cycle != before.cycle or before.placement is None:
        return None
    known = truth.hurt or truth.platform or truth.ended or truth.lost or truth.hung or truth.stands_still
    known = known or launch.clock.now - launch.shaken_at < SHAKEN_S
    known = known or launch.clock.now - launch.world.calm_since < launch.ttl_s * (Rules(launch.ttl_s).patience + 2)
    agents = [launch.agents.get(name) for name in before.placement.nodes]
    whole = all(agent is not None and agent.live and agent.incarnation == before.incarnations.get(agent.name) for agent in agents)
    unfit = any(name in launch.unfit_since for name in before.placement.nodes)
    if known or not whole or unfit:
        return None
    return f"nothing has happened to cycle {before.cycle}, but it is ended: {step.after.reason}"


def victims_cost_nothing(step: JobStep) -> str | None:
    """Where a node was lost and nobody else did anything wrong, no restart is charged."""
    truth = step.launch.truth
    charged = step.after.budgets.restarts > step.before.budgets.restarts
    innocent = truth.lost and not truth.hurt and not truth.hung and not truth.platform and truth.first_zero_at is None
    return f"{sorted(truth.lost)} was lost, but a restart is charged: {step.after.reason}" if charged and innocent else None


MEMBERSHIP: tuple[JobInvariant, ...] = (the_lost_are_gone, cycles_end_for_a_reason, victims_cost_nothing)
