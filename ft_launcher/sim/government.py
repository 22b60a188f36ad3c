"""Who governs a simulated launch: the controllers that there are, their ears, and what they write.

Several may think that they govern at the same time (one was frozen, one is cut off); the store decides. A decision is checked against the truth at the moment it is taken,
and counts when it is written: what a deposed controller wanted and could not write harms nobody. It knows agents and their hosts, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ft_launcher.core import actions as do
from ft_launcher.core import events as ev
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.job import JobMachine
from ft_launcher.core.membership import Reply, Rules
from ft_launcher.core.state import JobState
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.checks import CommitStep, JobStep
from ft_launcher.sim.controller import Controller
from ft_launcher.sim.host import Host
from ft_launcher.sim.liaison import Liaison
from ft_launcher.sim.network import Network
from ft_launcher.sim.presence import Presence

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch

GONE_S = 0.05
"""A closed connection is felt within this."""


class Government:
    """`controllers`: all that ever were, oldest first. `since`: when the newest took office."""

    def __init__(self, launch: Launch) -> None:
        self.store = launch.store
        self.alone = launch.alone
        self.network = Network(launch.clock, launch.noise, launch.agents.get)
        self.controllers: list[Controller] = []
        self.written: tuple[int, JobState] | None = None
        self.since = launch.clock.now
        self._launch = launch

    @property
    def in_office(self) -> Controller | None:
        """Whoever holds the leader key, as the store has it."""
        term = self.store.created("leader")
        return next((c for c in reversed(self.controllers) if c.term == term and not c.closed), None) if term else None

    # -- controllers ----------------------------------------------------------------------------------------------------------------------

    def appoint(self, presence: Presence, term: int) -> Controller:
        """An agent has taken the office."""
        agent, launch = presence.agent, self._launch
        controller = Controller(self, agent.host, agent.life, term)
        controller.listen(Liaison(self, agent.host, agent.life, Rules(launch.ttl_s), controller.offer))
        if self.controllers:
            launch.world.trace.note(launch.clock.now, "controller", f"{agent.name} takes over")
            launch.world.tally.successions += 1
        self.controllers.append(controller)
        self.since = launch.clock.now
        return controller

    def fresh_machine(self, state: JobState) -> JobMachine:
        """See Desk."""
        setting = self._launch.world.setting
        return JobMachine(state, setting.topology, setting.options)

    def first_state(self) -> JobState:
        """See Desk."""
        world = self._launch.world
        return JobState("sim", self._launch.generation, hardware=world.ledger, rerun=world.dispute, rerun_verdict=world.rerun_verdict)

    def judged(self, controller: Controller, before: JobState, event: ev.JobEvent, actions: Sequence[do.JobAction]) -> Callable[[], None]:
        """See Desk. Without the office only what is true of every controller is checked."""
        launch = self._launch
        launch.world.trace.fed(launch.clock.now, "controller", event, actions)
        step = JobStep(launch, controller, before, controller.machine.state, event, actions)
        found = launch.world.look_at_job(step, governs=self.store.created("leader") == controller.term)
        if isinstance(event, ev.ReportReceived):
            controller.heard[event.report.node_id] = (event.report.incarnation, event.report.sequence)
        return lambda: launch.world.judge(found)

    def committed(self, controller: Controller, job: JobState) -> None:
        """See Desk."""
        before, self.written = self.written, (controller.term, job)
        launch = self._launch
        launch.world.check_commit(CommitStep(launch, controller.term, job, before, loading=not controller.loaded))
        launch.job_written(job)

    def performed(self, action: do.JobAction) -> None:
        """See Desk."""
        world, now = self._launch.world, self._launch.clock.now
        match action:
            case do.Say():
                world.trace.note(now, "controller", action.text)
            case do.RecordDecision():
                world.tally.decided(action)
                world.lessons.decided(action)
            case do.RecordRecovery():
                world.tally.recovered(action)
                if action.complete:
                    world.trace.note(now, "controller", f"all ranks stepped again {action.seconds:.3f} s after the fault")

    def controller_ended(self, controller: Controller, why: str) -> None:
        """See Desk."""
        launch = self._launch
        launch.world.trace.note(launch.clock.now, "controller", f"{controller.host.name} governs no more: {why}")
        presence = launch.presences.get(controller.host.name)
        if presence is not None and presence.controller is controller:
            presence.deposed()

    def store_unreachable(self, controller: Controller) -> None:
        """See Desk."""
        presence = self._launch.presences.get(controller.host.name)
        if presence is not None and presence.controller is controller:
            self._launch.store_unreachable(presence.agent)

    # -- what the ears need -----------------------------------------------------------------------------------------------------------------

    def host_of(self, name: str) -> Host:
        """See Around."""
        return self._launch.world.host(name)

    def awake(self, name: str, incarnation: str) -> bool:
        """See Around."""
        agent = self._launch.agents.get(name)
        return agent is not None and agent.live and agent.life.awake and agent.incarnation == incarnation

    def tell_progress(self) -> None:
        """See Around."""
        self._launch.peers.tell_all()

    def kept(self, name: str, reason: str) -> None:
        """See Around."""
        self._launch.world.trace.note(self._launch.clock.now, "controller", f"node {name}: {reason}")
        self._launch.world.tally.kept += 1

    def tell(self, agent: Agent, seen: ev.ProgressSeen) -> None:
        """Progress: to our own controller, or down the channel to every one that is connected."""
        own = self._launch.presences[agent.name].controller
        if own is not None:
            own.offer(seen)
            return
        for controller in self.controllers[-2:]:
            line = controller.liaison.lines.get(agent.name) if not controller.closed else None
            if line is not None and line.up and line.node.incarnation == agent.incarnation:
                self.network.send(agent.host, controller.host, self._hear, controller, seen)

    def _hear(self, controller: Controller, seen: ev.ProgressSeen) -> None:
        presence = self._launch.presences.get(controller.host.name)
        if presence is not None and presence.controller is controller:
            presence.agent.life.soon(self._progressed, controller, seen)

    @staticmethod
    def _progressed(controller: Controller, seen: ev.ProgressSeen) -> None:
        controller.hear_step(seen.began_ago_s)
        controller.offer(seen)

    def agent_gone(self, agent: Agent, silent: bool) -> None:
        """An agent's process has ended. Its host closes its connections, unless it is gone itself."""
        if silent:
            return
        launch = self._launch
        for controller in self.controllers[-2:]:
            if not controller.closed and controller.host is not agent.host:
                feel_at = self.network.open_at(agent.host, controller.host) + GONE_S * launch.noise.random()
                launch.clock.at(feel_at, self._closed, controller, agent)

    def _closed(self, controller: Controller, agent: Agent) -> None:
        presence = self._launch.presences.get(controller.host.name)
        if presence is not None and presence.controller is controller:
            presence.agent.life.soon(controller.liaison.on_closed, agent.name, agent.incarnation)

    def controller_gone(self, agent: Agent, connected: Sequence[str]) -> None:
        """The host of a controller closes its connections: every agent that was connected feels it."""
        launch = self._launch
        for name in connected:
            presence = launch.presences.get(name)
            if presence is not None and self.network.is_open(agent.host, presence.agent.host):
                presence.agent.life.after(GONE_S * launch.noise.random(), presence.leader_disconnected)

    def reach_leader(self, agent: Agent, leader: NodeInfo, refused: Callable[[], None]) -> None:
        """Is the controller's process gone?"""
        life = agent.life
        self.network.reach(
            agent.host,
            self.host_of(leader.node_id),
            leader.incarnation,
            1.0,
            lambda reply: life.soon(refused) if reply is Reply.REFUSED else None,
        )
