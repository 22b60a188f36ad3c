"""The rerun state machine as a table: what a rank does when a result looks wrong. Pure; no torch, no clock, no processes.

A rejected result is computed again in place. If it differs, the fault was transient (exit 17). If it is the same, a checkpoint is taken before the optimizer step and
the job asks for other hardware (exit 16); there the step is computed once more: a different result means that the first device is faulty, the same one that the result
is correct and the application is to blame (both exit 17). States, modes, diagnostics, flags and exit codes are those of `megatron.core.rerun_state_machine` (0.16.1), and
tests run both side by side. Every cell of the table is decided; docs/rerun-machine.md is drawn from it.

Seven events drive it (rerun/words.py). `LoopAsked` is the training loop's "shall I (still) run forward and backward?" with what *all* ranks want (`wanted` says what has to be agreed
upon); four tell what became of a validated result; `StepEnded` is the question whether to go on to the optimizer, `Resumed` a
checkpoint that was loaded. Where we differ from Megatron on purpose:

- A rank forgets its disputed result when a new step begins. Megatron keeps it for ever, and when *another* rank's result is disputed later, compares with it.
- `Resumed` with a state whose verdict had been given already (RERUNNING_IN_PLACE: transient; or one that its loop should have left) starts a normal step. Megatron
  raises TypeError at the next step, in every cycle.
- Determinism statistics are printed (Megatron 0.16.1 raises AttributeError when it comes to that; see rerun/stats.py).

It must never know what a result is, how ranks agree, or what the launcher does with an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ft_launcher.core.machine import IGNORE, IMPOSSIBLE, total
from ft_launcher.core.rerun_report import RerunStatus
from rerun.words import (
    Event,
    Flags,
    Leave,
    LoopAsked,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    ResultDiffered,
    ResultRejected,
    ResultRepeated,
    Resumed,
    SameDevice,
    Shown,
    StepEnded,
    Turn,
)

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17

S = RerunState
NOT_FATAL = "Continuing normal execution because failed validation was not fatal"

# Which flags all ranks have to agree upon before `LoopAsked` can be told, by state; none in mode DISABLED.
AGREED: Mapping[RerunState, tuple[str, ...]] = {
    S.NOT_RUNNING_YET: (),
    S.INITIAL_RUN: ("rerun",),
    S.RERUNNING_IN_PLACE: ("proceed", "checkpoint"),
    S.WILL_RERUN_FROM_CHECKPOINT: (),
    S.RERUNNING_FROM_CHECKPOINT: ("restart_again", "proceed"),
    S.RERUNNING_AGAIN_FROM_CHECKPOINT: (),
}

RESUMABLE = frozenset({S.WILL_RERUN_FROM_CHECKPOINT})
"""The states in which a checkpoint has a question for the next device. In all others it is a checkpoint like any other."""


def _row(**cells: str) -> dict[RerunState, str]:
    return {state: cells.get(state.value, IGNORE) for state in S}


TRANSITIONS = total(
    S,
    {
        LoopAsked: {
            S.NOT_RUNNING_YET: "begin_step",
            S.INITIAL_RUN: "after_initial_run",
            S.RERUNNING_IN_PLACE: "after_rerun_in_place",
            S.WILL_RERUN_FROM_CHECKPOINT: "rerun_from_checkpoint",
            S.RERUNNING_FROM_CHECKPOINT: "after_rerun_from_checkpoint",
            S.RERUNNING_AGAIN_FROM_CHECKPOINT: IMPOSSIBLE,
        },
        ResultRejected: _row(not_running_yet=IMPOSSIBLE, initial_run="dispute"),
        ResultRepeated: _row(not_running_yet=IMPOSSIBLE, rerunning_in_place="ask_elsewhere", rerunning_from_checkpoint="acquit_device"),
        ResultDiffered: _row(not_running_yet=IMPOSSIBLE, rerunning_in_place="call_transient", rerunning_from_checkpoint="call_persistent"),
        SameDevice: _row(not_running_yet=IMPOSSIBLE, rerunning_from_checkpoint="ask_again"),
        StepEnded: "leave",
        Resumed: "take_over",
    },
)

EDGES: Mapping[RerunState, frozenset[RerunState]] = {
    S.NOT_RUNNING_YET: frozenset({S.INITIAL_RUN, S.WILL_RERUN_FROM_CHECKPOINT}),
    S.INITIAL_RUN: frozenset({S.NOT_RUNNING_YET, S.RERUNNING_IN_PLACE}),
    S.RERUNNING_IN_PLACE: frozenset({S.NOT_RUNNING_YET, S.WILL_RERUN_FROM_CHECKPOINT}),
    S.WILL_RERUN_FROM_CHECKPOINT: frozenset({S.RERUNNING_FROM_CHECKPOINT}),
    S.RERUNNING_FROM_CHECKPOINT: frozenset({S.NOT_RUNNING_YET, S.RERUNNING_AGAIN_FROM_CHECKPOINT}),
    S.RERUNNING_AGAIN_FROM_CHECKPOINT: frozenset(),
}
"""State -> those that may follow. `Resumed` may also replace the state of a machine in the middle of a step by the first or fourth of them."""

LEAVING: Mapping[RerunState, Leave] = {
    S.NOT_RUNNING_YET: Leave(),
    S.INITIAL_RUN: Leave(),
    S.RERUNNING_IN_PLACE: Leave(
        True, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION, "Exiting now. A checkpoint at the last iteration is being saved"
    ),
    S.WILL_RERUN_FROM_CHECKPOINT: Leave(
        True,
        True,
        EXIT_CODE_RESUME_TO_DISAMBIGUATE,
        "Saving a checkpoint and exiting now: the last iteration has to be computed on another device",
    ),
    S.RERUNNING_FROM_CHECKPOINT: Leave(
        False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION, "Exiting now. A checkpoint at the last iteration already exists"
    ),
    S.RERUNNING_AGAIN_FROM_CHECKPOINT: Leave(
        False,
        True,
        EXIT_CODE_RESUME_TO_DISAMBIGUATE,
        "Exiting now: the last iteration was computed on the suspected device again; resume elsewhere",
    ),
}


class OutsideStepError(AssertionError):
    """The training loop used the machine in an order that it does not allow: which call, in which state, what to do instead."""


class RerunMachine:
    """One rank's machine; `handle` is the only mutator. `iteration` counts the steps begun (-1: none); `seasoned`: a step has ended in this process."""

    def __init__(self, mode: RerunMode = RerunMode.DISABLED) -> None:
        self.mode = mode
        self.state = RerunState.NOT_RUNNING_YET
        self.flags = Flags()
        self.iteration = -1
        self.seasoned = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """The flags that all ranks have to agree upon before the next `LoopAsked`."""
        return () if self._off or (self._statistics and self.state is S.RERUNNING_IN_PLACE) else AGREED[self.state]

    @property
    def examines(self) -> bool:
        """Whether results are checked now: in the first run of a step, until this rank disputes one. Never in a process's first step, before which the
        optimizer has no state to checkpoint."""
        return self.state is S.INITIAL_RUN and self.seasoned and not self.flags.rerun

    @property
    def compares(self) -> bool:
        """Whether the disputed result is compared with what it was."""
        return self.state in (S.RERUNNING_IN_PLACE, S.RERUNNING_FROM_CHECKPOINT)

    def require_step(self) -> None:
        """Raises OutsideStepError where nothing may be validated."""
        if TRANSITIONS[(self.state, ResultRejected)] == IMPOSSIBLE:
            raise OutsideStepError(_misuse(self.state, ResultRejected()))

    def handle(self, event: Event) -> Turn | Shown | Leave | None:
        """The answer to one event: a Turn, Shown or Leave (see each event); None for `Resumed`. Raises OutsideStepError."""
        cell = TRANSITIONS[(self.state, type(event))]
        if cell == IMPOSSIBLE:
            raise OutsideStepError(_misuse(self.state, event))
        if cell == IGNORE:
            return Shown()
        answer: Turn | Shown | Leave | None = getattr(self, cell)(event)
        return answer

    @property
    def _off(self) -> bool:
        return self.mode is RerunMode.DISABLED and self.state in (S.NOT_RUNNING_YET, S.INITIAL_RUN)

    @property
    def _statistics(self) -> bool:
        return self.mode is RerunMode.REPORT_DETERMINISM_STATS

    def begin_step(self, event: LoopAsked) -> Turn:
        """A step begins; nobody wants anything yet."""
        self.state = S.INITIAL_RUN
        self.iteration += 1
        if self.mode is RerunMode.DISABLED:
            return Turn(True)
        self.flags = Flags()
        return Turn(True, begins=True)

    def after_initial_run(self, event: LoopAsked) -> Turn:
        """On to the optimizer, or once more in place if any rank disputes a result."""
        if self._off or not event.any_rank.rerun:
            self.state = S.NOT_RUNNING_YET
            return Turn(False)
        self.state = S.RERUNNING_IN_PLACE
        why = "" if self._statistics else "Need to rerun step to check reproducibility of initial result"
        return Turn(True, rewinds=True, why=why)

    def after_rerun_in_place(self, event: LoopAsked) -> Turn:
        """Go on (statistics taken, or nothing fatal), else leave: with the question for another device, or with a transient fault."""
        if self._statistics or event.any_rank.proceed:
            self.state = S.NOT_RUNNING_YET
            return Turn(False, why="" if self._statistics else NOT_FATAL)
        if event.any_rank.checkpoint:
            self.state = S.WILL_RERUN_FROM_CHECKPOINT
        return Turn(False, rewinds=True)

    def rerun_from_checkpoint(self, event: LoopAsked) -> Turn:
        """Compute the disputed step on this device."""
        self.state = S.RERUNNING_FROM_CHECKPOINT
        return Turn(True)

    def after_rerun_from_checkpoint(self, event: LoopAsked) -> Turn:
        """Ask for another device once more, go on if nothing was fatal, else leave with the verdict."""
        if event.any_rank.restart_again:
            self.state = S.RERUNNING_AGAIN_FROM_CHECKPOINT
            return Turn(False, why="Need to restart job from the same checkpoint because it was scheduled on the same device")
        if event.any_rank.proceed:
            self.state = S.NOT_RUNNING_YET
            return Turn(False, why=NOT_FATAL)
        return Turn(False)

    def dispute(self, event: ResultRejected) -> Shown:
        """Ask for the step to be computed again in place."""
        self.flags = replace(self.flags, rerun=True)
        return Shown() if self._statistics else Shown(RerunStatus.INITIAL_RUN)

    def ask_elsewhere(self, event: ResultRepeated) -> Shown:
        """The same in place: another device has to decide; if it is not fatal, go on."""
        self.flags = replace(self.flags, checkpoint=True) if event.fatal else replace(self.flags, proceed=True)
        return Shown(RerunStatus.FIRST_RERUN_REPRODUCIBLE)

    def call_transient(self, event: ResultDiffered) -> Shown:
        """Different in place: a transient fault; if it is not fatal, go on."""
        self._proceed_unless(event.fatal)
        return Shown(RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE, RerunDiagnostic.TRANSIENT_ERROR)

    def acquit_device(self, event: ResultRepeated) -> Shown:
        """The same on another device: the result is correct."""
        self._proceed_unless(event.fatal)
        return Shown(RerunStatus.SECOND_RERUN_REPRODUCIBLE, RerunDiagnostic.CORRECT_RESULT)

    def call_persistent(self, event: ResultDiffered) -> Shown:
        """Different on another device: the first one is faulty."""
        self._proceed_unless(event.fatal)
        return Shown(RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE, RerunDiagnostic.PERSISTENT_ERROR)

    def ask_again(self, event: SameDevice) -> Shown:
        """The suspected device cannot decide about itself: ask for another one again."""
        self.flags = replace(self.flags, restart_again=True)
        return Shown()

    def leave(self, event: StepEnded) -> Leave:
        """What the state means for the loop (LEAVING); from now on results are validated."""
        self.seasoned = True
        return LEAVING[self.state] if self.mode is RerunMode.VALIDATE_RESULTS else Leave()

    def take_over(self, event: Resumed) -> None:
        """Take up the question that a checkpoint brings; one without a question begins a normal step."""
        asks = event.state in RESUMABLE
        self.state = event.state if asks else S.NOT_RUNNING_YET
        self.flags = event.flags if asks else Flags()

    def _proceed_unless(self, fatal: bool) -> None:
        if not fatal:
            self.flags = replace(self.flags, proceed=True)


def _misuse(state: RerunState, event: Event) -> str:
    if isinstance(event, LoopAsked):
        return f"should_run_forward_backward was called in state {state}: the loop has to exit when should_checkpoint_and_exit says so"
    return f"validate_result was called in state {state}: call it only inside `while machine.should_run_forward_backward(...)`"
