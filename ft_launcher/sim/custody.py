"""What outlasts a launch: the ledger of devices, a dispute, and people who read verdicts and exchange hardware.

It does for the next launch what `shell/ledger.py`, ft_state and an operator do; it judges nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.hardware import quarantined_slots
from ft_launcher.core.state import JobState, Outcome
from ft_launcher.sim.presence import Presence

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch
    from ft_launcher.sim.world import World


def inherit(world: World, last: JobState) -> None:
    """What the next launch is told (`shell/ledger.py`)."""
    world.ledger, world.dispute, world.rerun_verdict = last.hardware, last.rerun, last.rerun_verdict
    if world.dispute is not None and not world.dispute.suspects:
        world.dispute = None  # on other machines nobody can say whose result it was, or where


def attend(world: World, launch: Launch) -> None:
    """People read the verdict: machines that a launch could not use, or should stay away from, get other hardware; an application that gives odd results is mended."""
    verdict = launch.state.verdict
    if verdict is None:
        return
    if verdict.outcome is Outcome.RESULT_REJECTED:
        world.storage.questions.clear()
        world.dispute = None
    if verdict.outcome in (Outcome.RERUN_ELSEWHERE, Outcome.NOT_ENOUGH_NODES):
        wanted = {str(found["node"]) for found in verdict.exclude} | {r.node for r in world.ledger.values() if r.quarantined}
        everybody = verdict.outcome is Outcome.RERUN_ELSEWHERE and not verdict.exclude
        for host in world.hosts:
            if everybody or host.name in wanted:
                host.exchange()
                world.ledger = {d: r for d, r in world.ledger.items() if r.node != host.name}


def barred(world: World, launch: Launch, presence: Presence) -> bool:
    """It holds no ranks and will get none, for one of its devices is in quarantine."""
    job = launch.state
    if not job.hardware or (job.placement is not None and presence.info.node_id in job.placement.nodes):
        return False
    return bool(quarantined_slots(job.hardware, {presence.info.node_id: presence.info.devices}, presence.info.node_id, world.setting.nproc))
