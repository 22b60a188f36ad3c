"""One launch (one generation) in the fake world: a controller, an agent on every machine, the store between them, the training inside.

It connects the production machines with their fakes and shows the checks every step; it begins when a scheduler starts it and ends when every agent
has left. What the machines say here is what they would say on a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_launcher.core import actions as do
from ft_launcher.core import events as ev
from ft_launcher.core.evidence import Address, NodeInfo, RankProgress
from ft_launcher.core.job import JobMachine
from ft_launcher.core.node import NodeOptions
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.channel import Channel
from ft_launcher.sim.checks import JobStep, NodeStep
from ft_launcher.sim.clock import Clock
from ft_launcher.sim.controller import Controller
from ft_launcher.sim.host import Host
from ft_launcher.sim.nursery import Exit, Nursery, Proc
from ft_launcher.sim.peers import Peers
from ft_launcher.sim.training import Calls, LockStep

if TYPE_CHECKING:
    from ft_launcher.sim.world import World


@dataclass(slots=True)
class Truth:
    """What really happened in the cycle that runs: who was hurt on purpose, how ranks ended, whether the `platform` (a zygote, a store) broke it, whether
    somebody really `stands_still`. The checks see it, no machine does.
    """

    cycle: int = -1
    hurt: set[int] = field(default_factory=set)
    ended: dict[int, Exit] = field(default_factory=dict)
    first_zero_at: float | None = None
    platform: bool = False
    stands_still: bool = False


class Launch:
    """`generation` counts launches; `signals` are the stop signals that agents have received; `live` every rank process by rank."""

    def __init__(self, world: World, generation: int) -> None:
        self.world = world
        self.clock: Clock = world.clock
        self.noise: random.Random = world.noise
        self.generation = generation
        self.signals: list[int] = []
        self.agents: dict[str, Agent] = {}
        self.truth = Truth()
        self.stores: set[Address] = set()
        self.step: LockStep | None = None
        self.live: dict[int, list[tuple[str, Proc]]] = {}
        self.heard: dict[str, tuple[str, int]] = {}
        self.unfit_since: dict[str, float] = {}
        self.over = False
        self.stop_asked_at: float | None = None
        self._stop_from: set[str] = set()
        self._placed: tuple[str, ...] = ()
        setting = world.setting
        machine = JobMachine(JobState("sim", generation), setting.topology, setting.options)
        self.controller = Controller(self, machine)
        self.channel = Channel(self.clock, self.noise, setting.platform.store_s, self.controller.offer)
        self.peers = Peers(self)
        self.began_at = self.clock.now

    @property
    def state(self) -> JobState:
        """The job machine's state."""
        return self.controller.machine.state

    def begin(self) -> None:
        """The scheduler starts an agent on every machine that is there."""
        self.controller.begin()
        for host in self.world.hosts:
            self.clock.after(self.noise.uniform(0.0, 0.5) + host.luck.take("late_s"), self.start_agent, host)

    def start_agent(self, host: Host) -> None:
        """`ft-launch` starts on a machine, unless one of its own runs there already."""
        if not host.up or self.over or host.name in self.agents:
            return
        host.boots += 1
        options = self.world.setting.options
        who = f"{host.name}.{host.boots}"
        node = NodeOptions(
            host.name, self.generation, error_grace_s=options.error_grace_s, survivor_grace_s=options.survivor_grace_s, incarnation=who
        )
        nursery = Nursery(self.clock, self.noise, host, self.world.setting.platform)
        agent = Agent(self, host, nursery, node)
        self.agents[host.name] = agent
        self.world.count_usable()
        info = NodeInfo(host.name, host.name, self.world.setting.nproc, self.generation, order=host.number, incarnation=who)
        self.channel.register(info, host)
        self.channel.attach(agent)
        nursery.start()

    # -- the controller's desk ------------------------------------------------------------------------------------------------------------

    def judged(self, before: JobState, event: ev.JobEvent, actions: Sequence[do.JobAction]) -> None:
        """The job machine has answered."""
        self.world.trace.fed(self.clock.now, "controller", event, actions)
        self.world.check_job(JobStep(self, before, self.state, event, actions))
        if isinstance(event, ev.ReportReceived):
            self.heard[event.report.node_id] = (event.report.incarnation, event.report.sequence)

    def commit_s(self) -> float:
        """One transaction."""
        return self.channel.delay_s()

    def committed(self, job: JobState) -> None:
        """Durable: now every agent will hear of it."""
        if job.phase is Phase.RUNNING and job.cycle > self.truth.cycle:
            self._cycle_starts(job)
        self.channel.put_job(job)
        self._finish_if_deserted()

    def _cycle_starts(self, job: JobState) -> None:
        if job.placement is None:
            return
        if self.step is not None:
            self.peers.freeze()
        self.truth = Truth(job.cycle)
        self.step = LockStep(self.clock, self.world.setting.script, self.world.storage, len(job.placement.nodes))
        self.world.tally.restarts += job.cycle > 0
        placed = job.placement.nodes
        self.world.tally.spares_used += len(set(placed) - set(self._placed)) if self._placed else 0
        self._placed = placed

    def performed(self, action: do.JobAction) -> None:
        """Something to say or to record."""
        world = self.world
        match action:
            case do.Say():
                world.trace.note(self.clock.now, "controller", action.text)
            case do.RecordDecision():
                world.tally.decided(action)
            case do.RecordRecovery():
                world.tally.recovered(action)
                if action.complete:
                    world.trace.note(self.clock.now, "controller", f"all ranks stepped again {action.seconds:.3f} s after the fault")

    # -- the agents' surroundings -----------------------------------------------------------------------------------------------------------

    def before_action(self, agent: Agent, action: do.NodeAction) -> None:
        """An action is about to be carried out."""
        self.world.check_node(NodeStep(self, agent, action))
        if isinstance(action, do.Report) and action.report.unfit is not None:
            self.unfit_since.setdefault(agent.name, self.clock.now)
        if isinstance(action, do.Say):
            self.world.trace.note(self.clock.now, agent.name, action.text)

    def handled(self, agent: Agent, event: ev.NodeEvent, actions: Sequence[do.NodeAction]) -> None:
        """A node machine has answered."""
        self.world.trace.fed(self.clock.now, agent.name, event, actions)

    def send_report(self, agent: Agent) -> None:
        """There is a newer report."""
        self.channel.report(agent)

    def ranks_forked(self, agent: Agent, cycle: int) -> None:
        """Its ranks run: they look for the others."""
        for proc in agent.nursery.procs.values():
            self.live.setdefault(proc.rank, []).append((agent.name, proc))
        if self.step is None or cycle != self.truth.cycle:
            return
        self.step.node_started(Calls(lambda: self.peers.first_step(cycle), lambda: self.peers.complete(cycle)))
        self.peers.look_for_others(agent, cycle)

    def rank_gone(self, agent: Agent, proc: Proc, how: Exit) -> None:
        """A process has ended: its peers feel it."""
        self.live[proc.rank] = [(name, other) for name, other in self.live.get(proc.rank, ()) if other is not proc]
        if proc.cycle != self.truth.cycle:
            return
        self.truth.ended[proc.rank] = how
        if how.code == 0 and self.truth.first_zero_at is None:
            self.truth.first_zero_at = self.clock.now
        if not agent.gone:
            self.peers.lost_one(agent)

    def progress_of(self, agent: Agent) -> RankProgress | None:
        """Where the ranks of its cycle are; None before its ranks of this cycle have met."""
        step, script = self.step, self.world.setting.script
        if step is None or agent.machine.cycle != self.truth.cycle or not step.met:
            return None
        steps, client = step.steps(), script.client
        iteration = step.base + steps if client and steps else None
        saved = client and step.saved() > step.base
        return RankProgress(iteration, steps if client else 0, "step" if client and steps else None, step.standing_s(), client, saved)

    def read_errors_s(self) -> float:
        """Usually milliseconds; sometimes the disk stalls."""
        return self.noise.uniform(0.001, 0.05) if self.noise.random() < 0.98 else 5.0

    def left(self, agent: Agent, code: int) -> None:
        """An agent has ended; with the last one the launch is over."""
        self.world.trace.note(self.clock.now, agent.name, f"leaves with exit code {code}")
        self.channel.detach(agent)
        self._finish_if_deserted()

    def _finish_if_deserted(self) -> None:
        """Done, and nobody is left."""
        if self.controller.done and not self.over and not any(agent.live for agent in self.agents.values()):
            self.over = True
            self.world.launch_over(self)

    def zygote_changed(self, agent: Agent) -> None:
        """A machine can start ranks, or cannot at the moment."""
        self.world.count_usable()

    def signalled(self, number: int, agents: Sequence[Agent]) -> None:
        """Agents get a stop signal; from those that hold ranks it must be heard."""
        self.signals.append(number)
        self._stop_from |= {agent.name for agent in agents if agent.nursery.procs}
        if self.stop_asked_at is None and self._stop_from:
            self.stop_asked_at = self.clock.now

    def store_opened(self, agent: Agent, address: Address) -> None:
        """A standby store listens."""
        self.stores.add(address)

    def stores_closed(self, agent: Agent, addresses: Sequence[Address]) -> None:
        """Standby stores are gone."""
        self.stores.difference_update(addresses)

    def lose(self, host: Host, reason: str, detect_s: float) -> None:
        """The agent on a machine is gone; the others learn of it `detect_s` seconds later."""
        agent = self.agents.pop(host.name, None)
        self.unfit_since.pop(host.name, None)
        self._stop_from.discard(host.name)
        self.stop_asked_at = self.stop_asked_at if self._stop_from else None
        if agent is None:
            return
        if agent.live:
            agent.vanish()
            self.clock.after(detect_s, self._lost, host, reason)
        self.channel.detach(agent)

    def _lost(self, host: Host, reason: str) -> None:
        self.channel.unregister(host.name, reason)
        self._finish_if_deserted()
