"""As many simulated days as time allows, on all cores: what `make sim` runs. Stops at the first violation and prints the one command that repeats it.

    FT_SIM_S=60 SEED=0 python tools/sim_many.py

FT_SIM_S: seconds (default 60). SEED: the first seed (default: drawn from the clock, and said). Sizes follow from the seed: mostly 16 ranks for 6 hours, some 64 for 12, some 128 for 24.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from ft_launcher.config import SimulateOptions
from ft_launcher.sim.main import command
from ft_launcher.sim.setting import setting_of
from ft_launcher.sim.world import World

SIZES = ((16, 6.0), (16, 6.0), (16, 6.0), (16, 6.0), (64, 12.0), (64, 12.0), (128, 24.0))


def options_of(seed: int) -> SimulateOptions:
    """The world that this seed stands for."""
    ranks, hours = SIZES[seed % len(SIZES)]
    return SimulateOptions(ranks=ranks, hours=hours, seed=seed)


def one(seed: int) -> tuple[SimulateOptions, int, str | None]:
    """(what was run, events, the violation)."""
    options = options_of(seed)
    world = World(setting_of(options))
    world.run()
    found = world.violations[0] if world.violations else None
    return options, world.trace.count, f"{found.name}: {found.text}" if found is not None else None


def results(first: int, seconds: float, workers: int) -> Iterator[tuple[SimulateOptions, int, str | None]]:
    """Seeds from `first` on until time is up; those under way are still finished."""
    until, seed = time.monotonic() + seconds, first
    with ProcessPoolExecutor(workers) as pool:
        pending: set[Future[tuple[SimulateOptions, int, str | None]]] = set()
        while pending or time.monotonic() < until:
            while time.monotonic() < until and len(pending) < 2 * workers:
                pending.add(pool.submit(one, seed))
                seed += 1
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def say(text: str) -> None:
    """At once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run them and say what came of it; 1 when an invariant broke."""
    seconds = float(os.environ.get("FT_SIM_S") or 60)
    first = int(os.environ.get("SEED") or time.time_ns() % 1_000_000_000)
    workers = len(os.sched_getaffinity(0))
    say(f"seeds from {first} on, {seconds:g} s on {workers} cores (FT_SIM_S, SEED)")
    began, seeds, events, hours = time.monotonic(), 0, 0, 0.0
    found = results(first, seconds, workers)
    for options, count, violation in found:
        seeds, events, hours = seeds + 1, events + count, hours + options.hours
        if violation is not None:
            say(f"VIOLATION {violation}\nagain: {command(options)}")
            found.close()
            return 1
    took_s = time.monotonic() - began
    say(f"{seeds} seeds, {hours:,.0f} simulated hours, {events:,} events ({events / took_s:,.0f} a second): no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
