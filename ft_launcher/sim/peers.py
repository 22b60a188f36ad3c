"""What ranks do to each other: one gone or standing still, and the others fail or wait; all complete, and they leave.

Only the consequences of a fault are here, as the kernel, the collectives and the monitoring would bring them about within milliseconds or after a
timeout. It decides nothing and tells the controller nothing but what agents would see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.events import ProgressSeen
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.nursery import Exit, Proc

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch

VICTIM_STAMPS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]:34561",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a network error",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer",
    "torch.distributed.DistNetworkError: recvValue failed on socket: Broken pipe",
)
PROGRESS_EVERY_S = 1.0
TELLERS = 64
NO_STORE_STAMP = "torch.distributed.DistNetworkError: The client socket has failed to connect: Connection refused"
NOT_MET_STAMP = "torch.distributed.DistStoreError: Timed out waiting for clients"


class Peers:
    """The ranks of the running cycle of one launch, as each other's fate."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._noise = launch.noise
        self._clock = launch.clock
        self._told: dict[str, tuple[float, tuple[int, int]]] = {}

    def freeze(self) -> bool:
        """The lock-step stands still from now on; False when it did already."""
        step = self._launch.step
        if step is None or step.frozen_at is not None or step.complete:
            return False
        self._launch.world.tally.lost_steps += step.freeze()
        return True

    def agents(self) -> list[Agent]:
        """The live agents of the placement, in rank order."""
        placement = self._launch.state.placement
        found = [self._launch.agents.get(name) for name in placement.nodes] if placement is not None else []
        return [agent for agent in found if agent is not None and agent.live]

    # -- one is missing -----------------------------------------------------------------------------------------------------------------

    def lost_one(self, agent: Agent) -> None:
        """A process has ended: the connections of the others break, or (some transports) they wait for ever."""
        if not self.freeze():
            return
        client = self._launch.world.setting.script.client
        if client and self._noise.random() < 0.25:
            self._launch.stands_still()
        else:
            self._break(self._launch.truth.cycle)

    def stand_still(self) -> None:
        """A rank hangs, or a machine is silent: the others wait."""
        if self.freeze():
            self._launch.stands_still()

    def _break(self, cycle: int) -> None:
        for agent in self.agents():
            self._clock.after(self._noise.uniform(0.0005, 0.012), self._broken, agent, cycle)

    def _broken(self, agent: Agent, cycle: int) -> None:
        linger_s = self._noise.uniform(0.02, 1.5)
        for proc in self.procs(agent, cycle):
            agent.nursery.leave(proc, linger_s + 0.001 * (proc.rank % 7), Exit(code=1), self._noise.choice(VICTIM_STAMPS))

    @staticmethod
    def procs(agent: Agent, cycle: int) -> list[Proc]:
        """The processes of a cycle on one node, in rank order."""
        return [proc for proc in sorted(agent.nursery.procs.values(), key=lambda p: p.rank) if proc.cycle == cycle]

    # -- meeting ------------------------------------------------------------------------------------------------------------------------

    def look_for_others(self, agent: Agent, cycle: int) -> None:
        """Ranks that were just forked need the store and each other, and fail without, sooner or later."""
        launch = self._launch
        master = launch.state.master
        if launch.step is not None and launch.step.frozen_at is not None:
            self._clock.after(self._noise.uniform(0.5, 5.0), self._broken, agent, cycle)
        elif master is not None and master.serving and master not in launch.stores:
            launch.truth.platform = True
            self._clock.after(self._noise.uniform(0.5, 5.0), self._fail, agent, cycle, NO_STORE_STAMP)
        elif not launch.world.setting.script.client:
            self._clock.after(launch.world.setting.script.setup_timeout_s, self._not_met, agent, cycle)

    def _fail(self, agent: Agent, cycle: int, stamp: str) -> None:
        if cycle == self._launch.truth.cycle:
            self.freeze()
        for proc in self.procs(agent, cycle):
            agent.nursery.leave(proc, self._noise.uniform(0.02, 0.5), Exit(code=1), stamp)

    def _not_met(self, agent: Agent, cycle: int) -> None:
        """Without a client to be seen by: the ranks give up by themselves."""
        launch = self._launch
        if cycle == launch.truth.cycle and launch.step is not None and not launch.step.met and agent.live:
            self._fail(agent, cycle, NOT_MET_STAMP)

    # -- going well ---------------------------------------------------------------------------------------------------------------------

    def first_step(self, cycle: int) -> None:
        """Every agent sees its ranks step. Later progress is told where somebody is in doubt: no rule reads more of it while all ranks run."""
        if self._launch.world.setting.script.client:
            for agent in self.agents():
                agent.life.after(self._noise.uniform(0.0, 0.1), self._tell_progress, agent, cycle, 1)

    def tell_all(self) -> None:
        """What every agent tells once a second, where it is something new; of thousands, some that are spread over all of them."""
        launch = self._launch
        step, cycle = launch.step, launch.truth.cycle
        if step is None or not step.stepping or not launch.world.setting.script.client:
            return
        steps, agents = step.steps(), self.agents()
        for agent in agents[:: max(1, len(agents) // TELLERS)]:
            told_at, told = self._told.setdefault(agent.name, (self._clock.now - self._noise.random(), (0, 0)))
            if steps and told != (cycle, steps) and self._clock.now - told_at >= PROGRESS_EVERY_S:
                self._told[agent.name] = (self._clock.now, (cycle, steps))
                agent.life.after(self._noise.uniform(0.0, 0.1), self._tell_progress, agent, cycle, steps)

    def _tell_progress(self, agent: Agent, cycle: int, steps: int) -> None:
        step, launch = self._launch.step, self._launch
        if step is None or not agent.live or agent.machine.cycle != cycle or cycle != launch.truth.cycle:
            return
        if len(self.procs(agent, cycle)) == launch.world.setting.nproc:
            launch.gov.tell(agent, ProgressSeen(agent.name, cycle, step.base + steps, steps, step.began_ago_s()))

    def complete(self, cycle: int) -> None:
        """The training is done: every rank leaves with 0, some nodes' later than others'."""
        if cycle != self._launch.truth.cycle:
            return
        self._launch.world.tally.runs_completed += 1
        for agent in self.agents():
            luck = agent.host.luck
            late_s, trains = luck.take("finish_late_s"), bool(luck.take("finish_trains"))
            self._clock.after(late_s + self._noise.uniform(0.0, 2.0), self._leave_all, agent, cycle)
            if late_s and trains and self._launch.world.setting.script.client:
                self._train_on(agent, cycle, 2, self._clock.now + late_s)

    def _train_on(self, agent: Agent, cycle: int, steps: int, until: float) -> None:
        """A straggler still steps, as its agent sees."""
        if self._clock.now < until and agent.live:
            self._tell_progress(agent, cycle, steps)
            agent.life.after(2.0, self._train_on, agent, cycle, steps + 1, until)

    def _leave_all(self, agent: Agent, cycle: int) -> None:
        for proc in self.procs(agent, cycle):
            agent.nursery.leave(proc, self._noise.uniform(0.01, 0.5), Exit(code=0))
