"""Section durations as training produces them, synthetic and recorded: what `bench/timeouts.py` tries timeout rules on. Deterministic by seed.

A trace is a list of segments; between two of them the job was restarted (learned state kept, processes new, the first occurrences of the new ones slow: warm-up).
Nothing in a trace is a hang: whoever kills in one was wrong. No duration is above the trace's ceiling, the user's own fixed value. Usual step times are drawn from
0.2 s ... 20 s on a logarithmic scale.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WARMUP = 5
UNSEEN = 35.0
"""So many times the usual the first of a kind may take, within the first 1,000 occurrences."""
NOTABLE_PAUSE_S = 4.0
"""The longest unannounced pause that a rule is asked to survive at any time: a full garbage collection, a file system's hiccup."""


SLOW_ONE_IN, SLOW_BY = 1000, 3.0
"""Every family but `steady` has a background of slow steps, by up to 3 usual durations. In the recorded traces one step in 100 takes 4 times the median, the longest 6 to 17 times."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`segments` of durations in seconds, of which the first `warmup` each are warm-up. `promised`: surviving it is part of the target."""

    family: str
    ceiling_s: float
    segments: list[list[float]]
    warmup: int = WARMUP
    promised: bool = True


@dataclass(slots=True)
class Maker:
    """One trace being made: a generator of random numbers, a usual duration, a jitter."""

    seed: int
    family: str
    length: int
    random: random.Random = field(init=False)
    usual_s: float = field(init=False)
    sigma: float = field(init=False)
    slow_steps: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.family}/{self.seed}")
        self.usual_s = math.exp(self.random.uniform(math.log(0.2), math.log(20.0)))
        self.sigma = self.random.uniform(0.03, 0.15)

    def jitter(self, sigma: float | None = None) -> float:
        """A lognormal factor around 1."""
        return self.random.lognormvariate(0.0, self.sigma if sigma is None else sigma)

    def steps(self, count: int | None = None, level: Callable[[int], float] = lambda i: 1.0) -> list[float]:
        """Jittered steps; `level(i)` multiplies step i, and now and then one is slow."""
        return [self.usual_s * (level(i) * self.jitter() + self.slow()) for i in range(self.length if count is None else count)]

    def slow(self) -> float:
        """What one step in `SLOW_ONE_IN` takes longer, in usual durations."""
        return self.random.uniform(0.5, SLOW_BY) if self.slow_steps and self.random.random() * SLOW_ONE_IN < 1 else 0.0

    def trace(self, *segments: list[float], ceiling_s: float = 180.0, warmup: int = WARMUP, promised: bool = True) -> Trace:
        """The trace; a ceiling below 12 usual durations is one that no user would choose."""
        ceiling_s = max(ceiling_s, 12 * self.usual_s)
        slow = [3.0, 2.0, 1.5, 1.2, 1.1]
        kept = []
        for segment in segments:
            warm = [d * f for d, f in zip(segment[:warmup], slow, strict=False)]
            kept.append([min(d, 0.95 * ceiling_s) for d in [*warm, *segment[warmup:]]])
        return Trace(self.family, ceiling_s, kept, warmup, promised)


def steady(m: Maker) -> Trace:
    """A perfectly quiet machine."""
    m.sigma, m.slow_steps = 0.02, False
    return m.trace(m.steps())


def jitter(m: Maker) -> Trace:
    """Lognormal noise, up to a sigma of 0.5."""
    m.sigma = m.random.uniform(0.2, 0.5)
    return m.trace(m.steps())


def bimodal(m: Maker) -> Trace:
    """Two kinds of step (buckets of sequence lengths, an interleaved second model)."""
    share, ratio = m.random.uniform(0.02, 0.5), m.random.uniform(2, 8)
    return m.trace(m.steps(level=lambda i: ratio if m.random.random() < share else 1.0))


def evaluation(m: Maker) -> Trace:
    """An evaluation of 10 to 30 steps' time inside `step`, every 100 to 1,000 steps."""
    every, ratio = m.random.choice([100, 200, 250, 500, 1000]), m.random.uniform(10, 30)
    return m.trace(m.steps(level=lambda i: ratio if i % every == every - 1 else 1.0), ceiling_s=50 * m.usual_s)


def pareto_saves(m: Maker) -> Trace:
    """`checkpointing` on a shared file system: 3 to 60 s with a Pareto tail, a few hundred of them."""
    m.usual_s = math.exp(m.random.uniform(math.log(3), math.log(60)))
    alpha = m.random.uniform(1.5, 3.0)
    saves = [m.usual_s * m.random.paretovariate(alpha) for _ in range(m.length // 50)]
    return m.trace(saves, ceiling_s=420.0, warmup=0)


def saves_in_steps(m: Maker) -> Trace:
    """Synchronous saves inside `step`, 3 to 35 times as long, with a Pareto tail."""
    every, alpha, usual = m.random.choice([50, 100, 250, 500]), m.random.uniform(2.0, 3.5), m.random.uniform(3, 10)
    return m.trace(
        m.steps(level=lambda i: min(UNSEEN, usual * m.random.paretovariate(alpha)) if i % every == every - 1 else 1.0), ceiling_s=420.0
    )


def drift(m: Maker) -> Trace:
    """To 3 times the duration within 50 to 5,000 steps, and back."""
    over, start = m.random.choice([50, 200, 1000, 5000]), m.random.randrange(50, m.length // 2)
    return m.trace(m.steps(level=lambda i: 1 + 2 * min(1.0, max(0.0, (i - start) / over)) * (i < m.length * 0.8)))


def regime(m: Maker) -> Trace:
    """2 to 3 times the duration at once (sequence length, batch size, a slower link), and back, several times."""
    changes = sorted(m.random.sample(range(30, m.length), 6))
    levels = [1.0]
    for _ in changes:
        levels.append(m.random.uniform(2, 3) if levels[-1] == 1.0 else 1.0)
    return m.trace(m.steps(level=lambda i: levels[sum(i >= at for at in changes)]))


def neighbours(m: Maker) -> Trace:
    """Bursts of 20 to 200 steps at 1.5 to 3 times the duration, with more jitter."""
    level, until, burst = 1.0, 0, False

    def at(i: int) -> float:
        nonlocal level, until, burst
        if i >= until:
            burst = not burst
            until = i + (m.random.randrange(20, 200) if burst else m.random.randrange(100, 3000))
            level = m.random.uniform(1.5, 3.0) if burst else 1.0
        return level * (m.jitter(0.2) if burst else 1.0)

    return m.trace(m.steps(level=at))


def pauses(m: Maker) -> Trace:
    """Unannounced pauses of up to 4 s, once in 300 to 5,000 steps: garbage collections, hiccups of a file system."""
    every = m.random.choice([300, 1000, 5000])
    made = m.steps()
    return m.trace([d + (m.random.uniform(0.5, NOTABLE_PAUSE_S) if m.random.randrange(every) == 0 else 0.0) for d in made])


def few(m: Maker) -> Trace:
    """A run that ends after 5 to 120 steps, with an evaluation in it."""
    count = m.random.randrange(5, 120)
    at = m.random.randrange(count)
    return m.trace(m.steps(count, lambda i: 30.0 if i == at else 1.0), ceiling_s=50 * m.usual_s)


def restarts(m: Maker) -> Trace:
    """3 to 10 cycles with persisted state, each on a machine that is a little faster or slower, with an evaluation every 250 steps."""
    segments, done = [], 0
    for _ in range(m.random.randrange(3, 10)):
        speed, count, first = m.random.uniform(0.75, 1.3), m.random.randrange(20, m.length // 4), done
        segments.append(m.steps(count, lambda i, first=first, speed=speed: speed * (12.0 if (first + i) % 250 == 249 else 1.0)))  # type: ignore[misc]
        done += count * 9 // 10
    return m.trace(*segments)


def long_stalls(m: Maker) -> Trace:
    """Not promised: stalls of 5 to 60 s out of nothing, once in 2,000 steps. Only a limit above the stall survives the first; shown for comparison."""
    made = m.steps()
    return m.trace([d + (m.random.uniform(5, 60) if m.random.randrange(2000) == 0 else 0.0) for d in made], promised=False)


FAMILIES = (
    steady,
    jitter,
    bimodal,
    evaluation,
    pareto_saves,
    saves_in_steps,
    drift,
    regime,
    neighbours,
    pauses,
    few,
    restarts,
    long_stalls,
)


def recorded() -> Iterator[Trace]:
    """Every section of the recorded traces that occurred at least 16 times. Ceilings are the launcher's defaults."""
    for path in sorted(Path(__file__).parent.glob("*.json")):
        content = json.loads(path.read_text())
        for name, values in content["sections"].items():
            if len(values) >= 16:
                durations = [value * content["unit_s"] for value in values]
                ceiling_s = 420.0 if name == "checkpointing" else 180.0
                yield Trace(f"{path.stem}: {name}", ceiling_s, [durations], WARMUP if name == "step" else 0)


def synthetic(seed: int, variants: int, length: int) -> Iterator[Trace]:
    """`variants` traces of each family, of `length` steps where the family does not say otherwise."""
    for make in FAMILIES:
        for variant in range(variants):
            yield make(Maker(seed * 1000 + variant, make.__name__, length))
