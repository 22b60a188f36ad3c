"""What to do about a wrong number: rules 3 and 4 of the policy (docs/design.md section 8, docs/rerun.md).

Exit 16 says: this result was rejected, computed again in place, and came out the same; let other hardware compute it. So the suspected rank, and it above all, has to
land on another device. Exit 17 says: it has been decided. What was decided stands in the findings that ranks left (section page, tracker file); without one nothing is
guessed. These rules decide who moves and which device is held responsible; the job machine carries it out, the roster finds the place.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.core.causes import Evidence, Failure
from ft_launcher.core.decision import RERUN_ELSEWHERE, RESULT_REJECTED, Decision, Do, RerunChange, exit_with, first_cause
from ft_launcher.core.hardware import (
    DeviceRecord,
    Dispute,
    Ledger,
    cleared,
    device_of,
    exclusions,
    kept_off,
    off_limits,
    quarantined,
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
        return _pass_on(evidence, failure, used, f"{asked}; that was asked {used.reruns} times, {limit} allowed", ledger, dispute)
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
    tried = {rank: _and_now(known.suspects.get(rank, ()), _device(evidence, placement, rank)) for rank in suspects}
    return replace(known, suspects=tried)


def _same_matter(known: Dispute, found: list[int], iteration: int | None) -> bool:
    """A rank that nobody suspected, or a step well beyond the disputed one, is a new matter."""
    beyond = iteration is not None and known.iteration is not None and iteration > known.iteration + 1
    strangers = known.suspects and not set(found) <= set(known.suspects)
    return not beyond and not strangers


def _and_now(tried: tuple[str, ...], device: str) -> tuple[str, ...]:
    return tried if device in tried else (*tried, device)


def _device(evidence: Evidence, placement: Placement, rank: int) -> str:
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
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    said = next((f.text for f in evidence.reruns().values() if f.rank in dispute.suspects and f.text), "")
    return f"the result of {' and '.join(names[:2])}{more} has to be computed on other hardware (exit 16{f': {said}' if said else ''})"


Move = tuple[tuple[str, ...], Placement | None, str]


def _by_spare(evidence: Evidence, dispute: Dispute) -> Move | None:
    """Whole nodes for spares, as far as there are any that no suspect has been on; the rest by slot."""
    placement = evidence.state.placement
    if placement is None or not dispute.suspects:
        return None
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
    return tuple(taken), None, how


def _new_to_all(evidence: Evidence, dispute: Dispute, target: Placement, node: str) -> bool:
    there = [rank for rank in dispute.suspects if target.node_of(rank) == node]
    return all(_device(evidence, target, rank) not in dispute.suspects[rank] for rank in there)


def _by_slot(evidence: Evidence, dispute: Dispute, placement: Placement) -> Move | None:
    """The suspects change slots with others of their nodes; nobody known: every rank moves to the next slot."""
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


def _pass_on(evidence: Evidence, failure: Failure, budgets: Budgets, reason: str, ledger: Ledger, dispute: Dispute) -> Decision:
    """Exit 16 to the scheduler, with the devices to stay away from."""
    held = [tried[0] for tried in dispute.suspects.values()]
    rank = min(dispute.suspects, default=failure.exit.rank)
    culprit = evidence.culprit(rank, "its result has to be computed on other hardware")
    cause = first_cause(evidence, failure, "rerun", culprit)
    reason = f"{reason}: requeue elsewhere"
    verdict = Verdict(Outcome.RERUN_ELSEWHERE, RERUN_ELSEWHERE, reason, cause, exclusions(ledger, held))
    return Decision(Do.STOP, 3, "rerun", reason, budgets, verdict, culprit, rerun=RerunChange(ledger, dispute, ""))


def result_rejected(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 4: result validation has come to a verdict (exit 17). A correct result outweighs a fault, a persistent fault a transient one."""
    failure = exit_with(evidence, RESULT_REJECTED)
    placement = evidence.state.placement
    if failure is None or placement is None:
        return None
    ranks = {status: sorted(f.rank for f in evidence.reruns().values() if f.status is status) for status in RerunStatus}
    if found := ranks[RerunStatus.SECOND_RERUN_REPRODUCIBLE]:
        return _correct(evidence, failure, budgets, found[0])
    if found := ranks[RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE]:
        return _at_fault(evidence, failure, budgets, found, PERSISTENT)
    if found := ranks[RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE]:
        return _at_fault(evidence, failure, budgets, found, TRANSIENT)
    reason = f"{evidence.place(failure.exit.rank)} reports failed result validation (exit 17) and no record says whether the hardware is at fault"
    return _stop(evidence, failure, budgets, reason, failure.exit.rank, evidence.state.hardware)


def _stop(evidence: Evidence, failure: Failure, budgets: Budgets, reason: str, rank: int, ledger: Ledger) -> Decision:
    culprit = evidence.culprit(rank, "its result validation failed (exit 17)")
    cause = first_cause(evidence, failure, "result rejected", culprit)
    verdict = Verdict(Outcome.RESULT_REJECTED, RESULT_REJECTED, reason, cause, exclusions(ledger))
    change = RerunChange(ledger, None, evidence.state.rerun_verdict)
    return Decision(Do.STOP, 4, "result rejected", reason, budgets, verdict, culprit, rerun=change)


def _correct(evidence: Evidence, failure: Failure, budgets: Budgets, rank: int) -> Decision:
    """Two devices agree: the unexpected result is right, and the application's."""
    first = _first_device(evidence, rank)
    on = f" (first on {first}, now on {_here(evidence, rank)})" if first is not None else ""
    reason = f"{evidence.place(rank)} computed the same rejected result on two devices{on}: it is correct, and the application is the cause, not the hardware"
    ledger = evidence.state.hardware
    for suspect in evidence.state.rerun.suspects if evidence.state.rerun is not None else [rank]:
        device = _first_device(evidence, suspect)
        ledger = cleared(ledger, device, f"another device confirmed the result of rank {suspect}") if device is not None else ledger
    return _stop(evidence, failure, budgets, reason, rank, ledger)


def _here(evidence: Evidence, rank: int) -> str:
    placement = evidence.state.placement
    return _device(evidence, placement, rank) if placement is not None else "?"


def _first_device(evidence: Evidence, rank: int) -> str | None:
    """Where the result of `rank` was first rejected: from the dispute, else from what an earlier run has left; None when neither knows."""
    dispute = evidence.state.rerun
    if dispute is not None and (rank in dispute.suspects or not dispute.suspects):
        tried = dispute.suspects.get(rank)
        return tried[0] if tried else device_of(evidence.devices, *dispute.origin.place(rank))
    held = [
        device
        for device, record in evidence.state.hardware.items()
        if record.rank == rank
        and record.suspicions > 0
        and not record.why.startswith(TRANSIENT)  # that one was settled, and is another matter
    ]
    return held[-1] if held else None


def _at_fault(evidence: Evidence, failure: Failure, budgets: Budgets, ranks: list[int], verdict: str) -> Decision:
    """Hardware was at fault. Persistent: the first device is quarantined. Transient: it is suspected, and quarantined when that happens too often. The job goes on."""
    ledger, said = evidence.state.hardware, list[str]()
    for rank in ranks:
        ledger, words = (_persistent if verdict == PERSISTENT else _transient)(evidence, ledger, rank)
        said.append(words)
    used, limit = replace(budgets, reruns=budgets.reruns + 1), evidence.options.max_reruns
    reason = "; ".join(said)
    if used.reruns > limit:
        return _stop(evidence, failure, used, f"{reason}; that was verdict or move {used.reruns}, {limit} allowed", ranks[0], ledger)
    replaced, how = _without_quarantined(evidence, ledger)
    culprit = evidence.culprit(ranks[0], said[0])
    change = RerunChange(ledger, None, verdict)
    do = Do.REPLACE if replaced else Do.RESTART
    return Decision(do, 4, f"{verdict} fault", f"{reason}; {how}", used, culprit=culprit, replaced=replaced, rerun=change)


def _persistent(evidence: Evidence, ledger: Ledger, rank: int) -> tuple[Ledger, str]:
    device = _first_device(evidence, rank)
    if device is None or device == _here(evidence, rank):  # where it computes now cannot be where it computed before
        return (
            ledger,
            f"persistent fault: {evidence.place(rank)} got another result than on the device before; which one that was is not known to this launcher",
        )
    known, dispute = ledger.get(device), evidence.state.rerun
    node, slot = (known.node, known.slot) if known is not None else dispute.origin.place(rank) if dispute is not None else ("?", -1)
    why = f"persistent fault: rank {rank} got another result on {_here(evidence, rank)} than on {device} (node {node} slot {slot})"
    return quarantined(ledger, device, DeviceRecord(node, slot, rank=rank, why=why)), f"{why}; {device} is quarantined"


def _transient(evidence: Evidence, ledger: Ledger, rank: int) -> tuple[Ledger, str]:
    device, limit = _here(evidence, rank), evidence.options.quarantine_after
    node, slot = evidence.state.placement.place(rank) if evidence.state.placement is not None else ("?", -1)
    why = f"transient fault: {evidence.place(rank)} got another result when run again in place"
    ledger = suspected(ledger, device, DeviceRecord(node, slot, rank=rank, why=why), limit)
    count = ledger[device].suspicions
    after = (
        f"{device} is quarantined ({count} suspicions, {limit} allowed)"
        if ledger[device].quarantined
        else f"suspicion {count} against {device}"
    )
    return ledger, f"{why}; {after}"


def _without_quarantined(evidence: Evidence, ledger: Ledger) -> tuple[tuple[str, ...], str]:
    """Nodes of the placement that hold a quarantined device leave it for spares, as far as there are any; without one the job goes on there as the last resort."""
    placement = evidence.state.placement
    bad = {d for d, r in ledger.items() if r.quarantined}
    if placement is None or not bad:
        return (), "the same placement goes on with the rerun state cleared"
    held = [n for n in placement.nodes if any(device_of(evidence.devices, n, slot) in bad for slot in range(placement.nproc))]
    if not held:
        return (), "the job goes on with the rerun state cleared"
    usable = sum(1 for spare in evidence.spares if not spare.quarantined_slots)
    replaced = tuple(held[:usable])
    if not replaced:
        return (
            (),
            f"no spare can take the place of node {', '.join(held)}: the job goes on there, the affected rank off the quarantined device",
        )
    return replaced, f"a spare takes the place of node {', '.join(replaced)}; the rerun state is cleared"
