"""Helpers for tests of the simulated world: many small, busy worlds, each from one seed."""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.config import SimulateOptions
from ft_launcher.sim.setting import Setting, setting_of
from ft_launcher.sim.world import World

OPEN: tuple[str, ...] = ()
"""Stories in `tests/scenarios/found` that still break an invariant. Who mends one takes its name out; with the last one, `calm` calms nothing any more."""

_UNTIL_MENDED = frozenset({"zygote", "slowstart", "leave", "uneven"})


def small(seed: int, nodes: int = 3, hours: float = 6.0, faults: str | None = None) -> Setting:
    """Two ranks a node; a swarm unless faults are named."""
    return setting_of(SimulateOptions(ranks=2 * nodes, nodes=nodes, hours=hours, seed=seed, faults=faults))


def calm(setting: Setting) -> Setting:
    """Without what the open stories need."""
    if not OPEN:
        return setting
    plan = tuple(fault for fault in setting.plan if fault.kind not in _UNTIL_MENDED)
    return replace(setting, plan=plan, options=replace(setting.options, survivor_grace_s=0.0))


def ran(setting: Setting) -> World:
    """The world after its run."""
    world = World(setting)
    world.run()
    return world
