"""The simulated world: machines, time, faults, one launch after the other, and the checks at every step.

A scheduler starts the job again after each verdict, as a user would, until the hours are over; then faults stop, and the last launch must become
healthy or be done. All randomness comes from streams of the seed: one for what goes wrong (drawn before), one for how long things take.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from ft_launcher.core.hardware import Dispute, Ledger
from ft_launcher.core.state import Phase
from ft_launcher.errors import BugError
from ft_launcher.sim import custody, end_invariants, inject
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.bounds import Bounds
from ft_launcher.sim.checks import CommitStep, JobStep, NodeStep
from ft_launcher.sim.clock import Clock
from ft_launcher.sim.faults import Fault
from ft_launcher.sim.host import Host, Luck
from ft_launcher.sim.job_invariants import JOB
from ft_launcher.sim.launch import Launch
from ft_launcher.sim.lessons import Lessons
from ft_launcher.sim.membership_invariants import MEMBERSHIP
from ft_launcher.sim.node_invariants import NODE
from ft_launcher.sim.rerun_invariants import RERUN
from ft_launcher.sim.setting import Setting
from ft_launcher.sim.storage import Storage
from ft_launcher.sim.store_invariants import COMMIT
from ft_launcher.sim.tally import Tally, Violation
from ft_launcher.sim.trace import Trace
from ft_launcher.sim.truth_invariants import TRUTH

JOB_CHECKS = (*JOB, *TRUTH, *MEMBERSHIP, *RERUN)
LOOK_S = 15.0
"""After the faults the world looks this often whether the job is healthy."""


class World:
    """`run()` once; then `tally`, `trace` and `violations` tell what came of it. `calm_since`: when the last freeze, cut or outage was over, or will be.

    `ledger`, `dispute` and `rerun_verdict` pass from one launch to the next; `was_bad`, `rejections` and `judges` (suspected device -> the one that was asked) are the truth about devices.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.clock = Clock()
        self.noise = random.Random(f"noise {setting.seed}")
        self.hosts = [
            Host(name, number, self.noise.randrange(10**15), uuids=setting.platform.uuids) for number, name in enumerate(setting.names)
        ]
        self.storage = Storage()
        self.lessons = Lessons(setting.script)
        self.calm_since = 0.0
        self.troubles = 0
        self._learning = 0
        self._usable: set[str] = set()
        self.trace = Trace()
        self.tally = Tally()
        self.violations: list[Violation] = []
        self.launch: Launch | None = None
        self.enough_since: float | None = None
        self.kept_steps = 0
        self.ended = False
        self.bounds = Bounds(self)
        self.ledger: Ledger = {}
        self.dispute: Dispute | None = None
        self.rerun_verdict = ""
        self.was_bad: set[str] = set()
        self.rejections: Counter[str] = Counter()
        self.judges: dict[str, str] = {}
        self._generation = 0

    # -- the course of the world ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All hours, then the time to become healthy. Stops at the first violation: what follows one proves nothing."""
        horizon = self.setting.hours * 3600
        for fault in self.setting.plan:
            self.clock.at(fault.at_s, self._strike, fault)
        self.clock.at(0.0, self._start)
        self._until(horizon)
        self.kept_steps = self.useful_steps()
        self._stop_faults()
        deadline = horizon + self.setting.settle_s
        while not self.clock.halted and not self.settled and self.clock.now < deadline:
            self._until(min(deadline, self.clock.now + LOOK_S))
        self._judge([(check.__name__, check(self)) for check in end_invariants.WORLD])
        if self.launch is not None and not self.violations and not self.launch.over:
            self._end_checks(self.launch)

    def _until(self, when: float) -> None:
        try:
            self.clock.run(when)
        except BugError as bug:
            self.violated("no_impossible_event", str(bug).replace("\n", " | "))
        except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
            self.violated("no_exception", f"{type(error).__name__}: {error}")

    def _start(self) -> None:
        if self.ended:
            return
        self.tally.launches += 1
        self.trace.note(self.clock.now, "scheduler", f"launch {self._generation} starts")
        self.launch = Launch(self, self._generation)
        self._generation += 1
        self.count_usable()
        self.launch.begin()

    def launch_over(self, launch: Launch) -> None:
        """Every agent has left: count, check, and have the scheduler start the next one, while the hours last."""
        verdict = launch.state.verdict
        self.tally.outcomes[verdict.outcome.value if verdict else "deserted"] += 1
        if launch.step is not None:
            launch.peers.freeze()
        self._end_checks(launch)
        custody.inherit(self, launch.state)
        self._count_useful()
        custody.attend(self, launch)
        if not self.ended:
            self.clock.after(self.setting.platform.requeue_s, self._start)

    def _stop_faults(self) -> None:
        """Nothing new goes wrong; what is broken stays broken, or comes back as it would have."""
        for host in self.hosts:
            host.luck, host.store_slow_s = Luck(), 0.0
        self.ended = True
        if self.launch is None or self.launch.over:
            self.launch = None

    @property
    def healthy(self) -> bool:
        """All ranks have completed a step of the running cycle, and none is missing."""
        step = self.launch.step if self.launch is not None else None
        return (
            step is not None and self.launch is not None and self.launch.state.phase is Phase.RUNNING and step.stepping and step.steps() > 0
        )

    @property
    def settled(self) -> bool:
        """Nothing is left to wait for."""
        return self.launch is None or self.launch.over or self.healthy

    # -- faults -----------------------------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if self.ended:
            return
        said = inject.strike(self, fault)
        if said is None:
            self.tally.missed += 1
            return
        self.tally.faults[fault.kind] += 1
        self.trace.note(self.clock.now, "fault", said)
        self.count_usable()

    def count_usable(self) -> None:
        """Note since when enough machines have been usable: up, with an agent, able to start ranks."""
        launch = self.launch
        agents = launch.agents.values() if launch is not None else ()
        self._usable = {agent.name for agent in agents if self._counts(agent)}
        self._note_enough()

    def count_one(self, agent: Agent) -> None:
        """The same where only one node can have changed."""
        if self.launch is None or self.launch.agents.get(agent.name) is not agent:
            return
        (self._usable.add if self._counts(agent) else self._usable.discard)(agent.name)
        self._note_enough()

    def _note_enough(self) -> None:
        if len(self._usable) < self.setting.options.nodes_wanted:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = self.clock.now

    def _counts(self, agent: Agent) -> bool:
        """This node can be used now: it lives, is registered, and reaches the store and the others."""
        launch = self.launch
        presence = launch.presences.get(agent.name) if launch is not None else None
        if launch is None or presence is None or not presence.joined or presence.lease not in launch.store.leases:
            return False
        if (
            not agent.host.up
            or agent.name in launch.state.ruled_out
            or agent.machine.report.signals
            or custody.barred(self, launch, presence)
        ):
            return False
        cut = launch.store.reach_at(agent.host) > self.clock.now or agent.host.frozen_until > self.clock.now
        return agent.live and agent.life.awake and not cut and agent.nursery.usable

    def host(self, name: str) -> Host:
        """A machine by its name."""
        return self.hosts[int(name[1:])]

    def troubled(self, until: float) -> None:
        """The platform is disturbed until then: what takes longer than usual meanwhile is no wonder."""
        self.calm_since = max(self.calm_since, until)
        self.troubles += 1

    def lost(self, host: Host, silent: bool) -> None:
        """The agent of a machine is gone, and its ranks: the others feel it, or wait."""
        launch = self.launch
        agent = launch.agents.get(host.name) if launch is not None else None
        if launch is None or agent is None:
            return
        held = any(proc.cycle == launch.truth.cycle for proc in agent.nursery.procs.values())
        self.troubled(self.clock.now + 2 * launch.ttl_s)
        launch.lose(host, silent)
        self.count_usable()
        if not held:
            return
        self.bounds.expect_loss(launch, agent)
        if silent:
            launch.peers.stand_still()
        else:
            launch.peers.lost_one(agent)

    def come_back(self, host: Host) -> None:
        """An agent is started on a machine, if it is there and has none."""
        if self.launch is not None and not self.launch.over:
            self.launch.start_agent(host)
        self.count_usable()

    # -- lessons ------------------------------------------------------------------------------------------------------------------------------

    def learn(self, cycle: int) -> None:
        """Lessons are taken as long as they teach something."""
        self._learning += 1
        self._take_lesson(cycle, self._learning)

    def _take_lesson(self, cycle: int, turn: int) -> None:
        step = self.launch.step if self.launch is not None else None
        if (
            step is None
            or turn != self._learning
            or self.launch is None
            or cycle != self.launch.truth.cycle
            or not self.setting.script.learn
        ):
            return
        self.lessons.listen(step)
        if step.stepping and (wait_s := self.lessons.next_s()) is not None:
            self.clock.after(wait_s, self._take_lesson, cycle, turn)

    # -- what was achieved --------------------------------------------------------------------------------------------------------------------

    def _count_useful(self) -> None:
        """A complete training is kept for good; the next launch begins a new one."""
        if self.storage.saved >= self.setting.script.steps:
            self.tally.useful_steps += self.setting.script.steps
            self.storage.clear()
            self.dispute, self.rerun_verdict = None, ""

    def useful_steps(self) -> int:
        """All steps that are kept by now: complete trainings, and this one's checkpoints and running cycle."""
        step = self.launch.step if self.launch is not None else None
        current = step.base + step.steps() if step is not None and step.stepping else self.storage.saved
        return self.tally.useful_steps + current

    # -- checks -----------------------------------------------------------------------------------------------------------------------------

    def look_at_job(self, step: JobStep, governs: bool) -> list[tuple[str, str | None]]:
        """After every event of a job machine: what is wrong with its answer. Without the office only what any controller must do right."""
        found = [(check.__name__, check(step)) for check in (JOB_CHECKS if governs else JOB)]
        if step.launch.stop_from and governs:
            found.append(("a_stop_is_heard", end_invariants.a_stop_is_heard(step.launch)))
        return found

    def judge(self, found: list[tuple[str, str | None]]) -> None:
        """What was wrong counts."""
        self._judge(found)

    def check_commit(self, step: CommitStep) -> None:
        """Whenever a job state is written."""
        self._judge([(check.__name__, check(step)) for check in COMMIT])

    def check_node(self, step: NodeStep) -> None:
        """Before every action of a node."""
        for check in NODE:
            said = check(step)
            if said is not None:
                self.violated(check.__name__, said)

    def _end_checks(self, launch: Launch) -> None:
        self._judge([(check.__name__, check(launch)) for check in end_invariants.LAUNCH])

    def _judge(self, found: list[tuple[str, str | None]]) -> None:
        for name, said in found:
            if said is not None:
                self.violated(name, said)

    def violated(self, name: str, said: str) -> None:
        """An invariant is broken: the first one counts, and the world stops."""
        if not self.violations:
            self.violations.append(Violation(name, said, self.clock.now))
            self.trace.note(self.clock.now, "VIOLATION", f"{name}: {said}")
        self.clock.halt()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Plan something of the world's own."""
        self.clock.after(delay_s, act)
