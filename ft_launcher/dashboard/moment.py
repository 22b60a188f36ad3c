"""Where the run is now and how each rank fares, derived from ft_state.json and, where it is there, the journal, whichever is newer.

A rank's state is one letter of `STATES`: ten thousand of them travel as one text. The culprit of the newest incident is told apart from the states, for a second after a decision its
rank may be running again, and people want to know who it was.

Pure: values in, values out. Nothing here raises for what a file holds; what is not known is said as the phase alone would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ft_launcher.dashboard.board import Board
from ft_launcher.state.document import Document

STATES = {
    "r": "running",
    "s": "starting",
    "q": "suspect",
    "h": "hung",
    "k": "culprit",
    "x": "failed",
    "f": "finished",
    "t": "stopped",
    "w": "waiting",
}
T = TypeVar("T")
NOT_INCIDENTS = ("finished", "drain")
MAX_WORLD = 1 << 18
"""A world larger than this is not believed: each rank costs a byte here and a cell on the page."""


@dataclass(frozen=True, slots=True)
class Moment:
    """`phase` and `cycle` as last committed; `outcome` and `exit_code` once there is a verdict; `reason`: why it is in this phase."""

    phase: str
    cycle: int
    reason: str
    outcome: str | None
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest incident's decision. `culprit` has rank, coords (a mapping), node, slot, why; None where nobody could be blamed."""

    cycle: int
    cause: str
    reason: str
    decision: str
    culprit: Mapping[str, Any] | None
    at: str | None
    recovery_s: float | None
    complete: bool


def moment_of(document: Document, board: Board) -> Moment:
    """The run's position, from the journal where its revision is newer than the file's."""
    run = document["run"] or {}
    job = board.job if board.job is not None and board.revision >= whole(run.get("revision"), -1) else None
    if job is None:
        phase, cycle = text(run.get("phase")) or "unknown", whole(run.get("cycle"), 0)
        return Moment(phase, cycle, text(run.get("reason")) or "", text(run.get("outcome")), whole(run.get("exit_code"), None))
    verdict = job["verdict"] if isinstance(job.get("verdict"), dict) else {}
    cycle = max(0, whole(job.get("cycle"), 0))
    return Moment(
        text(job.get("phase")) or "unknown",
        cycle,
        text(job.get("reason")) or "",
        text(verdict.get("outcome")),
        whole(verdict.get("exit_code"), None),
    )


def latest_incident(document: Document, board: Board) -> Latest | None:
    """The newest decision that was no plain end, from the journal or (older, or copied without one) the file's cycles."""
    told = [c for c in document["cycles"] if c.get("cause") not in (None, *NOT_INCIDENTS)]
    generation = (document["run"] or {}).get("generation")
    own = {c["n"]: c for c in told if c["generation"] == generation}
    said = {n: d for n, d in board.decisions.items() if d.get("cause") not in (None, *NOT_INCIDENTS)}
    if said and max(said) >= max(own, default=-1):
        return _from_journal(max(said), said[max(said)], board)
    if not told:
        return None
    last = told[-1]
    after = [c for c in document["cycles"] if (c["generation"], c["n"]) > (last["generation"], last["n"])]
    recovery_s = number(after[0].get("recovery_s")) if after else None
    said_by = (text(last.get("cause")) or "", text(last.get("reason")) or "", text(last.get("decision")) or "")
    return Latest(last["n"], *said_by, culprit_of(last.get("culprit")), text(last.get("end")), recovery_s, recovery_s is not None)


def _from_journal(cycle: int, event: Mapping[str, Any], board: Board) -> Latest:
    later = [n for n in board.recoveries if n > cycle]
    recovery_s, complete = board.recoveries[min(later)] if later else (None, False)
    said = (text(event.get("cause")) or "", text(event.get("reason")) or "", text(event.get("decision")) or "")
    return Latest(cycle, *said, culprit_of(event.get("culprit")), text(event.get("t")), recovery_s, complete)


def culprit_of(value: object) -> dict[str, Any] | None:
    """A culprit with its coordinates as a mapping, whichever form it was written in (the journal has `tp=1,cp=0,dp=3,pp=0`)."""
    if not isinstance(value, dict) or not isinstance(value.get("rank"), int):
        return None
    coords = value.get("coords")
    if isinstance(coords, str):
        pairs = (part.partition("=") for part in coords.split(","))
        coords = {name: int(digits) for name, _, digits in pairs if digits.isdigit()}
    return {
        "rank": value["rank"],
        "coords": coords if isinstance(coords, dict) else {},
        "node": text(value.get("node")),
        "slot": whole(value.get("slot"), None),
        "why": text(value.get("why")),
    }


def rank_states(document: Document, board: Board, moment: Moment, latest: Latest | None) -> str:
    """One letter a rank."""
    world = world_of(document)
    blamed = latest.culprit["rank"] if latest is not None and latest.culprit is not None and latest.cycle == moment.cycle else -1
    if moment.phase == "done":
        states = ["f" if moment.outcome == "finished" else "t"] * world
    elif moment.phase in ("running", "draining"):
        return "".join(_running(document, board, moment, world))
    elif moment.phase == "ending":
        states = _ending(board, moment, world)
    else:
        states = ["w"] * world
    if 0 <= blamed < world:
        states[blamed] = "k"
    return "".join(states)


def _running(document: Document, board: Board, moment: Moment, world: int) -> list[str]:
    ranks, heard = board.ranks_of(moment.cycle), _heard_of(document, board)

    def state(rank: int) -> str:
        found = ranks.findings.get(rank)
        if rank in ranks.ended:
            return "x" if ranks.ended[rank] else "f"
        if found is not None and found.kind in ("hung", "suspect"):
            return "h" if found.kind == "hung" else "q"
        return "s" if rank not in ranks.forked and heard(rank) else "r"

    return [state(rank) for rank in range(world)]


def _heard_of(document: Document, board: Board) -> Callable[[int], bool]:
    """Whether the journal of a rank's node is here: of others nothing can be told but that they run."""
    placement = board.job.get("placement") if board.job is not None else None
    nodes = placement.get("nodes") if isinstance(placement, dict) else None
    if not isinstance(nodes, list) or not board.nodes:
        return lambda rank: False
    per_node = max(1, whole((document["run"] or {}).get("nproc_per_node"), 1))
    known = [str(node) in board.nodes for node in nodes]
    return lambda rank: rank // per_node < len(known) and known[rank // per_node]


def _ending(board: Board, moment: Moment, world: int) -> list[str]:
    """Ranks are being killed: those past their limit and those that had failed by themselves stand out."""
    ranks = board.ranks_of(moment.cycle)

    def state(rank: int) -> str:
        found, code = ranks.findings.get(rank), ranks.ended.get(rank, 0)
        if found is not None and found.kind == "hung":
            return "h"
        return "x" if code not in (0, -9, -15) else "t"

    return [state(rank) for rank in range(world)]


def world_of(document: Document) -> int:
    """How many ranks there are, 0 where that is unknown or absurd."""
    world = whole((document["run"] or {}).get("world_size"), 0)
    return world if 0 < world <= MAX_WORLD else 0


def text(value: object) -> str | None:
    """A text, None for anything else."""
    return value if isinstance(value, str) else None


def number(value: object) -> float | None:
    """A finite number, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


def whole(value: object, otherwise: T) -> int | T:
    """A whole number, else `otherwise`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
