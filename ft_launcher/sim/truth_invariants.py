"""What must be true of the job machine's decisions: they are compared with what really happened in the fake world.

No machine sees this truth: who was hurt, what still runs, which machines are usable. A rule here is about people's trust: the right one is blamed, a healthy node is kept, `finished` means
finished.
"""

from __future__ import annotations

from ft_launcher.core.actions import RecordDecision
from ft_launcher.core.state import Outcome, Phase
from ft_launcher.sim.checks import JobInvariant, JobStep
from ft_launcher.sim.job_invariants import commits

HEARD_S = 60.0
"""A node that was frozen or cut off from the store this recently may have missed its chance."""


def settling_waits_for_every_node(step: JobStep) -> str | None:
    """A cycle is judged only when each node that held ranks of it has nothing left of it, or has been declared lost before."""
    placement = step.before.placement
    if placement is None or not any(isinstance(action, RecordDecision) for action in step.actions):
        return None
    lost = {*step.before.lost, *commits(step)[0].lost}
    for name in placement.nodes:
        agent = step.launch.agents.get(name)
        if agent is not None and name not in lost and any(proc.cycle == step.before.cycle for proc in agent.nursery.procs.values()):
            return f"cycle {step.before.cycle} is judged while {name} still runs {len(agent.nursery.procs)} ranks of it"
    return None


def a_start_waits_for_every_node(step: JobStep) -> str | None:
    """A cycle starts only when each node of the former has nothing left of it, or has been declared lost."""
    if step.after.cycle == step.before.cycle or step.before.placement is None:
        return None
    for name in step.before.placement.nodes:
        agent = step.launch.agents.get(name)
        lost = name in step.before.lost or any(name in job.lost for job in commits(step))
        if agent is not None and agent.nursery.procs and not lost:
            return f"cycle {step.after.cycle} starts while {name} still runs {len(agent.nursery.procs)} ranks of cycle {step.before.cycle}"
    return None


def a_start_needs_live_nodes(step: JobStep) -> str | None:
    """Ranks are placed on nodes that have joined and were not declared lost or unfit since."""
    placement = step.after.placement
    if step.after.cycle == step.before.cycle or placement is None:
        return None
    absent = [name for name in placement.nodes if name not in step.controller.machine.roster.nodes]
    return f"cycle {step.after.cycle} is placed on {absent[0]}, which is not there" if absent else None


def the_guilty_are_blamed(step: JobStep) -> str | None:
    """A crash is charged to a rank that really failed by itself, where one has, and never to those who only lost it."""
    truth = step.launch.truth
    for action in step.actions:
        if not isinstance(action, RecordDecision) or action.cause not in ("crash", "bad start") or action.culprit is None:
            continue
        culprit = action.culprit["rank"]
        seen = [rank for rank in truth.hurt if (e := action.ranks.get(rank)) and e["exit"] is not None and not e["ended"]]
        if len(seen) > 1 and all(action.ranks[rank]["exit"] == 0 for rank in seen):
            continue  # several left with 0: that is how jobs end, too
        if seen and culprit not in truth.hurt:
            return f"rank {culprit} is blamed, but rank {min(seen)} failed first"
        if truth.platform and not truth.hurt:
            return f"rank {culprit} is blamed for what the platform did: {action.reason}"
        if not truth.hurt and culprit in launch_ended(step):
            return f"rank {culprit} is blamed for an exit that the launcher asked for: {action.reason}"
    return None


def hangs_are_real(step: JobStep) -> str | None:
    """A hang is decided only where a rank or a machine really stands still."""
    for action in step.actions:
        if (
            isinstance(action, RecordDecision)
            and action.cause == "hang"
            and not step.launch.truth.stands_still
            and not step.launch.truth.hurt
        ):
            return f"nobody stands still, but it was decided: {action.reason}"
    return None


def the_hanging_are_blamed(step: JobStep) -> str | None:
    """A hang is charged to a rank that stands still by itself, on a machine that does, or to nobody."""
    launch, truth = step.launch, step.launch.truth
    for action in step.actions:
        if not isinstance(action, RecordDecision) or action.cause != "hang" or action.culprit is None or not truth.hung:
            continue
        host = launch.world.host(str(action.culprit["node"]))
        stands = max(host.frozen_until, host.isolated_until) > launch.clock.now - HEARD_S
        if action.culprit["rank"] not in truth.hung | truth.hurt and not stands:
            return f"rank {action.culprit['rank']} is blamed for a hang of rank {min(truth.hung)}: {action.reason}"
    return None


def only_slow_nodes_are_given_up(step: JobStep) -> str | None:
    """A live node is declared lost for not clearing a cycle only when it had something to clear, or could not be heard."""
    now = step.launch.clock.now
    lost = {name: why for job in commits(step) for name, why in job.lost.items()}
    for name in sorted(lost.keys() - step.before.lost.keys()):
        agent = step.launch.agents.get(name)
        if agent is None or not agent.live or not lost[name].startswith("not cleared"):
            continue
        heard_at = max(agent.life.until, agent.host.store_slow_until, step.launch.store.reach_at(agent.host), step.launch.world.calm_since)
        deaf = now - heard_at < HEARD_S
        if not deaf and not agent.nursery.busy and not agent.nursery.too_slow:
            return f"{name} is given up ({lost[name]}), but nothing runs on it"
    return None


def healthy_hardware_is_enough(step: JobStep) -> str | None:
    """`not enough nodes` is said only when too few machines were usable at some moment of the wait."""
    verdict, world = step.after.verdict, step.launch.world
    if verdict is None or verdict.outcome is not Outcome.NOT_ENOUGH_NODES:
        return None
    world.count_usable()
    options = world.setting.options
    waited_s = step.launch.clock.now - (world.enough_since if world.enough_since is not None else step.launch.clock.now)
    if waited_s < min(options.spare_wait_s, options.join_wait_s) - 1.0:
        return None
    return f"{verdict.reason}; but {options.nodes_wanted} usable nodes have been there for {waited_s:.0f} s"


def unfit_nodes_are_not_waited_for(step: JobStep) -> str | None:
    """A cycle does not go on waiting for a node that has said that it cannot take ranks."""
    if step.before.phase is not Phase.RUNNING or step.before.placement is None:
        return None
    for name, since in step.launch.unfit_since.items():
        waited_s = step.launch.clock.now - max(since, step.launch.world.calm_since, step.launch.gov.since)
        if waited_s > HEARD_S and name in step.before.placement.nodes:
            return f"cycle {step.before.cycle} still runs {waited_s:.0f} s after {name} reported itself unfit"
    return None


def launch_ended(step: JobStep) -> set[int]:
    """Ranks that ended by the launcher's own stop signal in a cycle that nobody was told to stop."""
    if step.after.stop_signal is not None:
        return set()
    return {rank for rank, how in step.launch.truth.ended.items() if how.signal in (2, 15)}


def the_verdict_is_true(step: JobStep) -> str | None:
    """Outcome and exit code belong together, and `finished` means that the ranks did."""
    verdict = step.after.verdict
    if step.after.phase is not Phase.DONE:
        return "a verdict before the end" if verdict is not None else None
    if verdict is None:
        return "done without a verdict"
    codes = {Outcome.FINISHED: 0, Outcome.NOT_ENOUGH_NODES: 75, Outcome.NO_PROGRESS: 93, Outcome.RERUN_ELSEWHERE: 16}
    if codes.get(verdict.outcome, verdict.exit_code) != verdict.exit_code or not verdict.reason:
        return f"{verdict.outcome} with exit code {verdict.exit_code}: {verdict.reason!r}"
    if verdict.outcome is Outcome.STOPPED and verdict.exit_code - 128 not in step.launch.signals:
        return f"stopped with exit code {verdict.exit_code}, but the signals were {step.launch.signals}"
    if verdict.exit_code == 0 and verdict.outcome is not Outcome.FINISHED:
        return f"{verdict.outcome} with exit code 0"
    return _finished_is_true(step) if verdict.outcome is Outcome.FINISHED else None


def _finished_is_true(step: JobStep) -> str | None:
    launch = step.launch
    setting = launch.world.setting
    zeros = sum(how.code == 0 for how in launch.truth.ended.values())
    waited_s = launch.clock.now - (launch.truth.first_zero_at or launch.clock.now)
    if zeros == setting.ranks or (zeros and waited_s >= setting.options.exit_grace_s):
        return None
    return f"finished although only {zeros} of {setting.ranks} ranks exited 0, the first {waited_s:.1f} s ago"


TRUTH: tuple[JobInvariant, ...] = (
    settling_waits_for_every_node,
    a_start_waits_for_every_node,
    a_start_needs_live_nodes,
    the_guilty_are_blamed,
    hangs_are_real,
    the_hanging_are_blamed,
    only_slow_nodes_are_given_up,
    healthy_hardware_is_enough,
    unfit_nodes_are_not_waited_for,
    the_verdict_is_true,
)
