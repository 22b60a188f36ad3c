"""What is held against devices, and the result that two devices have to agree upon. Values and pure functions; quarantine's end is the shell's to watch, for there is no clock here.

A device is what a slot stands for: its GPU's UUID where the node knows one, else "node id/slot". The ledger maps devices to what is known of them; it is part of the
job state, starts as what earlier runs have left, and is exported to ft_state. A `Dispute` is a rejected result that other hardware has to decide (Megatron's exit
16): who is suspected, and on which devices the result has been computed so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ft_launcher.core.placement import Placement


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One device: where it was last seen, how often it was suspected, whether no rank may use it; `rank` is the one whose results it spoiled, `why` the last word on it."""

    node: str
    slot: int
    suspicions: int = 0
    quarantined: bool = False
    rank: int | None = None
    why: str = ""

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        return [self.node, self.slot, self.suspicions, self.quarantined, self.rank, self.why]

    @classmethod
    def from_json(cls, doc: list[Any]) -> DeviceRecord:
        """The inverse of `to_json`."""
        return cls(*doc)


Ledger = Mapping[str, DeviceRecord]
Devices = Mapping[str, tuple[str, ...]]
"""Node -> its devices' stable names by slot; empty where it has none."""
NOTHING: Ledger = MappingProxyType({})


def device_of(devices: Devices, node: str, slot: int) -> str:
    """The stable name of a slot's device."""
    known = devices.get(node, ())
    return known[slot] if slot < len(known) else f"{node}/{slot}"


def suspected(ledger: Ledger, device: str, record: DeviceRecord, limit: int) -> Ledger:
    """One more suspicion against a device; from `limit` on (0: never) it is quarantined."""
    count = (ledger[device].suspicions if device in ledger else 0) + 1
    kept = ledger[device].quarantined if device in ledger else False
    return {**ledger, device: replace(record, suspicions=count, quarantined=kept or 0 < limit <= count)}


def quarantined(ledger: Ledger, device: str, record: DeviceRecord) -> Ledger:
    """No rank may use it until its quarantine ends."""
    count = ledger[device].suspicions if device in ledger else 0
    return {**ledger, device: replace(record, suspicions=count, quarantined=True)}


def cleared(ledger: Ledger, device: str, why: str) -> Ledger:
    """The last suspicion against a device has turned out to be none."""
    known = ledger.get(device)
    if known is None or known.quarantined:
        return ledger
    return {**ledger, device: replace(known, suspicions=max(0, known.suspicions - 1), why=why)}


def quarantined_slots(ledger: Ledger, devices: Devices, node: str, nproc: int) -> frozenset[int]:
    """The slots of a node that no rank may use."""
    bad = {device for device, record in ledger.items() if record.quarantined}
    return frozenset(slot for slot in range(nproc) if device_of(devices, node, slot) in bad) if bad else frozenset()


def exclusions(ledger: Ledger, held: Iterable[str] = ()) -> tuple[dict[str, Any], ...]:
    """The devices that a scheduler should keep this job off: those in quarantine, and `held` ones under suspicion."""
    also = set(held)
    wanted = [device for device, record in ledger.items() if record.quarantined or device in also]
    return tuple({"node": ledger[d].node, "slot": ledger[d].slot, "device": d, "why": ledger[d].why} for d in wanted)


@dataclass(frozen=True, slots=True)
class Dispute:
    """A rejected result that other hardware has to decide. `origin`: where every rank was when it was first rejected, at `iteration` (None: not known).

    `suspects` maps each suspected rank to the devices on which it has computed the result, the first one first; empty while nobody knows whose result it is. `moves`: how
    often ranks were moved because of it.
    """

    cycle: int
    iteration: int | None
    origin: Placement
    suspects: Mapping[int, tuple[str, ...]]
    moves: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        suspects = {str(rank): list(tried) for rank, tried in self.suspects.items()}
        return {
            "cycle": self.cycle,
            "iteration": self.iteration,
            "origin": self.origin.to_json(),
            "suspects": suspects,
            "moves": self.moves,
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Dispute:
        """The inverse of `to_json`. ValueError for a placement that is no bijection."""
        suspects = {int(rank): tuple(tried) for rank, tried in doc["suspects"].items()}
        return cls(doc["cycle"], doc["iteration"], Placement.from_json(doc["origin"]), suspects, doc["moves"])


def off_limits(ledger: Ledger, dispute: Dispute | None) -> dict[int, frozenset[str]]:
    """Rank -> devices on which its results are in doubt: those tried in the dispute, and those in quarantine because of it."""
    found: dict[int, frozenset[str]] = {}
    for device, record in ledger.items():
        if record.quarantined and record.rank is not None:
            found[record.rank] = found.get(record.rank, frozenset()) | {device}
    for rank, tried in dispute.suspects.items() if dispute is not None else ():
        found[rank] = found.get(rank, frozenset()) | frozenset(tried)
    return found


def kept_off(placement: Placement, doubtful: Mapping[int, frozenset[str]], devices: Devices) -> Placement | None:
    """The placement in which no rank is on a device that is in doubt for it, by exchanging slots within nodes; the nearest to the given one.

    None where no exchange achieves that. Ranks that are nowhere near a doubtful device stay where they are.
    """
    for node in {placement.node_of(rank) for rank in doubtful if rank < placement.world}:
        ranks = {rank: bad for rank, bad in doubtful.items() if rank < placement.world and placement.node_of(rank) == node}
        moved = _node_kept_off(placement, node, ranks, devices)
        if moved is None:
            return None
        placement = moved
    return placement


def _node_kept_off(placement: Placement, node: str, doubtful: Mapping[int, frozenset[str]], devices: Devices) -> Placement | None:
    def at_fault(candidate: Placement) -> list[int]:
        return [rank for rank, bad in doubtful.items() if device_of(devices, node, candidate.slot_of(rank)) in bad]

    exchanged = placement
    for rank in at_fault(placement):
        avoid = {slot for slot in range(placement.nproc) if device_of(devices, node, slot) in doubtful[rank]}
        exchanged = exchanged.move_to_other_slot(node, rank, avoid) or exchanged
    if not at_fault(exchanged):
        return exchanged
    turned = placement
    for _ in range(placement.nproc - 1):
        turned = turned.rotate(node)
        if not at_fault(turned):
            return turned
    return None
