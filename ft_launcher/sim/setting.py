"""The simulated cluster and job as one value: sizes, the script's habits, and the production core's options.

With named fault rates everything here is fixed and documented, so that results of different policies can be compared; in a swarm run the seed draws
it, so that odd combinations meet.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ft_launcher.config import SimulateOptions
from ft_launcher.core.state import Options
from ft_launcher.core.topology import Topology
from ft_launcher.errors import ConfigError
from ft_launcher.sim import faults, notation
from ft_launcher.sim.faults import Fault, Mix, Size
from monitors.attribution import attribute

SLOTS = 8
"""Ranks a node, where they divide the job."""
FOREVER = 10**12
UNLIMITED = 1_000_000
"""`--max-restarts` where nobody has set one."""


@dataclass(frozen=True, slots=True)
class Script:
    """A training script's habits. Steps count from 0; every `save_every` steps all ranks save for `save_s`; `steps` is where the training is complete.

    `client`: it uses a monitoring client, so that progress is seen and hangs are found; the timeouts are what the user gave, `learn`: tightened by what is learned.
    """

    steps: int = FOREVER
    step_s: float = 5.0
    save_every: int = 100
    save_s: float = 10.0
    load_s: float = 20.0
    client: bool = True
    step_timeout_s: float = 180.0
    setup_timeout_s: float = 600.0
    save_timeout_s: float = 420.0
    learn: bool = True


@dataclass(frozen=True, slots=True)
class Platform:
    """How long the fake platform's own work takes, seconds. `ttl_s`: the nodes' lease time; `store_timeout_s`: `--store-timeout`.

    `uuids`: devices have names of their own; `compacts`: the store forgets what a watch has missed.
    """

    zygote_s: float = 12.0
    standby_s: float = 0.05
    fork_s: float = 0.012
    store_s: float = 0.004
    ttl_s: float = 10.0
    requeue_s: float = 300.0
    uuids: bool = False
    store_timeout_s: float = 300.0
    compacts: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a run depends on, the seed included. `active` nodes hold ranks, `spares` wait."""

    ranks: int
    nproc: int
    active: int
    spares: int
    hours: float
    seed: int
    options: Options
    script: Script = field(default_factory=Script)
    platform: Platform = field(default_factory=Platform)
    plan: tuple[Fault, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All hosts by number."""
        return tuple(f"n{number}" for number in range(self.active + self.spares))

    @property
    def topology(self) -> Topology:
        """One tensor-parallel group a node; nothing in the simulation depends on it but the words for a rank."""
        return Topology.build(world=self.ranks, tp=self.nproc)

    @property
    def settle_s(self) -> float:
        """The bound on becoming healthy or done once faults have stopped: every wait of the policy once, and what the platform needs for two restarts."""
        options, script = self.options, self.script
        waits = options.spare_wait_s + options.join_wait_s + options.reap_s + options.backoff_max_s + options.term_grace_s
        return (
            waits
            + options.exit_grace_s
            + 2 * script.setup_timeout_s
            + 3 * (script.load_s + script.step_timeout_s + script.save_timeout_s)
            + 1800
        )


def setting_of(options: SimulateOptions) -> Setting:
    """The setting that these options and their seed mean. ConfigError for a notation or sizes that cannot be."""
    mix = notation.parse(options.faults)
    nproc, active = _shape(options)
    rng = random.Random(f"setting {options.seed}")
    spares = mix.spares if mix.spares is not None else -(-active // 16)
    if mix.swarm:
        spares = rng.randint(0, 2 * spares + 1)
    core = Options(nodes_wanted=active, nproc=nproc, can_join=active + spares > 1, attribute=attribute)
    size = Size(options.ranks, active + spares, nproc)
    setting = Setting(options.ranks, nproc, active, spares, options.hours, options.seed, core)
    if mix.swarm:
        setting = _drawn(rng, setting)
        mix = faults.draw_mix(rng, size, options.hours)
    else:
        allowed = mix.max_restarts if mix.max_restarts is not None else UNLIMITED
        setting = replace(setting, options=replace(core, max_restarts=allowed))
    return replace(setting, plan=_plan(setting, mix, size))


def _plan(setting: Setting, mix: Mix, size: Size) -> tuple[Fault, ...]:
    return faults.plan(random.Random(f"faults {setting.seed}"), mix, size, setting.hours)


def _shape(options: SimulateOptions) -> tuple[int, int]:
    """(ranks a node, nodes that hold ranks)."""
    ranks = options.ranks
    if options.nodes is None:
        nproc = next(n for n in range(min(SLOTS, ranks), 0, -1) if ranks % n == 0)
        return nproc, ranks // nproc
    if ranks % options.nodes:
        raise ConfigError(f"--nodes {options.nodes} does not divide --ranks {ranks}: every node holds the same number of ranks")
    return ranks // options.nodes, options.nodes


def _drawn(rng: random.Random, setting: Setting) -> Setting:
    """Odd combinations of options and habits."""
    core = replace(
        setting.options,
        max_restarts=rng.choice((0, 1, 3, 3, 10, 1000)),
        no_progress_cycles=rng.choice((0, 3, 3, 5)),
        exit_grace_s=rng.choice((5.0, 60.0)),
        term_grace_s=rng.choice((2.0, 25.0)),
        survivor_grace_s=rng.choice((0.0, 0.0, 5.0)),
        spare_wait_s=rng.choice((60.0, 600.0)),
        join_wait_s=rng.choice((300.0, 600.0)),
    )
    step_s = faults.log_uniform(rng, 0.5, 20.0)
    hours = setting.hours * 3600
    script = Script(
        steps=rng.choice((FOREVER, max(1, int(hours / step_s * rng.uniform(0.05, 0.9))))),
        step_s=step_s,
        save_every=rng.choice((5, 50, 500)),
        save_s=faults.log_uniform(rng, 0.1, 60.0),
        load_s=faults.log_uniform(rng, 0.2, 60.0),
        client=rng.random() < 0.8,
        step_timeout_s=max(8 * step_s, 60.0),
        learn=rng.random() < 0.7,
    )
    script = replace(script, save_timeout_s=max(8 * script.save_s, 120.0))
    platform = Platform(
        zygote_s=faults.log_uniform(rng, 1.0, 40.0),
        store_s=faults.log_uniform(rng, 0.0005, 0.2),
        requeue_s=faults.log_uniform(rng, 20.0, 1000.0),
        uuids=rng.random() < 0.5,
        store_timeout_s=rng.choice((60.0, 300.0)),
        compacts=rng.random() < 0.5,
    )
    core = replace(
        core,
        max_reruns=rng.choice((2, 10, 10)),
        quarantine_after=rng.choice((0, 1, 3, 3)),
        healthy_stretch_s=rng.choice((0.0, 1800.0, 21_600.0)),
    )
    return replace(setting, options=core, script=script, platform=platform)
