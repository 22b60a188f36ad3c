"""What both machines share: a total transition table, and a story to tell when something impossible happens.

A table maps (phase, event type) to a handler's name, to `ignore_stale` (the event belongs to a life that is over) or to `impossible` (a bug: ours). Tables are
total: a test walks the product. The story keeps the last events so that a `BugError` says how the machine got there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from ft_launcher.errors import BugError

IGNORE = "ignore_stale"
IMPOSSIBLE = "impossible"

Table = Mapping[tuple[Any, type], str]


def total(phases: Iterable[StrEnum], rows: Mapping[type, Mapping[Any, str] | str]) -> dict[tuple[Any, type], str]:
    """Build the table from one row per event type: a handler for every phase, or a mapping in which each phase must appear.

    Raises BugError for a phase without a cell: leaving one out must be a decision, not an accident.
    """
    table: dict[tuple[Any, type], str] = {}
    for event_type, row in rows.items():
        for phase in phases:
            if not isinstance(row, str) and phase not in row:
                raise BugError(f"no cell for {event_type.__name__} in phase {phase}")
            table[(phase, event_type)] = row if isinstance(row, str) else row[phase]
    return table


class Story:
    """The last events a machine has seen, for the reader of a BugError."""

    def __init__(self, length: int = 40) -> None:
        self._told: deque[tuple[float, StrEnum, object]] = deque(maxlen=length)

    def tell(self, now: float, phase: StrEnum, event: object) -> None:
        """Remember one event and the phase it met."""
        self._told.append((now, phase, event))

    def bug(self, message: str) -> BugError:
        """The error to raise for something that cannot be."""
        return BugError(message, tuple(f"{now:.3f} {phase}: {event!r}"[:300] for now, phase, event in self._told))
