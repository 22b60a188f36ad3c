"""One launch (one generation) in the fake world: an agent on every machine, the store between them, whoever governs, the training inside.

It connects the production machines with their fakes and shows the checks every step; it begins when a scheduler starts it and ends when every agent
has left. What the machines say here is what they would say on a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ft_launcher.core import actions as do
from ft_launcher.core import events as ev
from ft_launcher.core.evidence import Address, NodeInfo, RankProgress
from ft_launcher.core.node import NodeOptions
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.checks import NodeStep
from ft_launcher.sim.clock import Clock
from ft_launcher.sim.etcd import Entry, Etcd
from ft_launcher.sim.government import Government
from ft_launcher.sim.host import Host
from ft_launcher.sim.nursery import Exit, Nursery, Proc
from ft_launcher.sim.peers import Peers
from ft_launcher.sim.presence import Presence
from ft_launcher.sim.reruns import Reruns
from ft_launcher.sim.training import Calls, LockStep
from ft_launcher.sim.truth import Truth, where
from ft_launcher.sim.watchman import Watchman

if TYPE_CHECKING:
    from ft_launcher.sim.world import World


class Launch:
    """`generation` counts launches; `signals` are the stop signals that agents have received, `stop_from` since when those that held ranks; `live` every rank process by rank.

    `ghosts` are superseded cycles that train on; `asked_for_nothing`: ranks have left with 16 and no checkpoint says why.
    """

    def __init__(self, world: World, generation: int) -> None:
        self.world = world
        self.clock: Clock = world.clock
        self.noise: random.Random = world.noise
        self.generation = generation
        self.ttl_s = world.setting.platform.ttl_s
        self.alone = len(world.hosts) == 1
        self.signals: list[int] = []
        self.agents: dict[str, Agent] = {}
        self.presences: dict[str, Presence] = {}
        self.watchmen: dict[str, Watchman] = {}
        self.truth = Truth()
        self.stores: set[Address] = set()
        self.step: LockStep | None = None
        self.ghosts: dict[int, LockStep] = {}
        self.live: dict[int, list[tuple[str, Proc]]] = {}
        self.unfit_since: dict[str, float] = {}
        self.lease_gone_at: dict[str, float] = {}
        self.shaken_at = -1e9
        self.over = False
        self.stop_from: dict[str, float] = {}
        self.asked_for_nothing = False
        self._placed: tuple[str, ...] = ()
        self._starting = 0
        self._alive: set[str] = set()
        platform = world.setting.platform
        self.store = Etcd(self.clock, self.noise, platform.store_s, platform.store_timeout_s, platform.compacts)
        self.gov = Government(self)
        self.peers = Peers(self)
        self.reruns = Reruns(self)
        self.began_at = self.clock.now
        self._first = self.gov.first_state()
        self.store.watch_all = self._on_key
        world.lessons.publish = lambda limits: self._publish(limits)

    @property
    def state(self) -> JobState:
        """The job state as the store has it."""
        entry = self.store.keys.get("job")
        return entry.value if entry is not None else self._first

    @property
    def done(self) -> bool:
        """The verdict is written."""
        return self.state.phase is Phase.DONE

    def earned(self) -> int:
        """How many restarts the running cycle can have given back by now."""
        stretch_s = self.world.setting.options.healthy_stretch_s
        return int((self.clock.now - self.truth.began_at) // stretch_s) if stretch_s > 0 else 0

    def begin(self) -> None:
        """The scheduler starts an agent on every machine that is there."""
        for host in self.world.hosts:
            self._starting += 1
            self.clock.after(self.noise.uniform(0.0, 0.5) + host.luck.take("late_s"), self._first_start, host)

    def _first_start(self, host: Host) -> None:
        self._starting -= 1
        self.start_agent(host)
        self._finish_if_deserted()

    def start_agent(self, host: Host) -> None:
        """`ft-launch` starts on a machine, unless one of its own runs there already."""
        if not host.up or self.over or host.name in self.agents:
            return
        if host.frozen_until > self.clock.now:
            self.clock.at(host.frozen_until, self.start_agent, host)
            return
        host.boots += 1
        options, setting = self.world.setting.options, self.world.setting
        who = f"{host.name}.{host.boots}"
        devices = host.devices(setting.nproc)
        node = NodeOptions(
            host.name,
            self.generation,
            error_grace_s=options.error_grace_s,
            survivor_grace_s=options.survivor_grace_s,
            incarnation=who,
            devices=devices,
        )
        agent = Agent(self, host, Nursery(self.clock, self.noise, host, setting.platform), node)
        info = NodeInfo(host.name, host.name, setting.nproc, self.generation, order=host.number, devices=devices, incarnation=who)
        presence = Presence(self, agent, info)
        self.agents[host.name], self.presences[host.name] = agent, presence
        self._alive.add(host.name)
        self.watchmen[host.name] = Watchman(agent, setting.script, self.step_of)
        if self.store.reach_at(host) > self.clock.now:
            presence.store_away(self.store.reach_at(host))
        presence.join()
        agent.nursery.start()

    def agent_joined(self, agent: Agent) -> None:
        """It is registered: it follows the published limits, too."""
        watchman = self.watchmen[agent.name]

        def told(key: str, entry: Entry | None, revision: int) -> None:
            if entry is not None:
                watchman.learned = entry.value

        self.store.watch(agent.host, "limits", told)
        told("limits", self.store.keys.get("limits"), 0)
        self.world.count_one(agent)

    def _publish(self, limits: Any) -> None:
        """The controller writes what was learned."""
        governs = self.gov.in_office
        if governs is not None and self.world.setting.script.learn:
            self.store.call(governs.host, lambda: self.store.put("limits", limits), lambda _: None)

    def _on_key(self, key: str, entry: Entry | None) -> None:
        """The truth about registrations and reports, as it is written."""
        if key.startswith("nodes/"):
            name = key.removeprefix("nodes/")
            self.lease_gone_at.pop(name, None)
            if entry is None:
                self.lease_gone_at[name] = self.clock.now
            if name in self.agents:
                self.world.count_one(self.agents[name])
        elif key.startswith("reports/") and entry is not None and entry.value.unfit is not None:
            self.unfit_since.setdefault(entry.value.node_id, self.clock.now)

    # -- the job --------------------------------------------------------------------------------------------------------------------------

    def job_written(self, job: JobState) -> None:
        """Durable: every agent will hear of it."""
        if job.phase is Phase.RUNNING and job.cycle > self.truth.cycle:
            self._cycle_starts(job)
        if job.phase is Phase.DONE:
            self.clock.after(0.0, self._finish_if_deserted)

    def _cycle_starts(self, job: JobState) -> None:
        if job.placement is None:
            return
        if self.step is not None and not self._haunts(self.step):
            self.peers.freeze()
        self.truth = Truth(job.cycle, shows=self.noise.random() < 0.7, began_at=self.clock.now)
        owner = (self.generation, job.cycle)
        self.step = LockStep(self.clock, self.world.setting.script, self.world.storage, len(job.placement.nodes), owner)
        self.world.lessons.begin_cycle()
        self.world.tally.restarts += job.cycle > 0
        placed = job.placement.nodes
        self.stop_from = {name: since for name, since in self.stop_from.items() if name in placed}
        self.world.tally.spares_used += len(set(placed) - set(self._placed)) if self._placed else 0
        self._placed = placed

    def _haunts(self, step: LockStep) -> bool:
        """All ranks of a superseded cycle live on, and train."""
        procs = sum(proc.cycle == self.truth.cycle for ranks in self.live.values() for _, proc in ranks)
        if not step.stepping or procs < self.world.setting.ranks:
            return False
        self.ghosts[self.truth.cycle] = step
        return True

    def step_of(self, cycle: int) -> LockStep | None:
        """The training of a cycle."""
        return self.step if cycle == self.truth.cycle else self.ghosts.get(cycle)

    # -- the agents' surroundings -----------------------------------------------------------------------------------------------------------

    def before_action(self, agent: Agent, action: do.NodeAction) -> None:
        """An action is about to be carried out."""
        self.world.check_node(NodeStep(self, agent, action))
        if isinstance(action, do.Say):
            self.world.trace.note(self.clock.now, agent.name, action.text)

    def handled(self, agent: Agent, event: ev.NodeEvent, actions: Sequence[do.NodeAction]) -> None:
        """A node machine has answered."""
        self.world.trace.fed(self.clock.now, agent.name, event, actions)

    def send_report(self, agent: Agent) -> None:
        """There is a newer report."""
        self.world.count_one(agent)
        self.presences[agent.name].report()

    def ranks_forked(self, agent: Agent, cycle: int) -> None:
        """Its ranks run: they look for the others."""
        for proc in agent.nursery.procs.values():
            self.live.setdefault(proc.rank, []).append((agent.name, proc))
        if self.step is None or cycle != self.truth.cycle:
            return
        step, job = self.step, self.state
        for host in self.world.hosts if self.world.calm_since > self.clock.now else ():
            if host.isolated_until > self.clock.now and job.placement is not None and host.name in job.placement.nodes:
                step.hold(f"{host.name} isolated")
                self.clock.at(host.isolated_until, step.release, f"{host.name} isolated")
        lessons = self.world.lessons
        step.node_started(Calls(lambda: self._first_step(cycle), lambda: self.peers.complete(cycle)))
        if step.met:
            for ghost in self.ghosts.values():
                ghost.sync()
            lessons.listen(step)
            self.reruns.begin_cycle(step)
        self.watchmen[agent.name].begin(cycle, self.state.budgets.client_known)
        self.peers.look_for_others(agent, cycle)

    def _first_step(self, cycle: int) -> None:
        self.peers.first_step(cycle)
        self.world.learn(cycle)

    def rank_gone(self, agent: Agent, proc: Proc, how: Exit) -> None:
        """A process has ended: its peers feel it."""
        self.live[proc.rank] = [(name, other) for name, other in self.live.get(proc.rank, ()) if other is not proc]
        ghost = self.ghosts.pop(proc.cycle, None)
        if ghost is not None:
            if self.step is not None:
                self.step.sync()
            ghost.freeze()
        if proc.cycle != self.truth.cycle:
            return
        self.truth.ended[proc.rank] = how
        if how.code == 0 and self.truth.first_zero_at is None:
            self.truth.first_zero_at = self.clock.now
        if not agent.gone:
            self.peers.lost_one(agent)

    def progress_of(self, agent: Agent, ranks: Sequence[int]) -> dict[int, RankProgress]:
        """Where the ranks of its cycle are; nothing before they have met."""
        return where(self, agent, ranks)

    def findings_of(self, agent: Agent, cycle: int, on_pages: bool) -> dict[int, RerunFinding]:
        """What its ranks' rerun machines said."""
        return self.reruns.told_by(agent, cycle, on_pages)

    def words_lost(self, found: dict[int, RerunFinding]) -> None:
        """The disk has stalled: nobody knows now."""
        if self.truth.finding is not None and self.truth.finding[0] in found:
            self.truth.finding = (self.truth.finding[0], None)

    def read_errors_s(self) -> float:
        """Usually milliseconds; sometimes the disk stalls."""
        return self.noise.uniform(0.001, 0.05) if self.noise.random() < 0.98 else 5.0

    def zygote_changed(self, agent: Agent) -> None:
        """A machine can start ranks, or cannot at the moment."""
        self.world.count_one(agent)

    def signalled(self, number: int, agents: Sequence[Agent]) -> None:
        """Agents get a stop signal; from those that hold ranks it must be heard."""
        self.signals.append(number)
        for agent in agents:
            if agent.nursery.procs:
                self.stop_from.setdefault(agent.name, self.clock.now)

    def store_opened(self, agent: Agent, address: Address) -> None:
        """A standby store listens."""
        self.stores.add(address)

    def stores_closed(self, agent: Agent, addresses: Sequence[Address]) -> None:
        """Standby stores are gone."""
        self.stores.difference_update(addresses)

    # -- standing still -------------------------------------------------------------------------------------------------------------------

    def stands_still(self) -> None:
        """The training does not move any more, or not for now: detectors find out."""
        self.truth.stands_still = True
        if self.truth.since is None:
            self.truth.since = self.clock.now
        for agent in self.peers.agents():
            self.watchmen[agent.name].look()
        self.world.bounds.expect_end(self)

    def moves(self) -> None:
        """It goes on."""
        if self.step is not None and self.step.frozen_at is None and not self.step.held:
            self.truth.since = None
        for agent in self.peers.agents():
            self.watchmen[agent.name].look()

    # -- agents that end --------------------------------------------------------------------------------------------------------------------

    def left(self, agent: Agent, code: int) -> None:
        """An agent has ended; with the last one the launch is over."""
        self.world.trace.note(self.clock.now, agent.name, f"leaves with exit code {code}")
        presence = self.presences.pop(agent.name)
        self._alive.discard(agent.name)
        lines = self._connected(presence)
        presence.end()
        self.gov.agent_gone(agent, silent=False)
        self.gov.controller_gone(agent, lines)
        self._finish_if_deserted()

    def usurped(self, agent: Agent) -> None:
        """Another agent has its node id: it ends, and its ranks with it."""
        self.world.trace.note(self.clock.now, agent.name, "its node id was taken over by another agent: it ends")
        self.lose(agent.host, silent=False)
        self.world.count_usable()

    def store_unreachable(self, agent: Agent) -> None:
        """An agent that has something to write has waited for `--store-timeout`: it ends with 69, its ranks with it. The platform starts it again later."""
        if not agent.live or self.agents.get(agent.name) is not agent or self.over:
            return
        self.world.trace.note(
            self.clock.now, agent.name, f"the store does not answer for {self.store.timeout_s:g} s: it ends with exit code 69"
        )
        self.world.tally.unreachable += 1
        self.world.lost(agent.host, silent=False)
        self.clock.after(self.store.timeout_s, self.world.come_back, agent.host)

    @staticmethod
    def _connected(presence: Presence) -> list[str]:
        controller = presence.controller
        return [name for name, line in controller.liaison.lines.items() if line.up] if controller is not None else []

    def lose(self, host: Host, silent: bool) -> None:
        """The agent on a machine is gone, and everything below it."""
        agent = self.agents.pop(host.name, None)
        self._alive.discard(host.name)
        self.unfit_since.pop(host.name, None)
        self.stop_from.pop(host.name, None)
        presence = self.presences.pop(host.name, None)
        if agent is None:
            return
        if agent.live and presence is not None:
            lines = self._connected(presence)
            if agent.nursery.procs:
                self.truth.lost.add(host.name)
            agent.vanish()
            presence.close()
            self.gov.agent_gone(agent, silent)
            if not silent:
                self.gov.controller_gone(agent, lines)
        self.clock.after(0.0, self._finish_if_deserted)

    def _finish_if_deserted(self) -> None:
        """Nobody is left: done, or (all agents lost) for a scheduler to start again."""
        if not self.over and not self._starting and not self._alive:
            self.over = True
            self.world.launch_over(self)
