"""Makes a failing run shorter: fewer faults, then fewer hours, as long as the same invariant breaks.

Faults are data, so leaving some out is all there is to it (Zeller and Hildebrandt's ddmin, without the refinement that would only polish). What is
left is what a person can read.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.sim.faults import Fault
from ft_launcher.sim.setting import Setting
from ft_launcher.sim.world import World

MAX_RUNS = 200


def shrink(setting: Setting, invariant: str, runs: int = MAX_RUNS) -> Setting:
    """The shortest setting found within `runs` simulations that still breaks `invariant`; the given one where none does."""
    best = _until_violation(setting, invariant)
    size = max(1, len(best.plan) // 2)
    while size and runs > 0:
        start = 0
        while start < len(best.plan) and runs > 0:
            runs -= 1
            shorter = _broken(replace(best, plan=(*best.plan[:start], *best.plan[start + size :])), invariant)
            best, start = (shorter, start) if shorter is not None else (best, start + size)
        size //= 2
    return best


def _until_violation(setting: Setting, invariant: str) -> Setting:
    """Without the faults after the violation."""
    world = World(setting)
    world.run()
    if not world.violations or world.violations[0].name != invariant:
        return setting
    at_s = world.violations[0].at_s
    return replace(setting, plan=tuple(fault for fault in setting.plan if fault.at_s <= at_s))


def _broken(setting: Setting, invariant: str) -> Setting | None:
    world = World(setting)
    world.run()
    return setting if world.violations and world.violations[0].name == invariant else None


def earlier(plan: tuple[Fault, ...], lead_s: float) -> tuple[Fault, ...]:
    """The same faults, the first `lead_s` after the start."""
    shift = min((fault.at_s for fault in plan), default=lead_s) - lead_s
    return tuple(replace(fault, at_s=fault.at_s - shift) for fault in plan)
