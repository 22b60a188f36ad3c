"""A verdict has been found: rule 4 of the policy (docs/design.md section 8, docs/rerun.md).

Exit 17 says: it has been decided. What was decided stands in the findings that ranks left (section page, tracker file); without one nothing is guessed. The rule holds the
right device responsible: for a persistent fault the first one of the dispute, for a transient one the present one.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.core.causes import Evidence, Failure
from ft_launcher.core.decision import RERUN_ELSEWHERE, RESULT_REJECTED, Decision, Do, RerunChange, exit_with, first_cause
from ft_launcher.core.hardware import (
    DeviceRecord,
    Ledger,
    cleared,
    device_of,
    exclusions,
    kept_off,
    off_limits,
    quarantined,
    suspected,
)
from ft_launcher.core.rerun_policy import device_at, rerun_elsewhere
from ft_launcher.core.rerun_report import RerunStatus
from ft_launcher.core.state import Budgets, Culprit, Outcome, Verdict

TRANSIENT, PERSISTENT = "transient", "persistent"


def found_meanwhile(evidence: Evidence, budgets: Budgets) -> RerunChange | None:
    """What a cycle that another rule has decided about (a node drain, the end of the job) has shown of wrong numbers: it must not be lost."""
    decision = rerun_elsewhere(evidence, budgets) or result_rejected(evidence, budgets)
    return decision.rerun if decision is not None else None


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
    return device_at(evidence, placement, rank) if placement is not None else "?"


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
    ledger, said, struck = evidence.state.hardware, list[str](), list[str]()
    for rank in ranks:
        ledger, device, words = (_persistent if verdict == PERSISTENT else _transient)(evidence, ledger, rank)
        said.append(words)
        struck += [device] if device is not None else []
    used, limit = replace(budgets, reruns=budgets.reruns + 1), evidence.options.max_reruns
    reason = "; ".join(said)
    if used.reruns > limit:
        return _stop(
            evidence,
            failure,
            used,
            f"{reason}; that is move or verdict {used.reruns} without progress between, {limit} allowed",
            ranks[0],
            ledger,
        )
    replaced, how = _without_quarantined(evidence, ledger)
    culprit = _responsible(evidence, ledger, struck, ranks[0], said[0])
    change = RerunChange(ledger, None, verdict)
    if again := _again(evidence, ledger, struck, replaced, verdict):
        reason = f"{reason}; {again} was in quarantine already and no other hardware has come: requeue elsewhere"
        end = Verdict(
            Outcome.RERUN_ELSEWHERE,
            RERUN_ELSEWHERE,
            reason,
            first_cause(evidence, failure, f"{verdict} fault", culprit),
            exclusions(ledger),
        )
        return Decision(Do.STOP, 4, f"{verdict} fault", reason, used, end, culprit, rerun=change)
    do = Do.REPLACE if replaced else Do.RESTART
    return Decision(do, 4, f"{verdict} fault", f"{reason}; {how}", used, culprit=culprit, replaced=replaced, rerun=change)


def _again(evidence: Evidence, ledger: Ledger, struck: list[str], replaced: tuple[str, ...], verdict: str) -> str:
    """The device in quarantine that has struck once more, another rank now, and stays with the job: to go on would be to wait for the next time. A transient fault costs one
    restart; as many more of them as have led to the quarantine are borne."""
    before, limit = evidence.state.hardware, evidence.options.quarantine_after
    for device in struck:
        again = device in before and before[device].quarantined and _stays(evidence, device, replaced)
        if again and (verdict == PERSISTENT or 0 < 2 * limit < ledger[device].suspicions):
            return device
    return ""


def _stays(evidence: Evidence, device: str, replaced: tuple[str, ...]) -> bool:
    placement = evidence.state.placement
    nodes = placement.nodes if placement is not None else ()
    kept = [n for n in nodes if n not in replaced and n not in evidence.lost]
    return placement is not None and any(device_of(evidence.devices, n, slot) == device for n in kept for slot in range(placement.nproc))


def _responsible(evidence: Evidence, ledger: Ledger, struck: list[str], rank: int, why: str) -> Culprit:
    """The rank, at the device that spoiled its result: not where that was found out."""
    found = evidence.culprit(rank, why)
    return replace(found, node=ledger[struck[0]].node, slot=ledger[struck[0]].slot) if struck else found


def _persistent(evidence: Evidence, ledger: Ledger, rank: int) -> tuple[Ledger, str | None, str]:
    device = _first_device(evidence, rank)
    if device is None or device == _here(evidence, rank):  # where it computes now cannot be where it computed before
        return (
            ledger,
            None,
            f"persistent fault: {evidence.place(rank)} got another result than on the device before; which one that was is not known to this launcher",
        )
    known, dispute = ledger.get(device), evidence.state.rerun
    node, slot = (known.node, known.slot) if known is not None else dispute.origin.place(rank) if dispute is not None else ("?", -1)
    why = f"persistent fault: rank {rank} got another result on {_here(evidence, rank)} than on {device} (node {node} slot {slot})"
    return quarantined(ledger, device, DeviceRecord(node, slot, rank=rank, why=why)), device, f"{why}; {device} is quarantined"


def _transient(evidence: Evidence, ledger: Ledger, rank: int) -> tuple[Ledger, str | None, str]:
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
    return ledger, device, f"{why}; {after}"


def _without_quarantined(evidence: Evidence, ledger: Ledger) -> tuple[tuple[str, ...], str]:
    """Nodes of the placement that hold a quarantined device leave it for spares, as far as there are any; without one the job goes on there as the last resort."""
    placement = evidence.state.placement
    bad = {d for d, r in ledger.items() if r.quarantined}
    if placement is None or not bad:
        return (), "the same placement goes on with the rerun state cleared"
    held = [n for n in placement.nodes if any(device_of(evidence.devices, n, slot) in bad for slot in range(placement.nproc))]
    if not held:
        return (), "the job goes on with the rerun state cleared"
    usable = sum(1 for spare in evidence.spares if not spare.quarantined_slots) - sum(n in evidence.lost for n in placement.nodes)
    replaced = tuple(held[: max(0, usable)])
    if not replaced:
        off = kept_off(placement, off_limits(ledger, None), evidence.devices) is not None
        where = (
            "the affected rank off the quarantined device"
            if off
            else "though no slot there is left that is not in quarantine for a rank of it"
        )
        return (), f"no spare can take the place of node {', '.join(held)}: the job goes on there, {where}"
    return replaced, f"a spare takes the place of node {', '.join(replaced)}; the rerun state is cleared"
