"""Helpers for tests of the simulated world: many small, busy worlds, each from one seed."""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.config import SimulateOptions
from ft_launcher.sim.setting import Setting, setting_of
from ft_launcher.sim.world import World

OPEN: tuple[str, ...] = ()
"""Stories in `tests/scenarios/found` that still break an invariant. Who mends one takes its name out; with the last one, `calm` calms nothing any more."""

_UNTIL_MENDED = frozenset({"freeze", "stall", "cut", "outage"})
"""Kinds of fault that meet an open story too often for the tests' seeds."""


def small(seed: int, nodes: int = 3, hours: float = 6.0, faults: str | None = None) -> Setting:
    """Two ranks a node; a swarm unless faults are named."""
    return setting_of(SimulateOptions(ranks=2 * nodes, nodes=nodes, hours=hours, seed=seed, faults=faults))


ROUGH = "node=150,cut=500,freeze=200,stall=400,outage=100,slow=300,lossy=100,hang=150,crash=50,aftershock=0.5,spares=2,max-restarts=1000"


def rough(seed: int) -> Setting:
    """Store, network and time are disturbed all the time; steps of 0.3 or 5 s; now and then all ranks on one node."""
    setting = small(seed, nodes=1 if seed % 5 == 4 else 3, faults=ROUGH)
    return replace(setting, script=replace(setting.script, step_s=0.3 if seed % 2 else 5.0))


CORRUPT = "device=100,glitch=200,oddity=50,crash=50,node=50,spares=2,aftershock=0.5"


def corrupt(seed: int) -> Setting:
    """Wrong numbers all the time, of devices, by chance and by the application; two moves and verdicts are allowed, or ten."""
    setting = small(seed, faults=CORRUPT)
    options = replace(setting.options, max_reruns=2 if seed % 2 else 10)
    return replace(setting, options=options, platform=replace(setting.platform, uuids=bool(seed % 3)))


def calm(setting: Setting) -> Setting:
    """Without what the open stories need."""
    if not OPEN or not _UNTIL_MENDED:
        return setting
    return replace(setting, plan=tuple(fault for fault in setting.plan if fault.kind not in _UNTIL_MENDED))


def ran(setting: Setting) -> World:
    """The world after its run."""
    world = World(setting)
    world.run()
    return world
