"""What to do: the outputs of the two machines, in the imperative.

The shell carries them out in order. `Commit` comes first wherever a decision is taken: if it does not succeed, nothing after it may happen (durable before acting).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.core.events import Timer
from ft_launcher.core.evidence import NodeReport
from ft_launcher.core.state import JobState


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the job state in one transaction; on failure drop every later action and stop being the controller."""

    job: JobState


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Deliver `TimerFired(timer, cycle)` after `delay_s` seconds; replaces a pending one of the same kind."""

    timer: Timer
    delay_s: float
    cycle: int


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the console and the journal. `level`: info, warning or error."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """A settled cycle: what ended it, what was decided and why; becomes the journal's decision, an incident folder and a row of ft_state's `cycles`.

    `rule` is the number of the policy rule that decided. `fault_to_settled_s` runs from the first evidence to this decision.
    """

    cycle: int
    cause: str
    rule: int
    reason: str
    decision: str
    culprit: Mapping[str, Any] | None
    ranks: Mapping[int, Mapping[str, Any]]
    fault_to_settled_s: float
    reap_s: float


@dataclass(frozen=True, slots=True)
class RecordRecovery:
    """Every rank has completed its first step of this cycle (or, without a client, has started) after `seconds` since the fault."""

    cycle: int
    seconds: float
    iteration: int | None
    complete: bool


JobAction = Commit | SetTimer | Say | RecordDecision | RecordRecovery


@dataclass(frozen=True, slots=True)
class OpenStandby:
    """Have a fresh store listen for the next cycle that this node may head, `delay_s` seconds from now at the latest."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Fork this node's ranks of `job.cycle`."""

    job: JobState


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to each rank's own process, never to its group."""

    cycle: int
    signal: int
    ranks: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class KillRanks:
    """SIGKILL the whole sessions of these ranks."""

    cycle: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reap:
    """Kill and collect everything that is left of the cycle below the zygote; answer with `RanksReaped`."""

    cycle: int


@dataclass(frozen=True, slots=True)
class ReadErrors:
    """Read what these failed ranks said of themselves, off the event loop; answer with `ErrorsRead`."""

    cycle: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class SetGrace:
    """Deliver `GraceExpired(cycle)` after `delay_s` seconds."""

    cycle: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Put the node's cumulative report into the store."""

    report: NodeReport


@dataclass(frozen=True, slots=True)
class StartZygote:
    """Start (or replace) the zygote."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """End this agent with the code."""

    exit_code: int


NodeAction = OpenStandby | StartRanks | SignalRanks | KillRanks | Reap | ReadErrors | SetGrace | Report | StartZygote | Leave | Say
