"""Megatron's RerunStateMachine for any loop in torch, around the pure table of rerun/machine.py: CPU and gloo, CUDA and NCCL.

    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        loss = forward_backward(data_iterator)
        machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN")
    checkpoint, leave, code = machine.should_checkpoint_and_exit()
    if checkpoint: save(machine.state_dict(data_iterator, "torch_dist"))
    if leave: sys.exit(code)
    optimizer.step()

This file carries the table's answers out: generators and samples back to the step's beginning, results compared, events told (log, tracker file, section page). Names,
arguments and answers are Megatron's; on top of that the device is known by what it is (rerun/place.py), a result is copied when it is disputed (Megatron keeps the
tensor, which the script may change), a state whose verdict was given is no state, and `threshold` of `is_unexpectedly_large` has a default. It must never decide what a
state means, nor end the process.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ft_launcher.core.rerun_report import RerunStatus
from rerun import ranks, telling, tracker
from rerun.compare import Comparison, compare_floats, copied
from rerun.data import RerunDataIterator
from rerun.determinism import Determinism
from rerun.injector import RerunErrorInjector
from rerun.large import Largest
from rerun.machine import RerunMachine
from rerun.place import here
from rerun.saved import Call, Disputed, Saved, asks, state_in
from rerun.step import Step, wrapped
from rerun.telling import Teller
from rerun.words import (
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

logger = logging.getLogger(__name__)
DataIteratorArg = RerunDataIterator | list[RerunDataIterator] | None
WORDS = {
    RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE: "First rerun: unexpected result is not reproducible within the tolerance ({result} != {initial}). Possible transient error!",
    RerunStatus.FIRST_RERUN_REPRODUCIBLE: "First rerun: unexpected result is reproducible within the tolerance ({result} = {initial}). Need to rerun on a different device.",
    RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE: "Second rerun: unexpected result is not reproducible on a different device ({result} != {initial}). Possible persistent error!",
    RerunStatus.SECOND_RERUN_REPRODUCIBLE: "Second rerun: same result on a different device ({result} = {initial}). Correct result (but possible application error)!",
}


class RerunStateMachine:
    """See the file's head. `state_save_func` and `state_restore_func` keep what a step changes beyond the generators of rerun/generators.py."""

    REPORTING_INTERVAL_ITERATIONS = 2
    LARGE_VALUE_FACTOR = 10.0

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode = RerunMode.DISABLED,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | None = None,
    ) -> None:
        self._machine = RerunMachine(RerunMode(mode))
        self.error_injector = error_injector or RerunErrorInjector()
        self._step = Step(state_save_func, state_restore_func)
        self._teller = Teller(result_rejected_tracker_filename)
        self._determinism = Determinism()
        self._largest = Largest()
        self._disputed = Disputed()
        self._counts: Counter[str] = Counter()
        self.diagnostic: RerunDiagnostic | None = None

    # -- what it is doing

    def set_mode(self, mode: RerunMode) -> None:
        """What validation does from now on."""
        self._machine.mode = RerunMode(mode)

    def get_mode(self) -> RerunMode:
        """What validation does."""
        return self._machine.mode

    @property
    def mode(self) -> RerunMode:
        """The same as get_mode()."""
        return self._machine.mode

    @property
    def state(self) -> RerunState:
        """Where this rank is."""
        return self._machine.state

    @property
    def current_iteration(self) -> int:
        """The step's number as told to people; counts by itself, or is set by the loop."""
        return self._machine.iteration

    @current_iteration.setter
    def current_iteration(self, iteration: int) -> None:
        self._machine.iteration = iteration

    # -- the loop's two questions

    def should_run_forward_backward(self, data_iterator: DataIteratorArg) -> bool:
        """Whether to run forward and backward (once more). A collective when results may have been disputed."""
        self._counts.clear()
        iterators = wrapped(data_iterator, self.mode)
        turn = self._ask(LoopAsked(self._agreed()))
        if turn.why and ranks.rank() == 0:
            logger.warning(turn.why)
        if turn.begins:
            self._disputed = Disputed()
            self._step.begin(iterators)
        elif turn.rewinds:
            self._step.rewind(iterators)
        elif turn.run:
            self._step.take_up(iterators)
        if not turn.run and self.state is RerunState.NOT_RUNNING_YET:
            self._settle()
        return turn.run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """(take a checkpoint, exit, exit code), to be asked before each optimizer step."""
        answer = self._machine.handle(StepEnded())
        assert isinstance(answer, Leave)
        if answer.why and ranks.rank() == 0:
            logger.warning(answer.why)
        return answer.checkpoint, answer.exit, answer.code

    # -- validation

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Comparison | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Checks one result of this step. `rejection_func(result)`: whether it is wrong. `comparison_func(first, now)`: how far apart, relatively; by default for
        single floats. `fatal`: whether the job is to leave when it is known whose fault it was; if not, that is only told. In mode DISABLED a wrong result that is
        fatal raises RuntimeError. The calls of a step must come in the same order when it is run again.
        """
        if self.mode is RerunMode.DISABLED:
            self._refuse(result, rejection_func, message, fatal)
            return
        self._machine.require_step()
        self._counts[message] += 1
        call = Call(message, self._counts[message])
        if self.mode is RerunMode.REPORT_DETERMINISM_STATS:
            self._measure(call, result, comparison_func or compare_floats)
        elif self._machine.examines:
            if self.error_injector.maybe_inject() or rejection_func(result):
                self._dispute(call, result)
        elif self._machine.compares and call == self._disputed.call:
            distance = self.error_injector.maybe_miscompare(
                comparison_func or compare_floats, self._disputed.first(result), result, self.state
            )
            self._conclude(call, result, distance > tolerance, fatal)

    def is_unexpectedly_large(
        self, result: Any, threshold: float | None = None, context: str = "", num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Whether a single float is `threshold` (default: LARGE_VALUE_FACTOR) times larger than the largest of the first `num_samples` of its `context`."""
        if resample:
            self._largest.again(context)
        return self._largest.exceeded(context, float(result), self.LARGE_VALUE_FACTOR if threshold is None else threshold, num_samples)

    @staticmethod
    def get_skipped_iterations_from_tracker_file(tracker_file_name: str) -> list[int]:
        """Iterations that keep failing on one rank alone, by the file of rejected results (see rerun/tracker.py)."""
        return tracker.iterations_to_skip(tracker.read(tracker_file_name))

    # -- checkpoints

    def state_dict(self, data_iterator: DataIteratorArg, ckpt_format: str, force: bool = False) -> dict[str, Any] | None:
        """This rank's state for a fault checkpoint, None between steps (unless `force`). `torch_dist`: "sharded" is Megatron's ShardedObject; `per_rank`: all of it is
        plain, and the script keeps one for each rank. Other formats cannot hold it: None, and a warning.
        """
        if not force and self.state is RerunState.NOT_RUNNING_YET:
            return None
        iterators = wrapped(data_iterator, self.mode)
        samples = [iterator.state_dict() for iterator in iterators] or None
        saved = Saved(self._machine.flags, self._disputed, self.error_injector.state_dict(), samples, self._largest)
        return saved.as_state_dict(self.mode, self.state, self.current_iteration, ckpt_format)

    def validate_state_dict(self, state_dict: Mapping[str, Any] | None) -> bool:
        """Whether a checkpoint's state asks this job to compute a step again. Not so once its verdict was given, here or by the launcher (FT_RERUN_VERDICT)."""
        return asks(state_dict) and telling.settled() is None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up a checkpoint's question. From a state that asks nothing only samples and what is known about large values are taken; in mode DISABLED nothing."""
        if self.mode is RerunMode.DISABLED:
            logger.warning("Rerun state machine disabled, ignoring the state saved in the checkpoint")
            return
        saved = Saved.of(state_dict["sharded"])
        self._machine.mode = RerunMode(state_dict["mode"])
        self._machine.iteration = state_dict["current_iteration"]
        self._step.samples, self._largest = saved.samples, saved.largest
        pending = self.validate_state_dict(state_dict)
        self._machine.handle(
            saved.resumed(state_in(state_dict) or RerunState.NOT_RUNNING_YET) if pending else Resumed(RerunState.NOT_RUNNING_YET)
        )
        self._disputed = saved.disputed if pending else Disputed()
        if pending:
            self.error_injector.load_state_dict(saved.injector)
            logger.warning("Taking up the rerun state of the checkpoint: the step will be computed again, on %s", here())

    # -- below: how

    def _ask(self, event: LoopAsked) -> Turn:
        answer = self._machine.handle(event)
        assert isinstance(answer, Turn)
        return answer

    def _agreed(self) -> Flags:
        wanted = self._machine.wanted
        votes = self._any_rank([getattr(self._machine.flags, name) for name in wanted]) if wanted else ()
        return Flags(**dict(zip(wanted, votes, strict=True)))

    def _any_rank(self, flags: list[bool]) -> tuple[bool, ...]:
        return ranks.any_rank(flags)

    def _dispute(self, call: Call, result: Any) -> None:
        self._disputed = Disputed(call, copied(result), None)
        self._show(self._validated(ResultRejected()), call, result, True)

    def _conclude(self, call: Call, result: Any, differs: bool, fatal: bool) -> None:
        place = here()
        elsewhere = self.state is RerunState.RERUNNING_FROM_CHECKPOINT
        if elsewhere and self._disputed.place is not None and self._disputed.place.same(place):
            logger.error("Got rescheduled on the same device (%s): need to resume again from the same checkpoint", place)
            self._validated(SameDevice())
            return
        shown = self._validated(ResultDiffered(fatal) if differs else ResultRepeated(fatal))
        if not elsewhere and not differs:
            self._disputed = Disputed(call, self._disputed.result, place)
        self._show(shown, call, result, fatal)

    def _validated(self, event: ResultRejected | ResultRepeated | ResultDiffered | SameDevice) -> Shown:
        answer = self._machine.handle(event)
        assert isinstance(answer, Shown)
        return answer

    def _show(self, shown: Shown, call: Call, result: Any, fatal: bool) -> None:
        if shown.status is None:
            return
        words = WORDS.get(shown.status, f"Unexpected result {{result}}, invocation {call.sequence}").format(
            result=result, initial=self._disputed.result
        )
        logger.log(
            logging.ERROR if fatal else logging.WARNING, "%s, iteration %d: %s (%s)", _who(), self.current_iteration, words, call.message
        )
        self._teller.tell(shown.status, self.current_iteration, result, call.message)
        self.diagnostic = shown.diagnostic

    def _settle(self) -> None:
        """The step ends normally."""
        self._teller.settle()
        if self.mode is RerunMode.REPORT_DETERMINISM_STATS and self.current_iteration % self.REPORTING_INTERVAL_ITERATIONS == 0:
            self._determinism.report()

    def _refuse(self, result: Any, rejection_func: Callable[[Any], Any], message: str, fatal: bool) -> None:
        if not rejection_func(result):
            return
        self._teller.tell(RerunStatus.RERUN_DISABLED, self.current_iteration, result, message)
        words = f"{_who()}, iteration {self.current_iteration}: Unexpected result {result} (message='{message}')"
        if fatal:
            raise RuntimeError(words)
        logger.warning(words)

    def _measure(self, call: Call, result: Any, comparison_func: Comparison) -> None:
        if self.state is RerunState.INITIAL_RUN:
            self._machine.handle(ResultRejected())
            self._determinism.first(call, result)
        elif self.state is RerunState.RERUNNING_IN_PLACE:
            self._determinism.second(call, result, comparison_func)


def _who() -> str:
    return f"Rank {ranks.rank()}, {here()}"
