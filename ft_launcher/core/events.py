"""What happened: the inputs of the two machines, in the past tense.

Every event that belongs to a cycle carries its number; the job machine ignores those of an old one. Events are values: no clock, no handle, no callback. The
time at which an event is handled is a separate argument of `handle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ft_launcher.core.evidence import Address, Hang, NodeInfo, NodeReport, RankError, RankProgress
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import JobState


class Timer(StrEnum):
    """The job machine's deadlines. One of each kind at a time; setting it again moves it."""

    JOIN = "join"
    REAP = "reap"
    EXIT_GRACE = "exit-grace"
    TERM_GRACE = "term-grace"
    BACKOFF = "backoff"
    SPARE_WAIT = "spare-wait"
    SETTLE = "settle"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node has registered (or registered again with other facts)."""

    node: NodeInfo


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone for good; `reason` says how that is known."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """A node's cumulative report has reached the controller."""

    report: NodeReport


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """The ranks of one node were looked at: highest iteration, and the fewest steps any of them has completed in this cycle.

    `began_ago_s`: how long ago the newest completed step of any of them was begun; inf before the first. `busy`: a rank that has not left is inside a section.
    """

    node_id: str
    cycle: int
    iteration: int | None
    min_steps: int
    began_ago_s: float = float("inf")
    busy: bool = False


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A deadline that the job machine had set for this cycle has passed."""

    timer: Timer
    cycle: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Somebody wants this node to hand over to a spare."""

    node_id: str


JobEvent = NodeJoined | NodeLost | ReportReceived | ProgressSeen | TimerFired | DrainAsked


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The node has read a newer job state from the store."""

    job: JobState
    revision: int


@dataclass(frozen=True, slots=True)
class ZygoteStarted:
    """The zygote has imported what it should and can fork ranks."""


@dataclass(frozen=True, slots=True)
class ZygoteDied:
    """The zygote is gone, and with it every rank below it."""

    reason: str


@dataclass(frozen=True, slots=True)
class StandbyOpened:
    """A store listens for the next cycle."""

    address: Address


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """Every rank of this node has been forked."""

    cycle: int


@dataclass(frozen=True, slots=True)
class ExceptionStamped:
    """A rank has an uncaught exception and is on its way out. `at_ns`: CLOCK_MONOTONIC ns."""

    cycle: int
    rank: int
    at_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process has ended; exactly one of `code` and `signal` is set."""

    cycle: int
    rank: int
    code: int | None
    signal: int | None
    at_ns: int
    core_dumped: bool = False


@dataclass(frozen=True, slots=True)
class HangFound:
    """The detector has confirmed a hang of one of this node's ranks."""

    cycle: int
    hang: Hang


@dataclass(frozen=True, slots=True)
class RanksReaped:
    """Nothing of the cycle is left on this node, except `left` (pids that cannot be killed). `reruns`: what ranks said of their results on their pages.
    `unfit`: why the node cannot take ranks again though they are gone (its devices, its health check).
    """

    cycle: int
    left: tuple[int, ...]
    seconds: float
    progress: Mapping[int, RankProgress] = field(default_factory=dict)
    reruns: Mapping[int, RerunFinding] = field(default_factory=dict)
    unfit: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorsRead:
    """What failed ranks said of themselves has been read from their files (possibly nothing). `reruns`: what the tracker file of rejected results says of them."""

    cycle: int
    errors: Mapping[int, RankError]
    reruns: Mapping[int, RerunFinding] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraceExpired:
    """The time that failing or surviving ranks had to end by themselves is over."""

    cycle: int


@dataclass(frozen=True, slots=True)
class NodeUnfit:
    """Somebody who can know says that this node should hold no ranks."""

    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class SignalArrived:
    """The agent process has received a signal."""

    signal: int


@dataclass(frozen=True, slots=True)
class StopUnheard:
    """A stop signal reached this agent and nobody can be told: the store is away, or whoever decides is. `overdue`: ranks have had their grace since."""

    overdue: bool = False


NodeEvent = (
    JobChanged
    | ZygoteStarted
    | ZygoteDied
    | StandbyOpened
    | RanksStarted
    | ExceptionStamped
    | RankEnded
    | HangFound
    | RanksReaped
    | ErrorsRead
    | GraceExpired
    | NodeUnfit
    | SignalArrived
    | StopUnheard
)
