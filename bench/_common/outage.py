"""One outage: a rank of a running job gets SIGKILL, and how long it takes until every rank trains again.

The clock starts in this process, just before the kill, and stops at what the slowest new rank has stamped. A victim is every rank in turn. The job is
left alone for `SETTLE_S` before each kill, so that a launcher has done whatever it does after a start.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common.contestants import Plan, launch
from _common.figures import progress
from _common.processes import Job, kill_rank
from _common.stamps import Stamps

SETTLE_S = 1.5
MIN_STEPS = 3
START_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outage:
    """Seconds from the kill until the slowest rank of the next attempt had reached each moment; None where the script does not stamp it."""

    victim: int
    line_s: float
    torch_s: float | None
    group_s: float | None
    step_s: float


def outages(name: str, plan: Plan, folder: Path, kills: int, first_victim: int) -> Iterator[Outage]:
    """Run one job of contestant `name`, and kill `kills` of its ranks one after the other. Raises BenchError when it does not recover."""
    job, stamps = launch(name, plan, folder)
    with job:
        job.wait_for(lambda: stamps.first_on_all("step") is not None, "first step of all ranks", START_LIMIT_S)
        for number in range(kills):
            settle(job, stamps)
            yield one_outage(job, stamps, (first_victim + number) % plan.world)


def settle(job: Job, stamps: Stamps) -> None:
    """Wait until every rank has made some steps and has run for `SETTLE_S` since its first."""
    pids = stamps.pids()
    first_ns = max(stamps.firsts("step", but=frozenset(_older(stamps, pids))).values())

    def settled() -> bool:
        return (stamps.first_on_all("step", after_ns=first_ns + int(SETTLE_S * 1e9)) is not None) and stamps.fewest(
            "step", pids
        ) >= MIN_STEPS

    job.wait_for(settled, f"{MIN_STEPS} steps and {SETTLE_S} s of training", START_LIMIT_S)


def _older(stamps: Stamps, pids: dict[int, int]) -> set[int]:
    return {moment.pid for moments in stamps.read().values() for moment in moments} - set(pids.values())


def one_outage(job: Job, stamps: Stamps, victim: int, number: int = signal.SIGKILL) -> Outage:
    """Signal the victim and wait for the first new step of every rank."""
    known = frozenset(moment.pid for moments in stamps.read().values() for moment in moments)
    fault_ns = kill_rank(stamps.pids()[victim], number)
    job.wait_for(lambda: stamps.first_on_all("step", fault_ns, known) is not None, "new step of all ranks", RECOVERY_LIMIT_S)

    def since(kind: str) -> float | None:
        at_ns = stamps.first_on_all(kind, fault_ns, known)
        return None if at_ns is None else (at_ns - fault_ns) / 1e9

    line_s, step_s = since("line"), since("step")
    assert line_s is not None and step_s is not None
    return Outage(victim, line_s, since("torch"), since("group"), step_s)


def alternate(names: Sequence[str], plan: Plan, folder: Path, runs: int, kills_a_job: Mapping[str, int]) -> dict[str, list[Outage]]:
    """Outages of all contestants, one job each in turn (ABAB), until each has at least `runs`: a machine that is slow for a while is so for all.

    `kills_a_job`: how many ranks of one job are killed, one after the other, before it is the next contestant's turn.
    """
    turns = -(-runs // min(kills_a_job[name] for name in names))
    found: dict[str, list[Outage]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names:
            progress(f"turn {turn + 1} of {turns}: {name}")
            kills = min(kills_a_job[name], runs)
            found[name].extend(outages(name, plan, folder / f"{turn}{name[:2]}", kills, turn * kills))
    return found
