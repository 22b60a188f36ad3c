"""Megatron's machine and ours, made to act as several ranks in several places within this process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rerun import adapter, ranks, registry
from rerun.data import RerunDataIterator
from rerun.injector import RerunErrorInjector
from rerun.place import Place
from rerun.words import RerunDiagnostic, RerunMode
from tests.rerun.twin import Cast


@pytest.fixture(scope="module")
def megatron() -> Any:
    return pytest.importorskip("megatron.core.rerun_state_machine")


@pytest.fixture
def casts(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Cast]]:
    """Both casts, their ranks and places being whatever `speak` said last."""
    now = SimpleNamespace(rank=0, place=("a", 0), machines=[])

    def speak(rank: int, place: tuple[str, int], machines: list[Any]) -> None:
        now.rank, now.place, now.machines = rank, place, machines

    class Theirs(megatron.RerunStateMachine):  # type: ignore[misc]
        def _maybe_report_stats(self) -> None:
            """Raises AttributeError (`test_determinism_is_reported`)."""

        def _reduce_any(self, value: bool | list[bool]) -> bool | tuple[bool, ...]:
            names = {
                "INITIAL_RUN": ["rerun_requested"],
                "RERUNNING_IN_PLACE": ["continue_requested", "checkpoint_requested"],
                "RERUNNING_FROM_CHECKPOINT": ["restart_again_requested", "continue_requested"],
            }[self.state.name]
            votes = tuple(any(getattr(machine, name) for machine in now.machines) for name in names)
            return votes if isinstance(value, list) else votes[0]

    class Ours(adapter.RerunStateMachine):
        def _any_rank(self, flags: list[bool]) -> tuple[bool, ...]:
            return tuple(any(getattr(m._machine.flags, name) for m in now.machines) for name in self._machine.wanted)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.place[1])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: max(1, len(now.machines)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: now.rank)
    monkeypatch.setattr(megatron, "safe_get_rank", lambda: now.rank)
    monkeypatch.setattr(megatron, "log_single_rank", lambda *_: None)
    monkeypatch.setattr(megatron, "get_rerun_state_machine", lambda: now.machines[now.rank])
    monkeypatch.setattr(megatron, "os", SimpleNamespace(uname=lambda: ("", now.place[0]), getenv=os.getenv))
    monkeypatch.setattr(ranks, "rank", lambda: now.rank)
    monkeypatch.setattr(ranks, "world_size", lambda: max(1, len(now.machines)))
    monkeypatch.setattr(adapter, "here", lambda: Place(now.place[0], f"index:{now.place[1]}"))
    monkeypatch.setattr(registry, "recording", lambda: now.machines[now.rank].get_mode() is not RerunMode.DISABLED)
    kept = random.getstate()
    theirs = Cast(
        Theirs,
        megatron.RerunDataIterator,
        lambda rate, kind: megatron.RerunErrorInjector(rate, megatron.RerunDiagnostic(kind)),
        megatron.RerunMode,
        speak,
        forget=_forget_disputes,
    )
    ours = Cast(Ours, RerunDataIterator, lambda rate, kind: RerunErrorInjector(rate, RerunDiagnostic(kind)), RerunMode, speak)
    yield {"theirs": theirs, "ours": ours}
    random.setstate(kept)


def _forget_disputes(machine: Any) -> None:
    """Megatron keeps a disputed call for ever; ours does not (`test_an_old_dispute_of_another_rank`)."""
    machine.failed_validation_call = None
