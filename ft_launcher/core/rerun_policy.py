"""Run it again on other hardware: rule 3 of the policy (docs/design.md section 8, docs/rerun.md).

Exit 16 says: this result was rejected, computed again in place, and came out the same; let other hardware compute it. So the suspected rank, and it above all, has to
land on another device: its node for a spare, else another slot; where nodes have one rank, another node's place. The rule decides who moves where; the job machine carries
it out, and the roster keeps suspects off the devices they were on, whatever comes between.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.core.causes import Evidence, Failure
from ft_launcher.core.decision import RERUN_ELSEWHERE, Decision, Do, RerunChange, exit_with, first_cause
from ft_launcher.core.hardware import (
    DeviceRecord,
    Dispute,
    Ledger,
    device_of,
    exclusions,
    kept_off,
    off_limits,
    suspected,
)
from ft_launcher.core.placement import Placement, choose_spare
from ft_launcher.core.rerun_report import RerunStatus
from ft_launcher.core.state import Budgets, Outcome, Verdict

TRANSIENT, PERSISTENT = "transient", "persistent"


def rerun_elsewhere(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 3: a rank asks to be run again on other hardware (exit 16)."""
    failure = exit_with(evidence, RERUN_ELSEWHERE)
    placement = evidence.state.placement
    if failure is None or placement is None:
        return None
    dispute = _dispute(evidence, placement)
    ledger = _with_suspects(evidence, dispute)
    asked = _who_asks(evidence, failure, dispute)
    used, limit = replace(budgets, reruns=budgets.reruns + 1), evidence.options.max_reruns
    if used.reruns > limit:
        return _pass_on(
            evidence,
            failure,
            used,
            f"{asked}; that is move or verdict {used.reruns} without progress between, {limit} allowed",
            ledger,
            dispute,
        )
    move = _by_spare(evidence, dispute) or _by_slot(evidence, dispute, placement)
    if move is None:
        return _pass_on(evidence, failure, used, f"{asked}; there is no other device to run it on", ledger, dispute)
    replaced, target, how = move
    change = RerunChange(ledger, replace(dispute, moves=dispute.moves + 1), "")
    culprit = evidence.culprit(min(dispute.suspects), "its result was the same when run again in place") if dispute.suspects else None
    return Decision(
        Do.REPLACE if replaced else Do.RESTART,
        3,
        "rerun",
        f"{asked}: {how}",
        used,
        culprit=culprit,
        replaced=replaced,
        ruled_out=False,
        placement=target,
        rerun=change,
    )


def _dispute(evidence: Evidence, placement: Placement) -> Dispute:
    """The dispute that goes on, with the devices that were tried now, or a new one."""
    found = [f.rank for f in evidence.reruns().values() if f.status is RerunStatus.FIRST_RERUN_REPRODUCIBLE]
    known, iteration = evidence.state.rerun, evidence.iteration()
    if known is not None and not _same_matter(known, found, iteration):
        known = None
    if known is None:
        known = Dispute(evidence.state.cycle, iteration, placement, {})
    suspects = found or sorted(known.suspects)
    tried = {rank: _and_now(known.suspects.get(rank, ()), device_at(evidence, placement, rank)) for rank in suspects}
    return replace(known, suspects=tried)


def _same_matter(known: Dispute, found: list[int], iteration: int | None) -> bool:
    """A rank that nobody suspected, or a step well beyond the disputed one, is a new matter."""
    beyond = iteration is not None and known.iteration is not None and iteration > known.iteration + 1
    strangers = known.suspects and not set(found) <= set(known.suspects)
    return not beyond and not strangers


def _and_now(tried: tuple[str, ...], device: str) -> tuple[str, ...]:
    return tried if device in tried else (*tried, device)


def device_at(evidence: Evidence, placement: Placement, rank: int) -> str:
    """The stable name of the device that `rank` has in `placement`."""
    return device_of(evidence.devices, *placement.place(rank))


def _with_suspects(evidence: Evidence, dispute: Dispute) -> Ledger:
    """A device is suspected when its result is first disputed; asking again adds nothing against it."""
    ledger = evidence.state.hardware
    before = evidence.state.rerun.suspects if evidence.state.rerun is not None else {}
    for rank, tried in dispute.suspects.items():
        if rank in before and tried[0] in before[rank]:
            continue
        node, slot = dispute.origin.place(rank)
        why = f"a result of rank {rank} was rejected and came out the same when run again in place (cycle {evidence.state.cycle})"
        ledger = suspected(ledger, tried[0], DeviceRecord(node, slot, rank=rank, why=why), limit=0)
    return ledger


def _who_asks(evidence: Evidence, failure: Failure, dispute: Dispute) -> str:
    if not dispute.suspects:
        return f"{evidence.place(failure.exit.rank)} asks to be run again on other hardware (exit 16) and no record says whose result it is"
    names = [evidence.place(rank) for rank in sorted(dispute.suspects)]
    rest = len(names) - 2
    said = next((f.text for f in evidence.reruns().values() if f.rank in dispute.suspects and f.text), "")
    whose = f"{names[0]}, {names[1]} and {rest} more" if rest > 0 else " and ".join(names)
    return f"the result of {whose} has to be computed on other hardware (exit 16{f': {said}' if said else ''})"


Move = tuple[tuple[str, ...], Placement | None, str]


def _by_spare(evidence: Evidence, dispute: Dispute) -> Move | None:
    """Whole nodes for spares, as far as there are any that no suspect has been on; the rest by slot."""
    placement = evidence.state.placement
    if placement is None:
        return None
    if not dispute.suspects:
        return _with_the_lost(evidence, placement)
    free, taken, target = list(evidence.spares), dict[str, str](), placement
    for node in sorted({placement.node_of(rank) for rank in dispute.suspects}, key=placement.position_of):
        usable = [s for s in free if _new_to_all(evidence, dispute, target.replace(node, s.node), s.node)]
        chosen = choose_spare(evidence.labels.get(node, {}), usable).node
        if chosen is not None:
            taken[node], target = chosen, target.replace(node, chosen)
            free = [s for s in free if s.node != chosen]
    if not taken or kept_off(target, off_limits({}, dispute), evidence.devices) is None:
        return None
    how = "; ".join(f"node {spare} takes the place of node {node}" for node, spare in taken.items())
    return tuple(taken), target, how


def _with_the_lost(evidence: Evidence, placement: Placement) -> Move | None:
    """Nobody knows whose result it is, but some nodes are gone: what was theirs is computed elsewhere anyway."""
    gone = tuple(n for n in placement.nodes if n in evidence.lost)
    if not gone:
        return None
    return gone, placement.rotate_all(), f"node {', '.join(gone)} is lost, so others take its place; every rank moves to the next slot"


def _new_to_all(evidence: Evidence, dispute: Dispute, target: Placement, node: str) -> bool:
    there = [rank for rank in dispute.suspects if target.node_of(rank) == node]
    return all(device_at(evidence, target, rank) not in dispute.suspects[rank] for rank in there)


def _by_slot(evidence: Evidence, dispute: Dispute, placement: Placement) -> Move | None:
    """The suspects change slots with others of their nodes; nobody known: every rank moves to the next slot."""
    if placement.nproc == 1:
        return _by_node(evidence, dispute, placement)
    if not dispute.suspects:
        if dispute.moves + 1 >= placement.nproc:
            return None
        return (), placement.rotate_all(), "every rank moves to the next slot of its node"
    bad = frozenset(device for device, record in evidence.state.hardware.items() if record.quarantined)
    tried = off_limits({}, dispute)
    choosy = {rank: devices | bad for rank, devices in tried.items()}
    target = kept_off(placement, choosy, evidence.devices) or kept_off(placement, tried, evidence.devices)
    if target is None:
        return None
    went = [f"rank {r} moves to slot {target.slot_of(r)} of node {target.node_of(r)}" for r in sorted(dispute.suspects)]
    return (), target, "; ".join(went[:3]) + (f" and {len(went) - 3} more" if len(went) > 3 else "")


def _by_node(evidence: Evidence, dispute: Dispute, placement: Placement) -> Move | None:
    """With one rank a node, nodes are what slots are elsewhere: a suspect changes places with another node's rank; nobody known: every rank moves to the next node."""
    if not dispute.suspects:
        if dispute.moves + 1 >= len(placement.nodes):
            return None
        return (), placement.rotate_nodes(), "every rank moves to the next node"
    target, went = placement, []
    for rank in sorted(dispute.suspects):
        node, tried = target.node_of(rank), dispute.suspects[rank]
        others = sorted((abs(i - rank), i, n) for i, n in enumerate(target.nodes) if device_of(evidence.devices, n, 0) not in tried)
        if device_of(evidence.devices, node, 0) in tried and others:
            target = target.exchange(node, others[0][2])
            went.append(f"rank {rank} changes places with rank {others[0][1]} of node {others[0][2]}")
    settled = all(device_at(evidence, target, rank) not in tried for rank, tried in dispute.suspects.items())
    return ((), target, "; ".join(went)) if settled else None


def _pass_on(evidence: Evidence, failure: Failure, budgets: Budgets, reason: str, ledger: Ledger, dispute: Dispute) -> Decision:
    """Exit 16 to the scheduler, with the devices to stay away from."""
    held = [tried[0] for tried in dispute.suspects.values()]
    rank = min(dispute.suspects, default=failure.exit.rank)
    culprit = evidence.culprit(rank, "its result has to be computed on other hardware")
    cause = first_cause(evidence, failure, "rerun", culprit)
    reason = f"{reason}: requeue elsewhere"
    verdict = Verdict(Outcome.RERUN_ELSEWHERE, RERUN_ELSEWHERE, reason, cause, exclusions(ledger, held))
    return Decision(Do.STOP, 3, "rerun", reason, budgets, verdict, culprit, rerun=RerunChange(ledger, dispute, ""))
