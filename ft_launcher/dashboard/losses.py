"""What faults have cost: outages, work done twice, and what share of the time was neither.

Computed from the rows of ft_state's `cycles`. Between two attempts of one launch the outage is what the launcher measured (fault to the first new step of every rank, else the gap
between the rows); between two launches it is the gap. Work is done twice where a cycle begins at or before an iteration that the one before it had passed: the share of that
cycle's iterations that were repeated is taken off its time. Goodput is what remains, over the time since the first cycle listed began.

Pure; times come as the file's texts. Whatever cannot be known (a script without iterations) counts as nothing lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ft_launcher.dashboard.moment import number, text, whole


@dataclass(frozen=True, slots=True)
class CycleCost:
    """One cycle and what its end cost. `outage_s`: until training went on, `repeated`: iterations the next cycle did again, `regained`: whether
    the job has been past this cycle's last iteration since; each None where it is not known or nothing followed. `repeated_s` is the time that the repeated iterations had taken.
    """

    generation: int
    n: int
    lasted_s: float | None
    outage_s: float | None
    repeated: int | None
    repeated_s: float
    regained: bool | None


@dataclass(frozen=True, slots=True)
class Losses:
    """All of it. `goodput` is None before a cycle has lasted any time."""

    cycles: tuple[CycleCost, ...]
    outage_s: float
    repeated: int
    goodput: float | None


def seconds_of(value: object) -> float | None:
    """An ISO 8601 time as seconds since the epoch; None for what is none."""
    known = text(value)
    try:
        return datetime.fromisoformat(known).timestamp() if known is not None else None
    except (ValueError, OverflowError, OSError):
        return None


def losses(cycles: Sequence[Mapping[str, Any]], run: Mapping[str, Any] | None) -> Losses:
    """What the listed cycles cost, up to the moment of `run`'s last statement."""
    now_s = seconds_of((run or {}).get("written"))
    iteration = whole((run or {}).get("iteration"), None)
    costs = tuple(_cost(cycles, i, now_s, iteration) for i in range(len(cycles)))
    outage_s = sum(c.outage_s or 0.0 for c in costs)
    start_s = seconds_of(cycles[0].get("start")) if cycles else None
    elapsed_s = (_end_s(cycles, run, now_s) or 0.0) - start_s if start_s is not None else 0.0
    lost_s = outage_s + sum(c.repeated_s for c in costs)
    goodput = max(0.0, min(1.0, 1 - lost_s / elapsed_s)) if elapsed_s > 0 else None
    return Losses(costs, outage_s, sum(c.repeated or 0 for c in costs), goodput)


def _end_s(cycles: Sequence[Mapping[str, Any]], run: Mapping[str, Any] | None, now_s: float | None) -> float | None:
    """When counting ends: with the last cycle of a run that is over, else now."""
    ended_s = seconds_of(cycles[-1].get("end"))
    return ended_s if ended_s is not None and (run or {}).get("outcome") is not None else now_s or ended_s


def _cost(cycles: Sequence[Mapping[str, Any]], i: int, now_s: float | None, iteration: int | None) -> CycleCost:
    this = cycles[i]
    start_s, end_s = seconds_of(this.get("start")), seconds_of(this.get("end"))
    until_s = end_s if end_s is not None else now_s
    lasted_s = max(0.0, until_s - start_s) if start_s is not None and until_s is not None else None
    named = (this["generation"], this["n"])
    if i + 1 == len(cycles) or end_s is None:
        return CycleCost(*named, lasted_s, None, None, 0.0, None)
    after = cycles[i + 1]
    reached, began, again = (
        whole(row.get(key), None) for row, key in ((this, "iteration_end"), (this, "iteration_start"), (after, "iteration_start"))
    )
    repeated = max(0, reached - again) if reached is not None and again is not None else None
    done = reached - began if reached is not None and began is not None else reached
    share = min(1.0, repeated / done) if repeated and done and done > 0 else 0.0
    later = [whole(row.get("iteration_end"), None) for row in cycles[i + 1 :]] + [iteration]
    regained = any(at is not None and at >= reached for at in later) if reached is not None else None
    return CycleCost(*named, lasted_s, _outage_s(this, after, end_s), repeated, share * (lasted_s or 0.0), regained)


def _outage_s(this: Mapping[str, Any], after: Mapping[str, Any], end_s: float) -> float | None:
    measured, start_s = number(after.get("recovery_s")), seconds_of(after.get("start"))
    gap_s = max(0.0, start_s - end_s) if start_s is not None else None
    if this["generation"] != after["generation"]:
        return gap_s
    return measured if measured is not None else gap_s
