"""A decision of the policy, as a value, and the words that all rules share: verbs, exit codes, who is named.

It knows what can be decided and how that is said. Which evidence leads to which decision is the rules' business (policy.py, rerun_policy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ft_launcher.core.causes import Evidence, Failure
from ft_launcher.core.evidence import RankError, RankExit
from ft_launcher.core.hardware import Dispute, Ledger
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import Budgets, Culprit, Verdict

RERUN_ELSEWHERE = 16
RESULT_REJECTED = 17
NOT_ENOUGH_NODES = 75
NO_PROGRESS = 93


class Do(StrEnum):
    """The verbs of the policy."""

    RESTART = "restart"
    REPLACE = "replace"
    STOP = "stop"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class RerunChange:
    """What a decision changes of the rerun's part of the job state: all three, always."""

    hardware: Ledger
    dispute: Dispute | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `budgets` is what is left after it; `delay_s` the backoff before the next cycle.

    `replaced` names the nodes whose place a spare takes; `ruled_out` False lets them be the spare of last resort at once. `placement` is where ranks go instead of where they
    were, None: stay. `rerun` is set by the rules about wrong numbers alone.
    """

    do: Do
    rule: int
    cause: str
    reason: str
    budgets: Budgets
    verdict: Verdict | None = None
    culprit: Culprit | None = None
    replaced: tuple[str, ...] = ()
    delay_s: float = 0.0
    ruled_out: bool = True
    placement: Placement | None = None
    rerun: RerunChange | None = None


Rule = Callable[[Evidence, Budgets], Decision | None]


def exit_with(evidence: Evidence, code: int) -> Failure | None:
    """The first rank that left with this code of its own accord, whatever others did."""
    return next((f for f in evidence.failures() if f.exit.code == code), None)


def first_cause(evidence: Evidence, failure: Failure | None, cause: str, culprit: Culprit | None) -> dict[str, Any] | None:
    """verdict.json's `first_cause`."""
    if culprit is None:
        return None
    exit_ = failure.exit if failure else None
    early = evidence.left_early()
    left = early is not None and early.rank == culprit.rank  # with 0: the failure is that of one who lost it
    return {
        "rank": culprit.rank,
        "coords": culprit.coords,
        "node": culprit.node,
        "slot": culprit.slot,
        "cause": cause,
        "exit": 0 if left else exit_.number if exit_ else None,
        "error": _own_words(exit_) if exit_ and not left else None,
    }


def _own_words(exit_: RankExit) -> dict[str, str] | None:
    error = exit_.error or (RankError(exit_.stamp) if exit_.stamp else None)
    return error.to_json() if error else None
