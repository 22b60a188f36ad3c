"""What a rank's rerun state machine found out, as a value: the words that ranks, nodes, policy and ledger share.

The statuses are Megatron's (`RerunValidationStatus` in megatron.core.rerun_state_machine; also what its tracker file says), with numbers because the section page
holds words of 8 bytes. It knows what each status says about a result and nothing about what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class RerunStatus(IntEnum):
    """What validating one result has shown so far."""

    RERUN_DISABLED = 1
    """A result was rejected while reruns are disabled: nothing is known of the cause."""
    INITIAL_RUN = 2
    """A result was rejected; the iteration will be run again in place."""
    FIRST_RERUN_NOT_REPRODUCIBLE = 3
    """Run again in place, the result differs: a transient fault."""
    FIRST_RERUN_REPRODUCIBLE = 4
    """Run again in place, the result is the same: other hardware has to decide (exit 16)."""
    SECOND_RERUN_NOT_REPRODUCIBLE = 5
    """Run again on another device, the result differs: the first device is at fault, persistently."""
    SECOND_RERUN_REPRODUCIBLE = 6
    """Run again on another device, the result is the same: it is correct, and the application's."""


@dataclass(frozen=True, slots=True)
class RerunFinding:
    """The last word of one rank's rerun machine in one cycle. `iteration` as it counts them; `text` is one line for people."""

    rank: int
    status: RerunStatus
    iteration: int
    text: str = ""

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        return [self.rank, int(self.status), self.iteration, self.text]

    @classmethod
    def from_json(cls, doc: list[Any]) -> RerunFinding:
        """The inverse of `to_json`. ValueError for a status that does not exist."""
        rank, status, iteration, text = doc
        return cls(rank, RerunStatus(status), iteration, text)


def by_rank(findings: list[RerunFinding]) -> Mapping[int, RerunFinding]:
    """The last finding of each rank."""
    return {finding.rank: finding for finding in findings}
