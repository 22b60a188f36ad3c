"""Errors on demand: pretends that a result is wrong, and that computing it again gives what the wanted kind of fault would give.

For trying out launcher and cluster; Megatron's `--error-injection-rate` and `--error-injection-type` mean the same. No number is changed (the Megatron example's
`--inject` does that). It knows kinds of faults and the two reruns; it must never know why a result is checked.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from rerun.compare import COMPARISON_MATCH, COMPARISON_MISMATCH, Comparison
from rerun.words import RerunDiagnostic, RerunState

NAMES = {
    RerunDiagnostic.CORRECT_RESULT: "Expected result",
    RerunDiagnostic.TRANSIENT_ERROR: "Transient error",
    RerunDiagnostic.PERSISTENT_ERROR: "Persistent error",
}
logger = logging.getLogger(__name__)


class RerunErrorInjector:
    """Injects an error of `error_injection_type` at one check in `error_injection_rate` (0: never), at most one in flight. `rank` shifts who is hit."""

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR,
        rank: Callable[[], int] | None = None,
    ) -> None:
        assert isinstance(error_injection_type, RerunDiagnostic), "Injected result type must be a valid RerunDiagnostic"
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = error_injection_type
        self.injected_error_type: RerunDiagnostic | None = None
        self._rank = rank or _own_rank

    @property
    def should_inject_errors(self) -> bool:
        """Whether it is switched on."""
        return self.error_injection_rate > 0

    def maybe_inject(self) -> bool:
        """Whether this check is to be hit. Draws from Python's generator, as Megatron does: the same seed hits the same checks."""
        if not self.should_inject_errors or self.injected_error_type is not None:
            return False
        if (random.randint(0, self.error_injection_rate - 1) + self._rank()) % self.error_injection_rate:
            return False
        self.injected_error_type = self.error_injection_type
        logger.warning("Injecting error type %s", NAMES[self.error_injection_type])
        return True

    def maybe_miscompare(self, comparison_func: Comparison, initial_result: Any, result: Any, state: RerunState) -> float:
        """How far apart the two results are; with an error in flight, what its kind wants. The rerun that decides ends the injection."""
        kind = self.injected_error_type
        if kind is None:
            return comparison_func(initial_result, result)
        in_place = state is RerunState.RERUNNING_IN_PLACE
        if kind is RerunDiagnostic.TRANSIENT_ERROR or not in_place:
            self.injected_error_type = None
        wrong_now = RerunDiagnostic.TRANSIENT_ERROR if in_place else RerunDiagnostic.PERSISTENT_ERROR
        return COMPARISON_MISMATCH if kind is wrong_now else COMPARISON_MATCH

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in plain words."""
        kind = self.injected_error_type
        return {
            "error_injection_rate": self.error_injection_rate,
            "error_injection_type": self.error_injection_type.value,
            "injected_error_type": None if kind is None else kind.value,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From a checkpoint, Megatron's own included."""
        self.error_injection_rate = state_dict["error_injection_rate"]
        self.error_injection_type = RerunDiagnostic(state_dict["error_injection_type"])
        kind = state_dict["injected_error_type"]
        self.injected_error_type = None if kind is None else RerunDiagnostic(kind)


def _own_rank() -> int:
    from rerun.ranks import rank

    return rank()
