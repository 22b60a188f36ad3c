"""What goes wrong: the kinds of fault, how often, and the plan that a seed draws.

A plan is data, drawn before anything runs: when, what, and to whom, as plain numbers. So it can be printed, shortened and replayed from a text file,
and dropping one fault does not change the others. It knows nothing of how a fault is brought about: `inject` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PER_NODE_HOURS = 1000.0
"""Rates are faults per this many node-hours (spares count as nodes)."""
CONTROLLER = -1
"""As a node: the one whose agent governs at that moment."""
ALL = -1
"""As a node of `term`: every node."""

STAMPS = (
    "ValueError: loss is nan",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AssertionError",
    "KeyError: 'attention_mask'",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong at `at_s`: `args` are this kind's numbers."""

    at_s: float
    kind: str
    args: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.args[name]

    def whole(self, name: str) -> int:
        """The argument as a whole number."""
        return int(self.args[name])

    def text(self) -> str:
        """As a scenario file writes it: `at 12.5 crash rank=2 signal=9`."""
        args = "".join(f" {name}={value:g}" for name, value in self.args.items())
        return f"at {self.at_s:.6f} {self.kind}{args}"


@dataclass(frozen=True, slots=True)
class Size:
    """Whom a fault may strike: ranks 0..ranks-1, nodes 0..nodes-1 (spares included), nproc ranks a node."""

    ranks: int
    nodes: int
    nproc: int


Draw = Callable[[random.Random, Size], dict[str, float]]


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number whose magnitude is equally likely anywhere between the two."""
    return float(f"{low * (high / low) ** rng.random():.4g}")


def _rank(rng: random.Random, size: Size) -> int:
    return rng.randrange(size.ranks)


def _node(rng: random.Random, size: Size) -> int:
    return rng.randrange(size.nodes)


def _any_node(rng: random.Random, size: Size) -> int:
    return CONTROLLER if rng.random() < 0.3 else _node(rng, size)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault: a sentence for people, how its numbers are drawn, and how likely a drawn mix gives it weight."""

    about: str
    draw: Draw
    weight: float = 1.0


KINDS: Mapping[str, Kind] = {
    "crash": Kind(
        "a rank is killed by a signal",
        lambda rng, size: {"rank": _rank(rng, size), "signal": rng.choice((9, 9, 11, 6, 7))},
        3.0,
    ),
    "exit": Kind(
        "a rank stamps an exception and exits with a code of its own, `linger` seconds later",
        lambda rng, size: {
            "rank": _rank(rng, size),
            "code": rng.choice((1, 1, 1, 2, 7, 69, 75, 93)),
            "text": rng.randrange(len(STAMPS)),
            "linger": log_uniform(rng, 0.005, 3.0),
        },
        2.0,
    ),
    "together": Kind(
        "several ranks are killed within milliseconds",
        lambda rng, size: {"rank": _rank(rng, size), "signal": 9, "ranks": rng.randint(2, 6), "within": log_uniform(rng, 0.001, 2.0)},
    ),
    "hang": Kind("a rank stands still for ever", lambda rng, size: {"rank": _rank(rng, size)}),
    "leave": Kind("a rank exits 0 while the others still train", lambda rng, size: {"rank": _rank(rng, size)}, 0.3),
    "uneven": Kind(
        "a node's ranks finish `seconds` after the others: still training (trains=1) or hanging in their own exit (0)",
        lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 1.0, 400.0), "trains": rng.randrange(2)},
        0.5,
    ),
    "rerun": Kind(
        "a rank, or every rank (all=1), exits 16 or 17",
        lambda rng, size: {"rank": _rank(rng, size), "code": rng.choice((16, 17)), "all": rng.randrange(2)},
        0.2,
    ),
    "zygote": Kind(
        "a node's zygote dies; the next `times` starts of it fail too",
        lambda rng, size: {"node": _node(rng, size), "times": rng.choice((0, 0, 0, 1, 2, 6))},
    ),
    "slowstart": Kind(
        "a node's zygote dies and the next takes `seconds` to start",
        lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 5.0, 120.0)},
    ),
    "slowreap": Kind(
        "a node's next reaping takes `seconds`", lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 0.1, 60.0)}
    ),
    "unkillable": Kind("a node's next reaping leaves a process that cannot be killed", lambda rng, size: {"node": _node(rng, size)}, 0.4),
    "stuck": Kind(
        "a node's next kill waits `seconds` for a rank that is deep in the kernel",
        lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 0.1, 100.0)},
    ),
    "standby": Kind(
        "a node's next standby store takes `seconds`, or fails (fails=1)",
        lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 0.1, 60.0), "fails": rng.randrange(2)},
    ),
    "node": Kind(
        "a host (node=-1: the controller's) is lost: its agent alone (closed=1) or the machine (0, silence); back after `returns` seconds (0: never)",
        lambda rng, size: {
            "node": _any_node(rng, size),
            "closed": rng.randrange(2),
            "returns": rng.choice((0.0, log_uniform(rng, 0.5, 60.0), log_uniform(rng, 20.0, 3600.0), log_uniform(rng, 20.0, 3600.0))),
        },
        1.5,
    ),
    "rack": Kind(
        "`nodes` neighbours are lost at once (closed and returns as for `node`)",
        lambda rng, size: {
            "node": _node(rng, size),
            "nodes": rng.randint(2, max(2, size.nodes // 4)),
            "closed": rng.randrange(2),
            "returns": rng.choice((log_uniform(rng, 5.0, 120.0), log_uniform(rng, 60.0, 3600.0))),
        },
        0.4,
    ),
    "preempted": Kind(
        "`nodes` neighbours get SIGTERM and are gone `warning` seconds later, back after `returns`",
        lambda rng, size: {
            "node": _node(rng, size),
            "nodes": rng.randint(1, max(2, size.nodes // 4)),
            "warning": rng.choice((1.0, 30.0, 120.0)),
            "returns": log_uniform(rng, 60.0, 7200.0),
        },
        0.4,
    ),
    "term": Kind(
        "agents get a stop signal: one node, or all (node=-1), once or twice",
        lambda rng, size: {
            "node": ALL if rng.random() < 0.5 else _node(rng, size),
            "signal": rng.choice((15, 15, 2)),
            "times": rng.choice((1, 1, 2)),
            "gap": log_uniform(rng, 0.001, 10.0),
        },
        0.2,
    ),
    "drain": Kind("somebody asks for a node to be drained", lambda rng, size: {"node": _node(rng, size)}, 0.4),
    "slowstore": Kind(
        "what a node writes to the store takes up to `delay` seconds longer, for `lasts` seconds",
        lambda rng, size: {"node": _node(rng, size), "delay": log_uniform(rng, 0.05, 8.0), "lasts": log_uniform(rng, 1.0, 600.0)},
    ),
    "repeat": Kind("the controller gets every node's last report again", lambda rng, size: {}),
    "stall": Kind(
        "a node's agent (node=-1: the controller) is frozen for `seconds`, its ranks are not",
        lambda rng, size: {"node": _any_node(rng, size), "seconds": log_uniform(rng, 0.05, 200.0)},
    ),
    "freeze": Kind(
        "a whole machine is frozen for `seconds`, and goes on where it was",
        lambda rng, size: {"node": _any_node(rng, size), "seconds": log_uniform(rng, 0.5, 600.0)},
    ),
    "cut": Kind(
        "a node is cut off from the store (what=0), from the controller (1) or from everything (2) for `lasts` seconds",
        lambda rng, size: {"node": _any_node(rng, size), "what": rng.randrange(3), "lasts": log_uniform(rng, 0.5, 1000.0)},
        1.5,
    ),
    "outage": Kind(
        "the store is away for `lasts` seconds; with forgets=1 every lease ends meanwhile",
        lambda rng, size: {"lasts": log_uniform(rng, 0.5, 1000.0), "forgets": rng.randrange(2)},
        0.5,
    ),
    "lossy": Kind(
        "a node's channel loses, repeats, delays (up to `delay` seconds) and disorders messages for `lasts` seconds",
        lambda rng, size: {"node": _any_node(rng, size), "delay": log_uniform(rng, 0.01, 5.0), "lasts": log_uniform(rng, 1.0, 300.0)},
        0.7,
    ),
    "slow": Kind(
        "a node's ranks take `factor` times as long for everything, for `lasts` seconds",
        lambda rng, size: {"node": _node(rng, size), "factor": round(rng.uniform(1.1, 3.0), 3), "lasts": log_uniform(rng, 5.0, 600.0)},
    ),
    "late": Kind(
        "at the next launch a node joins `seconds` late",
        lambda rng, size: {"node": _node(rng, size), "seconds": log_uniform(rng, 1.0, 900.0)},
        0.5,
    ),
    "device": Kind(
        "a device computes wrong numbers for `lasts` seconds (0: for good), which is noticed every `mean` seconds; also a spare's",
        lambda rng, size: {
            "node": _node(rng, size),
            "slot": rng.randrange(size.nproc),
            "mean": log_uniform(rng, 10.0, 1000.0),
            "lasts": rng.choice((0.0, log_uniform(rng, 30.0, 10_000.0))),
        },
        0.7,
    ),
    "glitch": Kind("a result of a rank is wrong, once", lambda rng, size: {"rank": _rank(rng, size)}),
    "oddity": Kind("a right result of a rank looks wrong, on every device", lambda rng, size: {"rank": _rank(rng, size)}, 0.3),
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Which faults, how often. `rates`: kind -> faults per 1,000 node-hours. `swarm`: the seed draws everything, options included."""

    rates: Mapping[str, float] = field(default_factory=dict)
    aftershock: float = 0.0
    spares: int | None = None
    max_restarts: int | None = None
    swarm: bool = False


def draw_mix(rng: random.Random, size: Size, hours: float) -> Mix:
    """Swarm testing (Groce et al., 2012): each run leaves out about half of the kinds, so that rare pairs of the others meet."""
    chosen = {name: kind.weight * log_uniform(rng, 0.2, 5.0) for name, kind in KINDS.items() if rng.random() < 0.5}
    chosen = chosen or {"crash": 1.0}
    wanted = rng.randint(10, 60) * min(1.0, 300 / size.nodes) * hours / 24
    scale = wanted * PER_NODE_HOURS / (size.nodes * hours) / sum(chosen.values())
    return Mix({name: weight * scale for name, weight in chosen.items()}, rng.choice((0.0, 0.3, 0.7)), swarm=True)


def plan(rng: random.Random, mix: Mix, size: Size, hours: float) -> tuple[Fault, ...]:
    """Independent Poisson processes, one a kind, and the aftershocks of their faults; in order of time."""
    found: list[Fault] = []
    for kind, rate in sorted(mix.rates.items()):
        per_s = rate * size.nodes / PER_NODE_HOURS / 3600
        at_s = rng.expovariate(per_s) if per_s > 0 else float("inf")
        while at_s < hours * 3600:
            found += _with_aftershocks(rng, mix, size, Fault(round(at_s, 6), kind, KINDS[kind].draw(rng, size)))
            at_s += rng.expovariate(per_s)
    return tuple(sorted((f for f in found if f.at_s < hours * 3600), key=lambda f: f.at_s))


def _with_aftershocks(rng: random.Random, mix: Mix, size: Size, first: Fault) -> Sequence[Fault]:
    chain = [first]
    kinds = [kind for kind, rate in sorted(mix.rates.items()) if rate > 0]
    while len(chain) < 5 and rng.random() < mix.aftershock:
        kind = rng.choice(kinds)
        at_s = round(chain[-1].at_s + log_uniform(rng, 0.001, 30.0), 6)
        args = KINDS[kind].draw(rng, size)
        if args.get("node", -1) >= 0 and rng.random() < 0.5:
            args["node"] = rng.choice((0, _struck_node(first, size)))
        chain.append(Fault(at_s, kind, args))
    return chain


def _struck_node(fault: Fault, size: Size) -> int:
    """Where a fault most likely strikes: its node, or the one that first holds its rank."""
    return max(0, fault.whole("node")) if "node" in fault.args else int(fault.args.get("rank", 0)) // size.nproc
