"""From evidence to the first cause: who failed first, and who only because a peer had.

When a rank dies its peers' collectives break, and within milliseconds they fail too; restarting because of *them* would name the wrong machine. Two things tell:
order (on a node by its monotonic clock, between nodes by arrival at the controller, never by wall clocks), and what a rank said: a broken connection is never a
first cause while somebody else failed otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ft_launcher.core.evidence import Blame, Hang, NodeReport, RankExit, RankProgress, says_peer_lost, signal_name
from ft_launcher.core.placement import Spare
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import Culprit, JobState, Options
from ft_launcher.core.topology import Topology

SIGNAL_LEAD_NS = 20_000_000
"""A killed process's sockets close before its parent hears of it: its peers' exceptions may be stamped up to this much earlier (see core/node.py)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure and the node it happened on. `arrival`: the order in which the controller first heard of a failure from that node."""

    node_id: str
    arrival: int
    exit: RankExit

    @property
    def victim(self) -> bool:
        """It says of itself that a peer went away."""
        said = f"{self.exit.stamp or ''} {self.exit.error.message if self.exit.error else ''}"
        return self.exit.signal is None and says_peer_lost(said)

    @property
    def precedence(self) -> tuple[bool, int, int, int]:
        """Sorts first causes first."""
        lead = SIGNAL_LEAD_NS if self.exit.signal is not None else 0
        return (self.victim, self.arrival, self.exit.failed_ns - lead, self.exit.order)


@dataclass(frozen=True)
class Evidence:
    """All that is known of a cycle when it is settled. `reports` hold one cumulative report for each node that still answers; `lost` the others.

    `spares` could take a node's place now; `devices` are the nodes' stable device names by slot; `labels` what users said of nodes.
    """

    state: JobState
    topology: Topology
    options: Options
    reports: Sequence[NodeReport]
    arrivals: Mapping[str, int]
    lasted_s: float
    lost: Mapping[str, str] = field(default_factory=dict)
    spares: Sequence[Spare] = ()
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def failures(self) -> list[Failure]:
        """Every failure of a rank's own, first cause first. Victims are behind all others."""
        return self._failures

    @cached_property
    def _failures(self) -> list[Failure]:
        found = [
            Failure(r.node_id, self.arrivals.get(r.node_id, len(self.arrivals)), e)
            for r in self.reports
            for e in r.exits.values()
            if e.failure
        ]
        return sorted(found, key=lambda f: f.precedence) if len(found) > 1 else found

    def left(self) -> list[tuple[str, RankExit]]:
        """The ranks that have left with 0 by themselves."""
        return [(r.node_id, e) for r in self.reports for e in r.exits.values() if e.success and not e.ended]

    def deserters(self) -> list[RankExit]:
        """The ranks that had left with 0 when the first of their node failed, where all failures are those of ranks that lost a peer: they may have lost these. In rank order."""
        failures, left = self.failures(), self.left()
        if not left or not failures or not failures[0].victim:
            return []
        earliest = {node: min((f.exit.failed_ns for f in failures if f.node_id == node), default=None) for node, _ in left}
        before = [e for node, e in left if (first_ns := earliest[node]) is None or e.failed_ns <= first_ns + SIGNAL_LEAD_NS]
        return sorted(before, key=lambda e: e.rank)

    def left_early(self) -> RankExit | None:
        """Of the deserters the one that is the cause: the first that left inside a section, or the only rank that left at all. Of several outside it may be the job's end."""
        left = self.deserters()
        amid = [e for e in left if (seen := self.progress().get(e.rank)) is not None and seen.section is not None]
        return amid[0] if amid else left[0] if left and len(self.left()) == 1 else None

    def hangs(self) -> list[tuple[str, Hang]]:
        """Confirmed hangs, the one that stood still longest first."""
        return self._hangs

    @cached_property
    def _hangs(self) -> list[tuple[str, Hang]]:
        found = [(r.node_id, h) for r in self.reports for h in r.hangs.values()]
        found.sort(key=lambda pair: pair[1].rank)
        found.sort(key=lambda pair: pair[1].since_s, reverse=True)  # stable: two plain keys are faster than one pair
        return found

    def blame(self) -> Blame:
        """Whose hang it is; only to be asked when there are hangs. Without attribution: whoever stood still longest."""
        _, first = self.hangs()[0]
        if self.options.attribute is None:
            return Blame(first.rank, first.reason)
        return self.options.attribute(self.progress(), self.exits(), first.since_s, self.topology)

    def progress(self) -> dict[int, RankProgress]:
        """The last progress of every rank that reported one."""
        return self._progress

    @cached_property
    def _progress(self) -> dict[int, RankProgress]:
        return {rank: p for r in self.reports for rank, p in r.progress.items()}

    def exits(self) -> dict[int, RankExit]:
        """Every recorded exit by rank."""
        return self._exits

    @cached_property
    def _exits(self) -> dict[int, RankExit]:
        return {rank: e for r in self.reports for rank, e in r.exits.items()}

    def reruns(self) -> dict[int, RerunFinding]:
        """What each rank's rerun machine said last, in rank order."""
        found = {rank: finding for r in self.reports for rank, finding in r.reruns.items()}
        return dict(sorted(found.items()))

    def unfit(self) -> dict[str, str]:
        """Nodes that cannot take ranks any more, and why."""
        return {r.node_id: r.unfit for r in self.reports if r.unfit}

    def platform_faults(self) -> dict[str, str]:
        """Nodes whose launcher processes failed, and how."""
        return {r.node_id: r.platform_fault for r in self.reports if r.platform_fault}

    def iteration(self) -> int | None:
        """The iteration that every rank (with a client) reached in this cycle; None without a client or without absolute iterations."""
        return min((p.iteration for p in self.progress().values() if p.iteration is not None), default=None)

    def steps(self) -> int:
        """The steps that every rank (with a client) completed in this cycle."""
        return min((p.steps for p in self.progress().values() if p.client), default=0)

    def place(self, rank: int) -> str:
        """`rank 3 (tp=1,cp=0,dp=0,pp=1; node a slot 3)`."""
        placement = self.state.placement
        where = f"; node {placement.node_of(rank)} slot {placement.slot_of(rank)}" if placement else ""
        return f"rank {rank} ({self.topology.coords(rank)}{where})"

    def culprit(self, rank: int, why: str) -> Culprit:
        """Name a rank in coordinates and place."""
        placement = self.state.placement
        node, slot = placement.place(rank) if placement else ("?", -1)
        return Culprit(rank, str(self.topology.coords(rank)), node, slot, why)


def exit_code_of(exit_: RankExit) -> int:
    """The code the launcher ends with when this exit is the reason: 128+n for a signal, the rank's own otherwise.

    A rank's own 69, 75 or 93 become 1: these words mean something else to the scheduler when the launcher says them.
    """
    if exit_.signal is not None:
        return 128 + exit_.signal
    code = exit_.code or 0
    return 1 if code in (69, 75, 93) else code


def describe_failure(evidence: Evidence, failure: Failure, others: int) -> str:
    """`rank 2 (...) was killed by SIGKILL at iteration 41; 3 other ranks failed after it`."""
    after = f"; {others} other rank{'s' if others > 1 else ''} failed because of it" if others else ""
    gone = [exit_.rank for _, exit_ in evidence.left()]
    if gone:
        after += f"; {len(gone)} rank{'s' if len(gone) > 1 else ''} left with exit 0 ({some(gone)})"
    return f"{evidence.place(failure.exit.rank)} {failure.exit.describe()}{_at(evidence, failure.exit.rank)}{after}"


def some(ranks: Sequence[int]) -> str:
    """`3, 5, 6, 9, ...`: the first few of them, in order."""
    return ", ".join(map(str, sorted(ranks)[:4])) + (", ..." if len(ranks) > 4 else "")


def describe_leaver(evidence: Evidence, left: RankExit, first: Failure, others: int) -> str:
    """`rank 2 (...) left with exit 0 at iteration 41 while others were at work; 3 other ranks failed because of it, first rank 1 (...) exited with code 1 (...)`."""
    rest = [exit_.rank for exit_ in evidence.deserters() if exit_ is not left]
    too = f", as {_ranks(rest)} did," if rest else ""
    whom = f"{others} other rank{'s' if others > 1 else ''} failed because of it, first {_first_said(evidence, first)}"
    return f"{evidence.place(left.rank)} left with exit 0{_at(evidence, left.rank)}{too} while others were at work; {whom}"


def describe_leavers(evidence: Evidence, left: Sequence[RankExit], first: Failure, others: int) -> str:
    """`ranks 2, 3 left with exit 0; 2 others lost their peers, first rank 1 (...) exited with code 1 (...); whether those left too early cannot be told`."""
    lost = f"{others} others lost their peers, first" if others > 1 else "1 other lost its peers:"
    return f"{_ranks([e.rank for e in left])} left with exit 0; {lost} {_first_said(evidence, first)}; whether those left too early cannot be told"


def _first_said(evidence: Evidence, first: Failure) -> str:
    return f"{evidence.place(first.exit.rank)} {first.exit.describe()}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)}"


def _at(evidence: Evidence, rank: int) -> str:
    progress = evidence.progress().get(rank)
    return f" at iteration {progress.iteration}" if progress and progress.iteration is not None else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def error_place(exit_: RankExit) -> str:
    """Which error it was, and where: its type and the innermost line of its traceback; empty where a rank left no traceback. Two failures with the same are one bug."""
    if exit_.error is None or not (frames := _FRAME.findall(exit_.error.traceback)):
        return ""
    file, line = frames[-1]
    return f"{exit_.error.message.partition(':')[0][:80]} at {file}:{line}"


def cause_word(failure: Failure) -> str:
    """The short form for dashboards: `exit 3` or `SIGSEGV`."""
    return signal_name(failure.exit.signal) if failure.exit.signal is not None else f"exit {failure.exit.code}"
