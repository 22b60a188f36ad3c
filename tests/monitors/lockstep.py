"""A little lock-step training job: which rank would stand where, with which stack, when one of them hangs.

Each rank runs the same program: for every step a list of operations, each either *own* work or a call that needs peers (a collective of its tp, dp or the world, a
point-to-point call with the neighbouring stage). Ranks are advanced until nobody can move: a collective completes when all its peers have come to the same call for the same time,
sends complete at once (asynchronous), receives when their send has been made. The culprit stops before a given operation; the rest follows. Nothing here knows how attribution reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ft_launcher.core.evidence import RankProgress
from ft_launcher.core.topology import Coords, Topology
from monitors.attribution_places import Place

Op = tuple[str, str, tuple[int, ...]]
"""(kind, name, ranks that must come): kinds own, collective, send, recv, open, close. For send and recv the one peer."""


@dataclass(slots=True)
class Rank:
    """One rank's program and where it is in it."""

    program: list[tuple[int, Op]]
    at: int = 0
    steps: int = 0
    ended: int = 0
    iteration: int | None = None
    open: list[str] = field(default_factory=list)
    arrivals: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)


def neighbour(topology: Topology, rank: int, by: int) -> int | None:
    """The rank of the stage before or after, None at the ends."""
    c = topology.coords(rank)
    pp = c.pp + by
    return topology.rank_of(Coords(tp=c.tp, cp=c.cp, dp=c.dp, pp=pp)) if 0 <= pp < topology.pp else None


def program(topology: Topology, rank: int, steps: int, save_every: int = 2, global_sync: bool = True) -> list[tuple[int, Op]]:
    """What a rank does, Megatron's way: load, pipeline forward and backward with tensor-parallel collectives in them, gradients over dp, then a save."""
    tp, dp = topology.group_of("tp", rank), topology.group_of("dp-cp", rank)
    world = tuple(range(topology.world))
    before, after = neighbour(topology, rank, -1), neighbour(topology, rank, +1)
    ops: list[tuple[int, Op]] = [
        (-1, ("own", "import", ())),
        (-1, ("open", "setup", ())),
        (-1, ("collective", "init_process_group", world)),
        (-1, ("close", "setup", ())),
    ]
    for i in range(steps):
        step: list[Op] = [("own", "load", ()), ("open", "step", ())]
        for micro in range(2):
            step += [("recv", f"forward{micro}", (before,))] if before is not None else []
            step += [("own", "forward", ()), ("collective", "all_reduce@tp", tp)]
            step += [("send", f"forward{micro}", (after,))] if after is not None else []
        for micro in range(2):
            step += [("recv", f"backward{micro}", (after,))] if after is not None else []
            step += [("own", "backward", ()), ("collective", "all_reduce@tp", tp)]
            step += [("send", f"backward{micro}", (before,))] if before is not None else []
        step += [("collective", "reduce_scatter@dp", dp), ("own", "optimizer", ())]
        step += [("collective", "all_reduce", world)] if global_sync else []
        step += [("close", "step", ())]
        if i % save_every == save_every - 1:
            step += [("open", "checkpointing", ()), ("own", "write", ()), ("collective", "barrier", world), ("close", "checkpointing", ())]
        ops += [(i, op) for op in step]
    return [*ops, (steps, ("own", "leave", ())), (steps, ("collective", "destroy_process_group", world))]


class Job:
    """All ranks; `hang(rank, at)` makes one stop before its operation number `at`."""

    def __init__(self, topology: Topology, steps: int = 4, **options: bool) -> None:
        self.topology = topology
        self.ranks = [Rank(program(topology, r, steps, **options)) for r in range(topology.world)]
        self.made: set[tuple[int, int, int, str]] = set()
        self.stuck: dict[int, int] = {}
        self.broken: frozenset[int] = frozenset()

    def hang(self, rank: int, at: int) -> None:
        self.stuck[rank] = at

    def own_work(self, rank: int) -> Iterator[int]:
        """The operations before which a rank can hang by its own doing."""
        return (i for i, (_, op) in enumerate(self.ranks[rank].program) if op[0] == "own")

    def run(self) -> None:
        """Until nobody can move."""
        while any(self._advance(r) for r in range(self.topology.world)):
            pass

    def _advance(self, number: int) -> bool:
        rank, moved = self.ranks[number], False
        while rank.at < len(rank.program) and self.stuck.get(number) != rank.at and self._can(number):
            self._do(number)
            moved = True
        return moved

    def _can(self, number: int) -> bool:
        iteration, (kind, name, peers) = self.ranks[number].program[self.ranks[number].at]
        if kind == "collective":
            key = (name, peers)
            mine = self.ranks[number].arrivals.get(key, 0)
            return not set(peers) & self.broken and all(self._came(p, key) > mine for p in peers)
        return kind != "recv" or (peers[0], number, iteration, name) in self.made

    def _came(self, peer: int, key: tuple[str, tuple[int, ...]]) -> int:
        """How many calls of this kind the peer has come to, the one it stands at included."""
        rank = self.ranks[peer]
        here = rank.at < len(rank.program) and self.stuck.get(peer) != rank.at and rank.program[rank.at][1][1:] == key
        return rank.arrivals.get(key, 0) + here

    def _do(self, number: int) -> None:
        rank = self.ranks[number]
        iteration, (kind, name, peers) = rank.program[rank.at]
        if kind == "collective":
            rank.arrivals[(name, peers)] = rank.arrivals.get((name, peers), 0) + 1
        elif kind == "send":
            self.made.add((number, peers[0], iteration, name))
        elif kind == "open":
            rank.open.append(name)
            rank.iteration = iteration if name == "step" else rank.iteration
        elif kind == "close":
            rank.open.remove(name)
            rank.ended += 1
            rank.steps += name == "step"
        rank.at += 1

    # -- what the launcher sees -----------------------------------------------------------------------------------------------------------------

    def place(self, number: int) -> Place:
        rank = self.ranks[number]
        if rank.at >= len(rank.program):
            return Place("exit", "no_python_frame")
        _, (kind, name, _) = rank.program[rank.at]
        if kind == "own" or self.stuck.get(number) == rank.at:
            return Place(
                {"load": "dataloader", "write": "file"}.get(name, "user"), name if name in ("load", "write") else "", "", f"train.py:{name}"
            )
        op, _, group = name.partition("@")
        kinds = {"recv": "p2p", "barrier": "barrier", "init_process_group": "rendezvous", "destroy_process_group": "rendezvous"}
        return Place(
            kinds.get(op, kinds.get(kind, kind)), "recv" if kind == "recv" else op, "pp" if kind == "recv" else group, f"train.py:{op}"
        )

    def progress(self, known: Callable[[int], bool] = lambda rank: True) -> dict[int, RankProgress]:
        """Where everybody is; `known`: whose stack arrived."""
        found = {}
        for number, rank in enumerate(self.ranks):
            attached = rank.at > 0
            found[number] = RankProgress(
                iteration=rank.iteration,
                steps=rank.steps,
                section=rank.open[-1] if rank.open else None,
                since_s=9.0,
                client=attached,
                ended=rank.ended,
                stepping="step" in rank.open,
                still_s=9.0,
                place=str(self.place(number)) if known(number) else "",
            )
        return found
