"""Counting what only ever grows, from a file that forgets: ft_state.json lists the newest 200 cycles, a counter must never fall.

Every cycle is counted once, when what is counted of it can no longer change. A server that starts anew begins with what the file still lists, which for a reader of counters is a
reset. Another run id in the same file is one as well.

Knows numbers and cycles; must never know how they are exposed (`metrics`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_launcher.dashboard.moment import number, text, whole
from ft_launcher.dashboard.source import Snapshot
from ft_launcher.state.document import empty
from ft_launcher.state.run_folder import parse_folder_name

RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
OVERSHOOT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_GOES_ON = ("restart", "replace")

_Key = tuple[int, int]


@dataclass(slots=True)
class Spread:
    """A histogram: how many values are at most each of `bounds` (or above all), and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def add(self, value: float) -> None:
        """One value."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values at or below it), the last bound infinite."""
        total, found = 0, list[tuple[float, int]]()
        for bound, count in zip((*self.bounds, float("inf")), self.counts or [0] * (len(self.bounds) + 1), strict=True):
            total += count
            found.append((bound, total))
        return found


class Tally:
    """The counters of one server. `take` each snapshot that is exposed, under one lock."""

    def __init__(self) -> None:
        self._forget(None)

    def _forget(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.cycles = 0
        self.incidents: dict[int, int] = {}
        self.restarts: Counter[str] = Counter()
        self.repeated = 0
        self.recovery = Spread(RECOVERY_BUCKETS)
        self.overshoot = Spread(OVERSHOOT_BUCKETS)
        self._counted: dict[str, set[_Key]] = {"restart": set(), "recovery": set(), "overshoot": set()}

    def take(self, snapshot: Snapshot) -> None:
        """Counts what is new in it."""
        document = snapshot.document or empty()
        run = document["run"] or {}
        if (named := text(run.get("id"))) != self.run_id and named is not None:
            self._forget(named)
        rows: Sequence[Mapping[str, Any]] = document["cycles"]
        self.cycles = max(self.cycles, document["dropped"]["cycles"] + len(rows))
        for i, row in enumerate(rows):
            self._take_row(row, snapshot, rows[i - 1] if i else None)
        generation = _generation(snapshot, run)
        self.incidents[generation] = max(self.incidents.get(generation, 0), snapshot.incident_count)
        for cycle, seconds in snapshot.overshoot_s.items():
            if self._first("overshoot", (generation, cycle)):
                self.overshoot.add(seconds)
        self._prune(document["dropped"]["through"])

    def _take_row(self, row: Mapping[str, Any], snapshot: Snapshot, before: Mapping[str, Any] | None) -> None:
        key = (row["generation"], row["n"])
        if row.get("decision") in _GOES_ON and self._first("restart", key):
            self.restarts[text(row.get("cause")) or "unknown"] += 1
        seconds = number(row.get("recovery_s"))
        if seconds is None or not _is_settled(row, snapshot) or not self._first("recovery", key):
            return
        self.recovery.add(seconds)
        if before is not None:
            self.repeated += next(
                (c.repeated or 0 for c in snapshot.losses.cycles if (c.generation, c.n) == (before["generation"], before["n"])), 0
            )

    def _first(self, what: str, key: _Key) -> bool:
        known = self._counted[what]
        if key in known:
            return False
        known.add(key)
        return True

    def _prune(self, through: object) -> None:
        """Cycles that the file has dropped never come back."""
        if isinstance(through, list):
            for what in ("restart", "recovery"):
                self._counted[what] = {key for key in self._counted[what] if list(key) > through}


def _generation(snapshot: Snapshot, run: Mapping[str, Any]) -> int:
    """The launch whose journal and incidents these are."""
    parsed = parse_folder_name(snapshot.run_folder.name) if snapshot.run_folder is not None else None
    return parsed[1] if parsed is not None else whole(run.get("generation"), 0)


def _is_settled(row: Mapping[str, Any], snapshot: Snapshot) -> bool:
    """Whether `recovery_s` is final: it is written twice, when all ranks run again and when all have made a step."""
    if row.get("end") is not None:
        return True
    run = (snapshot.document or empty())["run"] or {}
    _, complete = snapshot.recoveries.get(row["n"], (0.0, False))
    if complete and run.get("generation") == row["generation"]:
        return True
    began, now = whole(row.get("iteration_start"), None), whole(run.get("iteration"), None)
    return began is not None and now is not None and now > began
