"""What must hold when a launch is over, or when faults have stopped: replay and liveness.

Liveness is judged by the fake world's truth: a job with enough usable machines must run, one that was told to stop must stop, and nobody may be left
waiting for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.actions import Commit
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.checks import LaunchInvariant, WorldInvariant
from ft_launcher.sim.controller import Controller

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch
    from ft_launcher.sim.world import World


def the_journal_replays(launch: Launch) -> str | None:
    """A fresh machine that is given the recorded events arrives at every committed state, and at the last one."""
    for controller in launch.gov.controllers:
        said = _replays(launch, controller) if controller.loaded else None
        if said is not None:
            return said
    return None


def _replays(launch: Launch, controller: Controller) -> str | None:
    setting = launch.world.setting
    machine = JobMachine(controller.first, setting.topology, setting.options)
    machine.begin(controller.began_at)
    replayed: list[JobState] = [machine.state]
    for now, event in controller.journal:
        replayed += [action.job for action in machine.handle(now, event) if isinstance(action, Commit)]
    if machine.state != controller.machine.state:
        return f"{len(controller.journal)} events lead to {machine.state.phase}, not to {controller.machine.state.phase}"
    wrong = next((i for i, (old, new) in enumerate(zip(controller.commits, replayed, strict=False)) if old != new), None)
    return None if wrong is None else f"commit {wrong} of {len(controller.commits)} is another one in the replay"


def a_stop_is_heard(launch: Launch) -> str | None:
    """Once an agent with ranks has received a stop signal, the job is over, or this node has left it, within the grace, a reaping and a little."""
    options, job = launch.world.setting.options, launch.state
    if job.phase is Phase.DONE or job.placement is None:
        return None
    bound_s = options.term_grace_s + 2 * options.reap_s + options.survivor_grace_s + 60
    for name, asked in launch.stop_from.items():
        waited_s = launch.clock.now - max(asked, launch.world.calm_since, launch.gov.since)
        if waited_s > bound_s and name in job.placement.nodes and name not in job.lost:
            return f"a stop signal came {waited_s:.0f} s ago, the job is still {job.phase} and {name} still holds ranks"
    return None


def healthy_or_done(world: World) -> str | None:
    """When faults have stopped, within the stated bound the job steps again or is over with a reason."""
    launch = world.launch
    if world.healthy or launch is None or (launch.over and launch.state.phase is not Phase.DONE):
        return None  # (nobody is left: a scheduler starts it again)
    waited_s = world.clock.now - world.setting.hours * 3600
    if launch.state.phase is Phase.DONE:
        late = sorted(agent.name for agent in launch.agents.values() if agent.live)
        return f"done, but {', '.join(late)} did not leave within {waited_s:.0f} s" if late else None
    return f"{waited_s:.0f} s after the last fault the job is {launch.state.phase} ({launch.state.reason})"


LAUNCH: tuple[LaunchInvariant, ...] = (the_journal_replays,)
WORLD: tuple[WorldInvariant, ...] = (healthy_or_done,)
