"""Wrong numbers in the fake training: which results are rejected, and what the ranks' rerun machines make of it (the production ones, `rerun/machine.py`).

A rejected step is computed again in place; then all ranks leave with 16 or 17, with a checkpoint that carries the question where another device has to answer it. Two machines stand for
all ranks: the one whose result is disputed, and any other; they agree as all of them would. Whether two computations give the same is the truth's: a faulty device gives wrong numbers of its
own, the same ones every time; a glitch does not come again; an oddity is what every good device computes. Nothing in here decides what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_launcher.core.hardware import device_of
from ft_launcher.core.rerun_report import RerunFinding, RerunStatus
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.nursery import Exit
from ft_launcher.sim.peers import VICTIM_STAMPS
from ft_launcher.sim.training import LockStep
from rerun.machine import RerunMachine
from rerun.words import LoopAsked, RerunMode, RerunState, ResultDiffered, ResultRejected, ResultRepeated, Resumed, SameDevice, StepEnded

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch

DEVICE, GLITCH, ODDITY = "device", "glitch", "oddity"
NOTICED = 0.9
"""Share of a step after which its result is there to be validated."""
STRAGGLE_S = 1.5
"""Ranks that leave together do so within this."""
NO_RECORD, ODD_EXIT = 0.06, 0.15
"""How often nothing of a finding reaches the launcher, and how often some ranks leave otherwise than the rest."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a fault checkpoint carries: whose result, computed on which device, was it the right one (then any good device gets the same)."""

    rank: int
    device: str
    right: bool


@dataclass(slots=True)
class Findings:
    """What ranks said in one cycle, and how it travels: on pages, in the tracker file, or (an unmodified script without one) not at all."""

    by_rank: dict[int, RerunFinding]
    on_pages: bool
    recorded: bool


class Pair:
    """The machine of the rank in question and that of all others."""

    def __init__(self, seasoned: bool) -> None:
        self.suspect, self.other = RerunMachine(RerunMode.VALIDATE_RESULTS), RerunMachine(RerunMode.VALIDATE_RESULTS)
        if seasoned:
            for step in (self.ask, self.ask, self.leave):
                step()

    def ask(self) -> None:
        """The loop's question, which all ranks ask together."""
        both = self.suspect.flags | self.other.flags
        for machine in (self.suspect, self.other):
            machine.handle(LoopAsked(both))

    def resumed(self) -> None:
        """Both have loaded the fault checkpoint."""
        for machine in (self.suspect, self.other):
            machine.handle(Resumed(RerunState.WILL_RERUN_FROM_CHECKPOINT))

    def leave(self) -> tuple[bool, int]:
        """(take a checkpoint, exit code): the same for both."""
        answers = [machine.handle(StepEnded()) for machine in (self.suspect, self.other)]
        found = {(answer.checkpoint, answer.code) for answer in answers}  # type: ignore[union-attr]
        if len(found) > 1:
            raise AssertionError(f"the ranks do not agree on how to leave: {sorted(found)}")
        return found.pop()


class Reruns:
    """Of one launch. `busy`: a step is being computed again in this cycle."""

    def __init__(self, launch: Launch) -> None:
        self.busy = -1
        self.found: dict[int, Findings] = {}
        self._launch = launch
        self._clock = launch.clock
        self._noise = launch.noise

    # -- when a result is rejected ----------------------------------------------------------------------------------------------------------

    def begin_cycle(self, step: LockStep) -> None:
        """All ranks have met: the question that the checkpoint carries is answered first; faulty devices spoil results again."""
        launch, job = self._launch, self._launch.state
        question = launch.world.storage.question
        if question is not None and not job.rerun_verdict:
            self._answer_when_due(step, question)
            return
        for host in launch.world.hosts:
            for slot in sorted(host.bad):
                self.spoil(host.name, slot)

    def spoil(self, node: str, slot: int) -> None:
        """From now on this device computes wrong numbers; some time later that is seen, if a rank is on it."""
        step, host = self._launch.step, self._launch.world.host(node)
        if step is not None and slot in host.bad:
            self._clock.after(self._noise.expovariate(1.0 / host.bad[slot]), self._spoiled, step, node, slot)

    def _spoiled(self, step: LockStep, node: str, slot: int) -> None:
        launch = self._launch
        placement = launch.state.placement
        if step is not launch.step or step.frozen_at is not None or launch.over or slot not in launch.world.host(node).bad:
            return
        if placement is None or node not in placement.nodes or self.reject(placement.rank_at(node, slot), DEVICE) is None:
            self.spoil(node, slot)

    def reject(self, rank: int, why: str) -> str | None:
        """A result of this rank is rejected in the step that is being computed: compute it again. None where nobody validates now."""
        launch, step = self._launch, self._launch.step
        if step is None or not self._computes(step) or step.steps() < 1 or launch.state.placement is None:
            return None
        self.busy = launch.truth.cycle
        launch.truth.disputed = True
        step.hold("rerun")
        self._look()
        again_s = launch.world.setting.script.step_s * step.factor
        self._clock.after(again_s, self._rerun_in_place, step, rank, why)
        return f"a result of rank {rank} on {self.device(rank)} is rejected ({why})"

    def _computes(self, step: LockStep) -> bool:
        launch = self._launch
        ours = step is launch.step and launch.state.cycle == launch.truth.cycle and not launch.over
        return ours and step.stepping and self.busy != launch.truth.cycle

    def device(self, rank: int) -> str:
        """Where the rank computes."""
        launch = self._launch
        placement = launch.state.placement
        node, slot = placement.place(rank) if placement is not None else ("?", 0)
        return device_of({name: p.info.devices for name, p in launch.presences.items()}, node, slot)

    def faulty(self, rank: int) -> bool:
        """Its device computes wrong numbers."""
        placement = self._launch.state.placement
        node, slot = placement.place(rank) if placement is not None else ("?", 0)
        return placement is not None and slot in self._launch.world.host(node).bad

    def _look(self) -> None:
        for agent in self._launch.peers.agents():
            self._launch.watchmen[agent.name].look()

    # -- what the machines say --------------------------------------------------------------------------------------------------------------

    def _rerun_in_place(self, step: LockStep, rank: int, why: str) -> None:
        if not self._goes_on(step):
            return
        pair = Pair(seasoned=True)
        pair.ask()
        pair.suspect.handle(ResultRejected())
        pair.ask()
        same = why == ODDITY or (why == DEVICE and self.faulty(rank))
        shown = pair.suspect.handle(ResultRepeated() if same else ResultDiffered())
        pair.ask()
        checkpoint, code = pair.leave()
        self._note(rank, shown.status, f"rejected ({why})")  # type: ignore[union-attr]
        question = Question(rank, self.device(rank), right=why == ODDITY) if code == 16 else None
        step.release("rerun")
        if checkpoint:
            step.save_the_fault()
            self._look()
            self._clock.after(self._launch.world.setting.script.save_s, self._saved, step, question, code)
        else:
            self._leave(step, code)

    def _saved(self, step: LockStep, question: Question | None, code: int) -> None:
        if self._goes_on(step):
            step.commit_fault(question)
            self._leave(step, code)

    def _answer(self, step: LockStep, question: Question) -> None:
        """The third computation of the disputed step, on whatever device the rank is now."""
        if not self._computes(step):
            return
        self.busy = self._launch.truth.cycle
        self._launch.truth.disputed = True
        pair = Pair(seasoned=False)
        pair.resumed()
        pair.ask()
        there = self.device(question.rank)
        right = not self.faulty(question.rank)
        if there == question.device:
            shown = pair.suspect.handle(SameDevice())
        else:
            self._launch.world.judges[question.device] = there
            shown = pair.suspect.handle(ResultRepeated() if question.right and right else ResultDiffered())
        pair.ask()
        self._note(question.rank, shown.status, f"computed on {there}, before on {question.device}")  # type: ignore[union-attr]
        self._leave(step, pair.leave()[1])

    def _goes_on(self, step: LockStep) -> bool:
        """Nothing has broken the cycle meanwhile."""
        return step is self._launch.step and step.frozen_at is None and self.busy == self._launch.truth.cycle and not self._launch.over

    def _answer_when_due(self, step: LockStep, question: Question) -> None:
        """Once the result of the first step is there."""
        if step is not self._launch.step or step.frozen_at is not None:
            return
        left_s = NOTICED * self._launch.world.setting.script.step_s - step.nominal()
        if left_s <= 1e-6 and not step.held:
            self._answer(step, question)
        else:
            self._clock.after(1.0 if step.held else max(left_s * step.factor, 1e-3), self._answer_when_due, step, question)

    # -- leaving ------------------------------------------------------------------------------------------------------------------------------

    def _note(self, rank: int, status: RerunStatus | None, text: str) -> None:
        launch, noise = self._launch, self._noise
        recorded = noise.random() >= NO_RECORD
        found = {rank: RerunFinding(rank, status, launch.truth.cycle, text)} if status is not None else {}
        self.found = {launch.truth.cycle: Findings(found, noise.random() < 0.8, recorded)}
        launch.truth.finding = (rank, status if recorded else None)

    def _leave(self, step: LockStep, code: int) -> None:
        """Every rank leaves with the code, at once or one by one; sometimes some of them break instead."""
        launch, noise = self._launch, self._noise
        launch.peers.freeze()
        odd_share = 0.4 if noise.random() < ODD_EXIT else 0.0
        within_s = noise.choice((0.05, STRAGGLE_S))
        ranks = [(agent, proc) for agent in launch.peers.agents() for proc in launch.peers.procs(agent, launch.truth.cycle)]
        leaves_s = [noise.uniform(0.01, within_s) for _ in ranks]
        first_s = min(leaves_s, default=0.0)
        for (agent, proc), after_s in zip(ranks, leaves_s, strict=True):
            if after_s > first_s and noise.random() < odd_share:
                agent.nursery.leave(proc, first_s + noise.uniform(0.0, 0.05), Exit(code=1), noise.choice(VICTIM_STAMPS))
            else:
                agent.nursery.leave(proc, after_s, Exit(code=code))

    def told_by(self, agent: Agent, cycle: int, on_pages: bool) -> dict[int, RerunFinding]:
        """What an agent finds of its own ranks, on their pages or in the tracker file."""
        found = self.found.get(cycle)
        if found is None or not found.recorded or found.on_pages is not on_pages:
            return {}
        return {rank: finding for rank, finding in found.by_rank.items() if rank in agent.ranks}
