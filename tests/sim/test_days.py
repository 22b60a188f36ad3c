"""Many days: 100 seeds of 128 ranks for 24 hours, 3 seeds of 10,000 ranks. No invariant breaks. In small portions, so that all workers share them."""

from __future__ import annotations

from collections import Counter

import pytest

from ft_launcher.config import SimulateOptions
from ft_launcher.sim.setting import setting_of
from ft_launcher.sim.world import World
from tests.sim.worlds import ran

SEEDS, PORTION = 100, 5


def day(ranks: int, seed: int, hours: float = 24) -> World:
    world = ran(setting_of(SimulateOptions(ranks=ranks, hours=hours, seed=seed)))
    again = f"ft-launch simulate --ranks {ranks} --hours {hours:g} --seed {seed} --story"
    assert not world.violations, f"{world.violations[0]}; again: {again}"
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_days_of_128_ranks(first: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(first, first + PORTION):
        world = day(128, seed)
        met += world.tally.faults
    assert sum(met.values()) > PORTION, "so little goes wrong that it proves nothing"


@pytest.mark.parametrize("seed", range(3))
def test_10_000_ranks(seed: int) -> None:
    world = day(10_000, seed, hours=6)
    assert world.trace.count > 10_000, "every one of 1,250 nodes takes part"
