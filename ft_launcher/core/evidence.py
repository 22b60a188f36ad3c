"""Evidence: what a node tells the controller about one cycle, as values.

A `NodeReport` is cumulative: each one contains everything its node knows about the cycle, so a lost or repeated report changes nothing. It knows exits, hangs,
progress and acknowledgements of one node's ranks; it must never hold a conclusion (who was at fault, what to do): that is policy's. Times are CLOCK_MONOTONIC
nanoseconds of the reporting node and are only ever compared with times of the same node.
"""

from __future__ import annotations

import re
import signal as _signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ft_launcher.core.rerun_report import RerunFinding, by_rank

NO_CYCLE = -1
"""The cycle number before the first: what a node reports when it is ready and has run nothing yet."""

EMPTY: Mapping[int, Any] = MappingProxyType({})


_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|socket closed|remote process exited|communicator was aborted"
    r"|recvvector failed|sendbytes failed|recvbytes failed|peer .* (died|left|is gone)|heartbeat timeout|store .* (broken|closed)",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def says_peer_lost(text: str) -> bool:
    """Whether an error's text tells of a connection that a peer's end broke: then the rank is a victim by its own words. Thousands of victims say the same."""
    return bool(_PEER_LOST.search(text))


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 64` for numbers without a name."""
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class RankError:
    """What a failed rank said of itself: torch.distributed.elastic's error file, the exception stamp or the log's last line, in that order."""

    message: str
    traceback: str = ""

    def to_json(self) -> dict[str, str]:
        """As plain JSON."""
        return {"message": self.message, "traceback": self.traceback}


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended. Exactly one of `code` and `signal` is set. `failed_ns`: when it failed (an exception's stamp, else the exit), CLOCK_MONOTONIC ns.

    `ended` is true when the launcher itself had already asked or forced it to end: then the exit says nothing about the rank.
    """

    rank: int
    code: int | None
    signal: int | None
    failed_ns: int
    order: int
    ended: bool = False
    core_dumped: bool = False
    stamp: str | None = None
    error: RankError | None = None

    @property
    def success(self) -> bool:
        return self.code == 0

    @property
    def failure(self) -> bool:
        """A failure of the rank's own doing: not a success, and not our SIGKILL."""
        return not self.success and not self.ended

    @property
    def number(self) -> int:
        """The exit as files state it: the code, or the negative signal number."""
        return -self.signal if self.signal is not None else (self.code or 0)

    def describe(self) -> str:
        """`was killed by SIGSEGV (core dumped)` or `exited with code 3 (ValueError: ...)`."""
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}" + (" (core dumped)" if self.core_dumped else "")
        said = self.stamp or (self.error.message if self.error else "")
        first = said.strip().splitlines()[0][:200] if said.strip() else ""
        return f"exited with code {self.code}" + (f" ({first})" if first and self.code != 0 else "")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        doc: dict[str, Any] = {"rank": self.rank, "failed_ns": self.failed_ns, "order": self.order}
        doc |= {"code": self.code} if self.signal is None else {"signal": self.signal}
        optional = {"ended": self.ended, "core_dumped": self.core_dumped, "stamp": self.stamp}
        doc |= {key: value for key, value in optional.items() if value}
        return doc | ({"error": self.error.to_json()} if self.error else {})

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> RankExit:
        """The inverse of `to_json`."""
        error = doc.get("error")
        return cls(
            rank=doc["rank"],
            code=doc.get("code"),
            signal=doc.get("signal"),
            failed_ns=doc["failed_ns"],
            order=doc["order"],
            ended=doc.get("ended", False),
            core_dumped=doc.get("core_dumped", False),
            stamp=doc.get("stamp"),
            error=RankError(**error) if error else None,
        )


@dataclass(frozen=True, slots=True)
class Hang:
    """A confirmed hang as its node saw it. `section` None: out of any section. `reason` is one sentence with numbers."""

    rank: int
    section: str | None
    since_s: float
    limit_s: float
    iteration: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "rank": self.rank,
            "section": self.section,
            "since_s": self.since_s,
            "limit_s": self.limit_s,
            "iteration": self.iteration,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Hang:
        """The inverse of `to_json`."""
        return cls(**doc)


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Where a rank was when last looked at. `iteration` is absolute or None when the script gives none; `steps` counts completed steps of this cycle.

    `since_s`: how long it has been there. `client`: a monitoring client is attached. `saved`: it has completed a save that did something.

    The rest is what attribution compares: `ended` counts the sections that ended, `stepping`: a `step` is open, `still_s`: how long since its last progress (else its start).
    `state`: the kernel's letter for its process (`C` while it dumps core, empty unknown); `place`: where its stack stands in a few words (monitors.attribution_places), empty unknown.
    """

    iteration: int | None
    steps: int
    section: str | None
    since_s: float
    client: bool
    saved: bool = False
    ended: int = 0
    stepping: bool = False
    still_s: float | None = None
    state: str = ""
    place: str = ""

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        still_s = None if self.still_s is None else round(self.still_s, 3)
        where = [self.iteration, self.steps, self.section, round(self.since_s, 3), self.client, self.saved]
        return [*where, self.ended, self.stepping, still_s, self.state, self.place]

    @classmethod
    def from_json(cls, doc: list[Any]) -> RankProgress:
        """The inverse of `to_json`."""
        return cls(*doc)


@dataclass(frozen=True, slots=True)
class Blame:
    """Whose hang it is: `rank`, or None when that cannot be told. `why`: one sentence with numbers, either way. `victims` only wait; `suspects` are left when nobody is named."""

    rank: int | None
    why: str
    victims: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Address:
    """Where the ranks meet: a host that other nodes can reach, and a port. `serving`: a store of ours listens there already; else rank 0 has to host it."""

    host: str
    port: int
    serving: bool = True

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        return [self.host, self.port, self.serving]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything one node knows about one cycle; `sequence` grows with every report of that node.

    `reaped`: nothing of the cycle is alive on the node and its devices are free: the acknowledgement. `standby`: the store that waits for the next cycle.
    `unfit`: why this node cannot take ranks any more. `signals`: stop signals its agent has received, oldest first. `incarnation`: see NodeInfo. `reruns`: the last
    word of each rank's rerun machine. `devices`: see NodeInfo; here as well, for a controller that takes over while the node's registration is gone.
    """

    node_id: str
    generation: int
    cycle: int
    sequence: int = 0
    started: bool = False
    exits: Mapping[int, RankExit] = field(default_factory=lambda: EMPTY)
    hangs: Mapping[int, Hang] = field(default_factory=lambda: EMPTY)
    progress: Mapping[int, RankProgress] = field(default_factory=lambda: EMPTY)
    reaped: bool = False
    reap_s: float = 0.0
    standby: Address | None = None
    platform_fault: str | None = None
    unfit: str | None = None
    signals: tuple[int, ...] = ()
    incarnation: str = ""
    reruns: Mapping[int, RerunFinding] = field(default_factory=lambda: EMPTY)
    devices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "node_id": self.node_id,
            "generation": self.generation,
            "cycle": self.cycle,
            "sequence": self.sequence,
            "started": self.started,
            "exits": [e.to_json() for e in self.exits.values()],
            "hangs": [h.to_json() for h in self.hangs.values()],
            "progress": {str(rank): p.to_json() for rank, p in self.progress.items()},
            "reaped": self.reaped,
            "reap_s": round(self.reap_s, 4),
            "standby": self.standby.to_json() if self.standby else None,
            "platform_fault": self.platform_fault,
            "unfit": self.unfit,
            "signals": list(self.signals),
            "incarnation": self.incarnation,
            "reruns": [finding.to_json() for finding in self.reruns.values()],
            "devices": list(self.devices),
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> NodeReport:
        """The inverse of `to_json`."""
        exits = [RankExit.from_json(e) for e in doc["exits"]]
        hangs = [Hang.from_json(h) for h in doc["hangs"]]
        nested = {
            "exits": {e.rank: e for e in exits},
            "hangs": {h.rank: h for h in hangs},
            "progress": {int(rank): RankProgress.from_json(p) for rank, p in doc["progress"].items()},
            "standby": Address(*doc["standby"]) if doc["standby"] else None,
            "signals": tuple(doc["signals"]),
            "reruns": by_rank([RerunFinding.from_json(f) for f in doc.get("reruns", ())]),
            "devices": tuple(doc.get("devices", ())),
        }
        return cls(**{**doc, **nested})


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A registered node. `order` is SLURM_NODEID where known; `address` is where its agent listens for others.

    `incarnation` tells an agent from its predecessor under the same node id: whatever the former one ran ended with it.
    """

    node_id: str
    address: str
    nproc: int
    generation: int
    order: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    incarnation: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "node_id": self.node_id,
            "address": self.address,
            "nproc": self.nproc,
            "generation": self.generation,
            "order": self.order,
            "labels": dict(self.labels),
            "devices": list(self.devices),
            "incarnation": self.incarnation,
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> NodeInfo:
        """The inverse of `to_json`."""
        return cls(**{**doc, "devices": tuple(doc["devices"])})
