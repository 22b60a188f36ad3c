"""Rerun: what to do about a wrong number. Megatron's rerun state machine, its names and exit codes, as a pure table with a torch adapter around it.

A loop written for `megatron.core.rerun_state_machine` imports the same names from here. Nothing is imported before it is asked for: the agent reads `rerun.tracker`
without torch, and a rank without checks pays for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rerun.adapter import RerunStateMachine
    from rerun.compare import COMPARISON_MATCH, COMPARISON_MISMATCH
    from rerun.data import RerunDataIterator
    from rerun.determinism import QuickStats
    from rerun.injector import RerunErrorInjector
    from rerun.machine import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE
    from rerun.registry import destroy_rerun_state_machine, get_rerun_state_machine, initialize_rerun_state_machine
    from rerun.words import RerunDiagnostic, RerunMode, RerunState

__all__ = [
    "COMPARISON_MATCH",
    "COMPARISON_MISMATCH",
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION",
    "EXIT_CODE_RESUME_TO_DISAMBIGUATE",
    "QuickStats",
    "RerunDataIterator",
    "RerunDiagnostic",
    "RerunErrorInjector",
    "RerunMode",
    "RerunState",
    "RerunStateMachine",
    "destroy_rerun_state_machine",
    "get_rerun_state_machine",
    "initialize_rerun_state_machine",
]

_HOMES = {
    "adapter": ("RerunStateMachine",),
    "compare": ("COMPARISON_MATCH", "COMPARISON_MISMATCH"),
    "data": ("RerunDataIterator",),
    "determinism": ("QuickStats",),
    "injector": ("RerunErrorInjector",),
    "machine": ("EXIT_CODE_FAILED_ON_RESULT_VALIDATION", "EXIT_CODE_RESUME_TO_DISAMBIGUATE"),
    "registry": ("destroy_rerun_state_machine", "get_rerun_state_machine", "initialize_rerun_state_machine"),
    "words": ("RerunDiagnostic", "RerunMode", "RerunState"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
