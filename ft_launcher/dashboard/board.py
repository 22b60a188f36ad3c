"""What the journals say of this moment: the job as last committed, the ranks of the newest cycles, the newest decision.

The exporter writes ft_state.json a moment after a decision; the journal has it at once, so whoever wants to name a culprit within a second reads this. Events come in the order of
their files, not of the world, so each is filed under its cycle and the newest cycle counts. Bounded: of old cycles only a number is kept.

Knows journal lines (docs/design.md section 10); must never raise for what is in them, for they may be a later launcher's. Never decides what a rank's state is called (`ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEEP_CYCLES = 3
KEEP_DECISIONS = 64
KEEP_OVERSHOOTS = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """What an agent has found about a rank: `kind` is suspect or hung; `section` None: outside any."""

    kind: str
    at: str
    section: str | None
    since_s: float
    limit_s: float
    reason: str


@dataclass(slots=True)
class CycleRanks:
    """The processes of one cycle. `ended`: exit code by rank, negative for a signal."""

    forked: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    findings: dict[int, Found] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    recovered: bool = False


@dataclass(slots=True)
class Board:
    """Folded journals of one run folder."""

    job: Mapping[str, Any] | None = None
    revision: int = -1
    cycles: dict[int, CycleRanks] = field(default_factory=dict)
    decisions: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    recoveries: dict[int, tuple[float, bool]] = field(default_factory=dict)
    overshoot_s: dict[int, float] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    """Nodes whose journals are here: without a shared folder only some are."""

    def fold(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Takes in further lines."""
        for event in events:
            if isinstance(node := event.get("node"), str):
                self.nodes.add(node)
            take = _TAKES.get(event["kind"])
            cycle = event.get("cycle")
            if take is not None and isinstance(cycle, int) and not isinstance(cycle, bool):
                take(self, cycle, event)

    @property
    def cycle(self) -> int:
        """The newest cycle anybody has spoken of, -1 before the first."""
        known = self.job.get("cycle") if self.job is not None else None
        return max([known if isinstance(known, int) else -1, *self.cycles])

    @property
    def last_decision(self) -> Mapping[str, Any] | None:
        """The newest decision, None before the first."""
        return self.decisions[max(self.decisions)] if self.decisions else None

    def ranks_of(self, cycle: int) -> CycleRanks:
        """The processes of `cycle`, empty where nothing is known."""
        return self.cycles.get(cycle) or CycleRanks()

    def _open(self, cycle: int) -> CycleRanks:
        if cycle not in self.cycles:
            self.cycles[cycle] = CycleRanks()
            for old in sorted(self.cycles)[:-KEEP_CYCLES]:
                del self.cycles[old]
        return self.cycles.get(cycle) or CycleRanks()


def _job(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    revision, job = event.get("rev"), event.get("job")
    if isinstance(job, dict) and isinstance(revision, int) and revision >= board.revision:
        board.job, board.revision = job, revision


def _forked(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    pids = event.get("pids")
    if isinstance(pids, dict):
        board._open(cycle).forked.update(int(rank) for rank in pids if rank.isdigit())


def _ended(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    rank, code, signal = event.get("rank"), event.get("code"), event.get("signal")
    if isinstance(rank, int):
        board._open(cycle).ended[rank] = -signal if isinstance(signal, int) else code if isinstance(code, int) else 0


def _found(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    rank, kind = event.get("rank"), str(event["kind"]).removeprefix("finding-")
    if not isinstance(rank, int):
        return
    ranks = board._open(cycle)
    if kind == "recovered":
        ranks.findings.pop(rank, None)
        return
    since_s, limit_s = _number(event.get("since_s")), _number(event.get("limit_s"))
    section = event.get("section")
    ranks.findings[rank] = Found(
        kind, str(event.get("t")), section if isinstance(section, str) else None, since_s, limit_s, str(event.get("reason"))
    )
    if kind == "hung" and cycle not in board.overshoot_s and limit_s > 0:
        board.overshoot_s[cycle] = max(0.0, since_s - limit_s)
        if len(board.overshoot_s) > KEEP_OVERSHOOTS:
            del board.overshoot_s[min(board.overshoot_s)]


def _seen(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    ranks = event.get("ranks")
    if isinstance(ranks, dict):
        board._open(cycle).seen.update((int(rank), str(text)) for rank, text in ranks.items() if rank.isdigit())


def _decision(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    board.decisions[cycle] = event
    for old in sorted(board.decisions)[:-KEEP_DECISIONS]:
        del board.decisions[old]


def _recovered(board: Board, cycle: int, event: Mapping[str, Any]) -> None:
    complete = event["kind"] == "recovered"
    board._open(cycle).recovered |= complete
    board.recoveries[cycle] = (_number(event.get("seconds")), complete)
    for old in sorted(board.recoveries)[:-KEEP_DECISIONS]:
        del board.recoveries[old]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


_TAKES = {
    "job": _job,
    "forked": _forked,
    "ended": _ended,
    "finding-suspect": _found,
    "finding-hung": _found,
    "finding-recovered": _found,
    "seen": _seen,
    "decision": _decision,
    "restarted": _recovered,
    "recovered": _recovered,
}
