"""Wrong numbers noticed: losses and gradients are checked, a step with a bad one is computed again, and the job leaves with 16 or 17 when that does not help.

Two machines can do it, with one interface: this project's `rerun` and Megatron's own; `--rerun` chooses, and nothing but an import differs. With `off` there are no checks.
It knows the machine's questions and the places in a step where numbers can be looked at: each micro-batch's loss on the last stage, and each rank's own gradients before
ranks mix them. It must never know checkpoints, or save one: `Leave` says that it is wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from corruption import Corruption
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from model import Trainee

Check = Callable[[torch.Tensor], None]
FORMAT = "torch_dist"


class Leave(Exception):  # noqa: N818  it is no error: a decision
    """The job has to end before the optimizer step: with a checkpoint or not, and with which exit code."""

    def __init__(self, checkpoint: bool, code: int) -> None:
        super().__init__(f"leaving with exit code {code}")
        self.checkpoint, self.code = checkpoint, code


class Reruns:
    """Checks and reruns of one rank. `checks`: whether there are any."""

    def __init__(self, args: argparse.Namespace, trainee: Trainee) -> None:
        self.checks = args.rerun != "off"
        self._saves = args.save is not None
        self.samples: Any = None
        self._machine: Any = None
        self._iteration, self._ran, self._resumed = 0, False, False
        if self.checks:
            self._library = _library(args.rerun)
            self._machine = _machine(self._library, args)
        if self.checks or args.inject:
            self._look_at_gradients(args, trainee)

    def take(self, samples: Iterator[Any], iteration: int) -> None:
        """Where the run's samples come from, once `iteration` steps are done."""
        self.samples = self._library.RerunDataIterator(samples) if self.checks else samples
        if self.checks and not self._resumed:  # the machine counts by itself, from there
            self._machine.current_iteration = iteration

    def begin(self, iteration: int) -> None:
        """A step begins, number `iteration` (from 1)."""
        self._iteration, self._ran = iteration, False

    def run_forward_backward(self) -> bool:
        """Whether to run forward and backward (again)."""
        if self.checks:
            return bool(self._machine.should_run_forward_backward(self.samples))
        self._ran = not self._ran
        return self._ran

    def leave_if_wrong(self) -> None:
        """Raises `Leave` when the step must not reach the optimizer."""
        checkpoint, leave, code = self._machine.should_checkpoint_and_exit() if self.checks else (False, False, 0)
        if leave:
            raise Leave(checkpoint and self._saves, code)

    def check_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's loss."""
        if self.checks:
            self._machine.validate_result(loss, rejection_func=_not_finite, message="loss is not finite", fatal=True)

    def state(self, wanted: bool = False) -> dict[str, Any]:
        """What a checkpoint of a disputed step holds; with `wanted`, the request to read it."""
        found: dict[str, Any] = self._machine.state_dict(None if wanted else self.samples, FORMAT, force=wanted)
        return found

    def resume(self, state: dict[str, Any]) -> None:
        """Take up a disputed step, unless it has been settled."""
        if self._machine.validate_state_dict(state):
            self._resumed = True
            self._machine.load_state_dict(state)

    def _look_at_gradients(self, args: argparse.Namespace, trainee: Trainee) -> None:
        """Just before data-parallel replicas (and shared parameters) are summed: behind that, one rank's NaN is everybody's."""
        corruption = Corruption(args, dist.get_rank())
        config, buffers = trainee.bare.config, trainee.model.buffers
        finalize = config.finalize_model_grads_func

        def look_and_finalize(*rest: Any, **more: Any) -> None:
            corruption.strike(self._iteration, buffers[0].grad_data)
            for buffer in buffers if self.checks else ():
                norm = torch.linalg.vector_norm(buffer.grad_data)
                self._machine.validate_result(norm, rejection_func=_not_finite, message="gradient norm is not finite", fatal=True)
            finalize(*rest, **more)

        config.finalize_model_grads_func = look_and_finalize


def _library(which: str) -> Any:
    if which == "megatron":
        from megatron.core import rerun_state_machine as library
    else:
        import rerun as library
    return library


def _machine(library: Any, args: argparse.Namespace) -> Any:
    """The process's machine; what the step changes beyond the plain generators is Megatron's tracker of them."""
    tracker = get_cuda_rng_tracker()
    library.initialize_rerun_state_machine(
        state_save_func=lambda: {"tracker": tracker.get_states()},
        state_restore_func=lambda state: tracker.set_states(dict(state["tracker"])),  # it goes on to write into what it is given
        mode=library.RerunMode.VALIDATE_RESULTS,
        error_injector=library.RerunErrorInjector(args.error_injection_rate, library.RerunDiagnostic(args.error_injection_type)),
        result_rejected_tracker_filename=args.result_rejected_tracker_filename,
    )
    return library.get_rerun_state_machine()


def _not_finite(result: torch.Tensor) -> bool:
    return not bool(torch.isfinite(result))
