"""What a run amounted to: the figures that people read and scripts compare."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ft_launcher.core.actions import RecordDecision, RecordRecovery


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: its name, what was seen, when (virtual seconds)."""

    name: str
    text: str
    at_s: float

    def to_json(self) -> dict[str, Any]:
        """As the last line of `--json` has it."""
        return {"invariant": self.name, "text": self.text, "at_s": round(self.at_s, 6)}


@dataclass(slots=True)
class Tally:
    """Steps are of the training script. `useful_s`: time spent on steps that were kept; `restarts`: cycles after the first of a launch."""

    restarts: int = 0
    launches: int = 0
    runs_completed: int = 0
    spares_used: int = 0
    successions: int = 0
    kept: int = 0
    unreachable: int = 0
    lost_steps: int = 0
    useful_steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)

    def decided(self, decision: RecordDecision) -> None:
        """A cycle is settled."""
        if decision.decision in ("restart", "replace"):
            self.causes[decision.cause] += 1

    def recovered(self, recovery: RecordRecovery) -> None:
        """Training goes on."""
        if recovery.complete:
            self.recovery_s.append(recovery.seconds)

    def median_recovery_s(self) -> float | None:
        """From the fault to the first step of all ranks, reloading included."""
        found = sorted(self.recovery_s)
        return found[len(found) // 2] if found else None
