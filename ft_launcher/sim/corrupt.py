"""How silent corruption is brought about: a device that computes wrong numbers from now on, a single wrong result, a right one that looks wrong.

One function a kind, as in `inject`; each returns a sentence for the story, or None where there was nobody to strike. What follows is in `reruns`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.hardware import device_of
from ft_launcher.sim.faults import Fault
from ft_launcher.sim.host import Host
from ft_launcher.sim.reruns import GLITCH, ODDITY

if TYPE_CHECKING:
    from ft_launcher.sim.world import World


def device(world: World, fault: Fault) -> str | None:
    """Whoever computes on it gets wrong numbers; also on a spare, where nobody does for now."""
    host = world.hosts[fault.whole("node") % len(world.hosts)]
    slot = fault.whole("slot") % world.setting.nproc
    if slot in host.bad:
        return None
    host.bad[slot] = fault["mean"]
    name = device_of({host.name: host.devices(world.setting.nproc)}, host.name, slot)
    world.was_bad |= {name, f"{host.name}/{slot}"}  # a controller that has never read the node's registration knows no better name
    if fault["lasts"]:
        world.later(fault["lasts"], lambda: _heal(host, slot))
    if world.launch is not None and not world.launch.over:
        world.launch.reruns.spoil(host.name, slot)
    lasts = f" for {fault['lasts']:g} s" if fault["lasts"] else ""
    return f"device {name} (node {host.name} slot {slot}) computes wrong numbers{lasts}, noticed every {fault['mean']:g} s"


def _heal(host: Host, slot: int) -> None:
    host.bad.pop(slot, None)


def glitch(world: World, fault: Fault) -> str | None:
    """One result of a rank is wrong, once."""
    return _rejected(world, fault, GLITCH)


def oddity(world: World, fault: Fault) -> str | None:
    """A right result looks wrong, on every device."""
    return _rejected(world, fault, ODDITY)


def _rejected(world: World, fault: Fault, why: str) -> str | None:
    launch = world.launch
    if launch is None or launch.over:
        return None
    rank = fault.whole("rank")
    said = launch.reruns.reject(rank, why)
    if said is not None:
        world.rejections[launch.reruns.device(rank)] += 1
    return said
