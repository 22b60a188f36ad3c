"""What must be true of decisions about wrong numbers: compared with which devices really compute wrongly, and with where else there was to go.

Stated from docs/rerun.md and docs/design.md section 8 (rules 3 and 4), not from the code that they judge. Two devices of which one is faulty cannot tell which: where the second one, which
judges, is faulty itself, the protocol of two devices blames the first, and nobody can know better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ft_launcher.core.actions import RecordDecision
from ft_launcher.core.hardware import Devices, device_of
from ft_launcher.core.placement import Placement
from ft_launcher.core.rerun_report import RerunStatus
from ft_launcher.core.state import Outcome
from ft_launcher.sim.checks import JobInvariant, JobStep

FAULTS = (RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE, RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE)


def healthy_devices_are_not_quarantined(step: JobStep) -> str | None:
    """Into quarantine goes a device that is faulty, or one of which as many results were rejected as are allowed."""
    if step.after.hardware is step.before.hardware:
        return None
    world, limit = step.launch.world, step.launch.world.setting.options.quarantine_after
    for device, record in step.after.hardware.items():
        known = step.before.hardware.get(device)
        if not record.quarantined or (known is not None and known.quarantined) or device in world.was_bad:
            continue
        if record.why.startswith("persistent") and world.judges.get(device) in world.was_bad:
            continue
        if step.launch.asked_for_nothing and step.before.rerun is not None and not step.before.rerun.suspects:
            continue  # (docs/adr/0008: known, open)
        if not record.why.startswith("persistent") and 0 < limit <= world.rejections[device]:
            continue
        return f"{device} is quarantined, but it is healthy: {record.why}"
    return None


def suspects_get_new_devices(step: JobStep) -> str | None:
    """A suspected rank is never started on a device on which its result has been computed, while its node has another for it."""
    placement, dispute = step.after.placement, step.after.rerun
    if step.after.cycle == step.before.cycle or placement is None or dispute is None:
        return None
    devices = _devices(step)
    for node, ranks in _suspects_by_node(placement, dispute.suspects).items():
        stuck = [r for r in ranks if device_of(devices, *placement.place(r)) in dispute.suspects[r]]
        if stuck and _seats(placement, node, {r: dispute.suspects[r] for r in ranks}, devices):
            return f"rank {stuck[0]} is started on {device_of(devices, *placement.place(stuck[0]))} again, where its result was computed before"
    return None


def elsewhere_is_asked_only_when_there_is_none(step: JobStep) -> str | None:
    """Exit 16 goes to the scheduler only when the bound is reached or no exchange of slots could help."""
    verdict, dispute, placement = step.after.verdict, step.after.rerun, step.before.placement
    if verdict is None or verdict.outcome is not Outcome.RERUN_ELSEWHERE or dispute is None or placement is None:
        return None
    options, devices = step.launch.world.setting.options, _devices(step)
    if step.after.budgets.reruns > options.max_reruns:
        return None
    if not dispute.suspects:
        return (
            None
            if dispute.moves + 1 >= placement.nproc
            else f"only {dispute.moves} of {placement.nproc - 1} turns were tried: {verdict.reason}"
        )
    by_node = _suspects_by_node(placement, dispute.suspects)
    if all(_seats(placement, node, {r: dispute.suspects[r] for r in ranks}, devices) for node, ranks in by_node.items()):
        return f"there are devices left to try: {verdict.reason}"
    return None


def wrong_numbers_are_bounded(step: JobStep) -> str | None:
    """Moves and verdicts have a bound of their own, and cost no restart."""
    old, new, limit = step.before.budgets, step.after.budgets, step.launch.world.setting.options.max_reruns
    if new is old:
        return None
    if new.reruns > limit + 1 or (new.reruns > limit and step.after.verdict is None):
        return f"{new.reruns} moves and verdicts because of wrong numbers, {limit} allowed"
    charged = any(isinstance(a, RecordDecision) and a.rule in (3, 4) for a in step.actions) and new.restarts > old.restarts
    return f"a restart was charged for a wrong number: {step.after.reason}" if charged else None


def a_second_chance_is_the_last(step: JobStep) -> str | None:
    """A device that was in quarantine and is found at fault once more does not stay in the job; and without one the job is not sent elsewhere."""
    verdict, held = step.after.verdict, {device for device, record in step.before.hardware.items() if record.quarantined}
    sent_away = verdict is not None and verdict.outcome is Outcome.RERUN_ELSEWHERE and step.after.rerun is None
    if sent_away and step.before.verdict is None and not held:
        return f"nothing was in quarantine before: {verdict.reason if verdict is not None else ''}"
    for action in step.actions:
        if not isinstance(action, RecordDecision) or action.cause != "persistent fault" or action.culprit is None or verdict is not None:
            continue
        node = str(action.culprit["node"])
        device = device_of(_devices(step), node, int(action.culprit["slot"]))
        stays = step.after.placement is not None and node in step.after.placement.nodes and node not in step.after.lost
        if device in held and stays and "which one that was is not known" not in action.reason:
            return f"{device} was in quarantine, is at fault again, and stays: {action.reason}"
    return None


def faulty_hardware_does_not_end_the_job(step: JobStep) -> str | None:
    """Where ranks have found a fault of the hardware, and could say so, the job goes on until the bound is reached."""
    verdict, truth = step.after.verdict, step.launch.truth
    if verdict is None or verdict.outcome is not Outcome.RESULT_REJECTED or truth.finding is None or truth.finding[1] not in FAULTS:
        return None
    limit = step.launch.world.setting.options.max_reruns
    if step.after.budgets.reruns > limit or step.after.lost or truth.lost or truth.passed_on or _was_silenced(step, truth.finding[0]):
        return None
    return f"rank {truth.finding[0]} found {truth.finding[1].name}, and the job stops: {verdict.reason}"


def _was_silenced(step: JobStep, rank: int) -> bool:
    """It was ended before its node had a reason to look into the tracker file for it (docs/adr/0008: known, open)."""
    found = step.launch.reruns.found.get(step.before.cycle)
    told = [action.ranks[rank] for action in step.actions if isinstance(action, RecordDecision)]
    return found is not None and not found.on_pages and any(said["ended"] or said["exit"] is None for said in told)


def _devices(step: JobStep) -> Devices:
    return step.controller.machine.roster.devices


def _suspects_by_node(placement: Placement, suspects: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in suspects:
        found.setdefault(placement.node_of(rank), []).append(rank)
    return found


def _seats(placement: Placement, node: str, tried: Mapping[int, Sequence[str]], devices: Devices) -> bool:
    """All these ranks of a node could sit on devices that are new to them (a matching, by augmenting paths)."""
    seated: dict[int, int] = {}

    def seat(rank: int, seen: set[int]) -> bool:
        """Find it a slot, if need be by moving others to theirs."""
        for slot in range(placement.nproc):
            if slot in seen or device_of(devices, node, slot) in tried[rank]:
                continue
            seen.add(slot)
            if slot not in seated or seat(seated[slot], seen):
                seated[slot] = rank
                return True
        return False

    return all(seat(rank, set()) for rank in tried)


RERUN: tuple[JobInvariant, ...] = (
    healthy_devices_are_not_quarantined,
    suspects_get_new_devices,
    elsewhere_is_asked_only_when_there_is_none,
    wrong_numbers_are_bounded,
    a_second_chance_is_the_last,
    faulty_hardware_does_not_end_the_job,
)
