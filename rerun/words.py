"""The words of the rerun state machine: states, modes, diagnostics, what happens to it (events) and what it answers.

States, modes and diagnostics have Megatron's names; a state is its name in lower case, so that a checkpoint says what it means. Events are past tense. Nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from ft_launcher.core.rerun_report import RerunStatus


class RerunMode(StrEnum):
    """What validation does."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunDiagnostic(StrEnum):
    """Whose fault a rejected result was."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


class RerunState(StrEnum):
    """Where a rank is between two optimizer steps."""

    NOT_RUNNING_YET = "not_running_yet"
    """Between steps; the next question of the loop begins one."""
    INITIAL_RUN = "initial_run"
    """The step is being computed for the first time."""
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """Some rank's result was rejected: all ranks compute the step again, from the same generators and samples."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    """The same result again: checkpoint, exit 16. Also the state that a resumed job starts in."""
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """Resumed: the step is being computed a third time; what comes out decides."""
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """Resumed on the suspected device itself, which decides nothing: exit 16 once more."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What a rank, or any rank, wants: compute again in place, checkpoint and go elsewhere, go elsewhere once more, go on in spite of it."""

    rerun: bool = False
    checkpoint: bool = False
    restart_again: bool = False
    proceed: bool = False

    def __or__(self, other: Flags) -> Flags:
        return Flags(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class LoopAsked:
    """The loop asked whether to run forward and backward; `any_rank` is what all ranks' flags come to."""

    any_rank: Flags = field(default_factory=Flags)


@dataclass(frozen=True, slots=True)
class ResultRejected:
    """A check of this rank has rejected a result, or (mode REPORT_DETERMINISM_STATS) takes part in the statistics."""


@dataclass(frozen=True, slots=True)
class ResultRepeated:
    """The disputed result came out the same again, within the tolerance."""

    fatal: bool = True


@dataclass(frozen=True, slots=True)
class ResultDiffered:
    """The disputed result came out different."""

    fatal: bool = True


@dataclass(frozen=True, slots=True)
class SameDevice:
    """The disputed result was reached on the very device that is suspected: it says nothing."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The loop asked whether to checkpoint and exit, before the optimizer step."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint was loaded in which this state and these flags were saved."""

    state: RerunState
    flags: Flags = field(default_factory=Flags)


Event = LoopAsked | ResultRejected | ResultRepeated | ResultDiffered | SameDevice | StepEnded | Resumed


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer to `LoopAsked`. `run` forward and backward; `begins` a step (remember generators, drop old samples); `rewinds` both to the step's beginning; `why` for the log."""

    run: bool
    begins: bool = False
    rewinds: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """Answer to a validation: what it has shown, as the tracker file says it, and the diagnosis if there is one. None of both: nothing to say."""

    status: RerunStatus | None = None
    diagnostic: RerunDiagnostic | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Answer to `StepEnded`: take a checkpoint, exit, with which code; `why` for the log."""

    checkpoint: bool = False
    exit: bool = False
    code: int = 0
    why: str = ""
