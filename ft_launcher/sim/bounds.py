"""What must have happened by a certain time: a training that stands still is ended, an agent that is gone is noticed.

Each is planned when its cause occurs, and put off while the platform is in trouble. It knows limits and the truth, and decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.membership import Rules
from ft_launcher.core.state import Phase
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.training import LockStep

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch
    from ft_launcher.sim.world import World

NOTICED_S = 10.0
CALM_S = 60.0
"""So long after the last trouble of the platform everything that was heard late has been heard."""


class Bounds:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def expect_end(self, launch: Launch) -> None:
        """The training stands still: its cycle must end within the limit of where it stands, and a bound."""
        step = launch.step
        if step is not None and self._world.setting.script.client:
            self._world.clock.after(self._limit_s(step) + CALM_S, self._still_there, launch, step)

    def _limit_s(self, step: LockStep) -> float:
        """What the user has allowed where it stands; nothing learned exceeds it."""
        script = self._world.setting.script
        return {"step": script.step_timeout_s, "checkpointing": script.save_timeout_s}.get(
            step.page().section or "", script.setup_timeout_s
        )

    def _still_there(self, launch: Launch, step: LockStep) -> None:
        now, truth, limit_s = self._world.clock.now, launch.truth, self._limit_s(step)
        if launch.over or launch.step is not step or launch.state.phase is not Phase.RUNNING or launch.state.cycle != truth.cycle:
            return
        if truth.since is None or step.complete:
            return
        due_at = max(truth.since + limit_s, self._world.calm_since + limit_s, launch.gov.since) + CALM_S
        if due_at > now:
            self._world.clock.at(due_at + 0.1, self._still_there, launch, step)
        elif launch.peers.agents():
            self._world.violated(
                "hangs_are_ended", f"cycle {truth.cycle} has stood still for {now - truth.since:.0f} s, {limit_s:g} s allowed"
            )

    def expect_loss(self, launch: Launch, agent: Agent) -> None:
        """An agent that held ranks is gone: the others must notice."""
        self._world.clock.after(
            2 * launch.ttl_s + NOTICED_S,
            self._noticed,
            launch,
            agent,
            launch.truth.cycle,
            (self._world.troubles, self._world.clock.now + 2 * launch.ttl_s),
        )

    def _noticed(self, launch: Launch, agent: Agent, cycle: int, mark: tuple[int, float]) -> None:
        """Within two lease times; where nobody else can be asked or something else has gone wrong, within all the patience that there is."""
        job, ttl_s = launch.state, launch.ttl_s
        if launch.over or job.phase is not Phase.RUNNING or job.cycle != cycle or job.incarnations.get(agent.name) != agent.incarnation:
            return
        witnesses = sum(a.live and a.life.awake for a in launch.agents.values())
        another = launch.gov.since > mark[1] - 2 * ttl_s
        if self._world.troubles > mark[0] or self._world.calm_since > mark[1] or another or witnesses < 2:
            due_at = max(self._world.calm_since, self._world.clock.now) + (Rules(ttl_s).patience + 2) * ttl_s + NOTICED_S
            self._world.clock.at(
                due_at, self._noticed, launch, agent, cycle, (self._world.troubles, max(self._world.calm_since, self._world.clock.now))
            )
        else:
            self._world.violated(
                "the_gone_are_noticed", f"{agent.name} is gone for {2 * ttl_s + NOTICED_S:g} s or more, and cycle {cycle} still runs"
            )
