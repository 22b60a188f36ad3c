"""The job's whole durable state: one value, one key in the store.

Whoever holds the lease continues from exactly this; nothing that a successor needs may live elsewhere. It knows no clock: times that people read are added where
it is exported. It must stay below 256 KiB at 10,000 ranks, hence a node list plus the permutations that are not the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ft_launcher.core.evidence import NO_CYCLE, Address, Blame, RankExit, RankProgress
from ft_launcher.core.hardware import DeviceRecord, Dispute, Ledger
from ft_launcher.core.placement import Placement
from ft_launcher.core.topology import Topology

Attribute = Callable[[Mapping[int, RankProgress], Mapping[int, RankExit], float, Topology], Blame]
"""(progress, exits, age of the hang in seconds, topology) -> whose hang it is. Pure; handed in, because it belongs to the monitors (monitors.attribution)."""


class Phase(StrEnum):
    """Where the job is in its life."""

    FORMING = "forming"
    """No cycle of this generation has started: waiting until enough nodes are ready."""
    RUNNING = "running"
    """The ranks of `cycle` run, or are being started."""
    DRAINING = "draining"
    """Somebody asked for the end: the signal is forwarded, ranks have `term_grace_s` to leave."""
    ENDING = "ending"
    """The end of `cycle` is decided: every node kills what is left of it and acknowledges."""
    PAUSED = "paused"
    """`cycle` is over and settled; the next one waits for time (backoff) or for a node."""
    DONE = "done"
    """The verdict stands."""


class Outcome(StrEnum):
    """What the whole run concluded (verdict.json's `outcome`)."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    NO_PROGRESS = "no_progress"
    NOT_ENOUGH_NODES = "not_enough_nodes"
    RERUN_ELSEWHERE = "rerun_elsewhere"
    RESULT_REJECTED = "result_rejected"
    STORE_UNREACHABLE = "store_unreachable"


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who was at fault, in coordinates, and how that is known."""

    rank: int
    coords: str
    node: str
    slot: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"rank": self.rank, "coords": self.coords, "node": self.node, "slot": self.slot, "why": self.why}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the run: what every agent exits with, and why. `exclude`: the devices that the next launch should stay away from."""

    outcome: Outcome
    exit_code: int
    reason: str
    first_cause: Mapping[str, Any] | None = None
    exclude: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        cause = dict(self.first_cause) if self.first_cause is not None else None
        exclude = {"exclude": [dict(device) for device in self.exclude]} if self.exclude else {}
        return {"outcome": self.outcome.value, "exit_code": self.exit_code, "reason": self.reason, "first_cause": cause, **exclude}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`."""
        return cls(Outcome(doc["outcome"]), doc["exit_code"], doc["reason"], doc.get("first_cause"), tuple(doc.get("exclude", ())))


@dataclass(frozen=True, slots=True)
class Budgets:
    """What has been used up, over the whole generation; survives controllers and nodes.

    `best_iteration`: the highest iteration that all ranks of a cycle reached. `best_steps`: the most steps one cycle completed (scripts without absolute iterations).
    `clients`: the most ranks that had a client in one cycle.
    `stuck_cycles`: cycles in a row that went no further. `failures_in_a_row`: consecutive ends without progress since, what backoff grows with. `reruns`: moves and verdicts
    because of wrong numbers. `last_error`: which error ended the last cycle that a crash ended, and where.
    """

    restarts: int = 0
    platform: int = 0
    best_iteration: int | None = None
    best_steps: int = 0
    stuck_cycles: int = 0
    failures_in_a_row: int = 0
    client_known: bool = False
    clients: int = 0
    node_failures: Mapping[str, int] = field(default_factory=dict)
    reruns: int = 0
    last_error: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "restarts": self.restarts,
            "platform": self.platform,
            "best_iteration": self.best_iteration,
            "best_steps": self.best_steps,
            "stuck_cycles": self.stuck_cycles,
            "failures_in_a_row": self.failures_in_a_row,
            "client_known": self.client_known,
            "clients": self.clients,
            "node_failures": dict(self.node_failures),
            "reruns": self.reruns,
            "last_error": self.last_error,
        }


@dataclass(frozen=True, slots=True)
class JobState:
    """One value of the `job` key. `cycle` is the running or the last one (NO_CYCLE before the first); `master` is the store its ranks meet in.

    `stop_signal` is set while the job drains; `leaving` are the agents (node: incarnation) that are to go while the job stays, their ranks by `leave_signal`. `lost` are
    nodes declared lost since the cycle started; `incarnations` and `addresses` say which agents the placed nodes had when it did, and where; `ruled_out` the agents (node:
    incarnation) that get no ranks any more. `reason`: why the job is in this phase, one sentence.

    `hardware` is the ledger of devices; `rerun` the result that other hardware has to decide; `rerun_verdict` (`transient`, `persistent` or empty) tells ranks that what a
    checkpoint holds of an earlier rerun is settled. `check_overruled`: why the health check is not believed any more (core/overrule.py), empty while it is.
    """

    run_id: str
    generation: int
    phase: Phase = Phase.FORMING
    cycle: int = NO_CYCLE
    placement: Placement | None = None
    master: Address | None = None
    reason: str = "waiting for nodes"
    restart_reason: str = ""
    stop_signal: int | None = None
    leaving: Mapping[str, str] = field(default_factory=dict)
    leave_signal: int = 15
    finished: bool = False
    incarnations: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    budgets: Budgets = field(default_factory=Budgets)
    verdict: Verdict | None = None
    hardware: Ledger = field(default_factory=dict)
    rerun: Dispute | None = None
    rerun_verdict: str = ""
    check_overruled: str = ""

    def leaves(self, node_id: str) -> bool:
        """Whether the agent that was given this node's ranks is to go. Another agent of the same node id is not meant."""
        return node_id in self.leaving and self.leaving[node_id] == self.incarnations.get(node_id, "")

    def but(self, **changes: Any) -> JobState:
        """The same state with some fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "run_id": self.run_id,
            "generation": self.generation,
            "phase": self.phase.value,
            "cycle": self.cycle,
            "placement": self.placement.to_json() if self.placement else None,
            "master": self.master.to_json() if self.master else None,
            "reason": self.reason,
            "restart_reason": self.restart_reason,
            "stop_signal": self.stop_signal,
            "leaving": dict(self.leaving),
            "leave_signal": self.leave_signal,
            "finished": self.finished,
            "incarnations": dict(self.incarnations),
            "addresses": dict(self.addresses),
            "lost": dict(self.lost),
            "ruled_out": dict(self.ruled_out),
            "budgets": self.budgets.to_json(),
            "verdict": self.verdict.to_json() if self.verdict else None,
            "hardware": {device: record.to_json() for device, record in self.hardware.items()},
            "rerun": self.rerun.to_json() if self.rerun else None,
            "rerun_verdict": self.rerun_verdict,
            "check_overruled": self.check_overruled,
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> JobState:
        """The inverse of `to_json`."""
        nested = {
            "phase": Phase(doc["phase"]),
            "placement": Placement.from_json(doc["placement"]) if doc["placement"] else None,
            "master": Address(*doc["master"]) if doc["master"] else None,
            "budgets": Budgets(**doc["budgets"]),
            "verdict": Verdict.from_json(doc["verdict"]) if doc["verdict"] else None,
            "hardware": {device: DeviceRecord.from_json(record) for device, record in doc.get("hardware", {}).items()},
            "rerun": Dispute.from_json(doc["rerun"]) if doc.get("rerun") else None,
        }
        return cls(**{**doc, **nested})


@dataclass(frozen=True, slots=True)
class Options:
    """What the core needs of the configuration. Seconds throughout; `nodes_wanted` active nodes, `can_join`: whether further nodes can ever appear.

    `attribute` names the culprit of a hang; without one it is whoever stood still longest. `quarantine_after`: suspicions that put a device into quarantine, 0: never.
    `healthy_stretch_s`: a cycle of this length that made progress gives one restart back, 0: never.
    """

    nodes_wanted: int
    nproc: int
    can_join: bool = False
    max_restarts: int = 3
    no_progress_cycles: int = 3
    max_platform_faults: int = 3
    max_reruns: int = 10
    quarantine_after: int = 3
    healthy_stretch_s: float = 21600.0
    join_wait_s: float = 600.0
    spare_wait_s: float = 600.0
    exit_grace_s: float = 60.0
    term_grace_s: float = 25.0
    survivor_grace_s: float = 0.0
    reap_s: float = 30.0
    error_grace_s: float = 1.0
    backoff_max_s: float = 30.0
    attribute: Attribute | None = None
