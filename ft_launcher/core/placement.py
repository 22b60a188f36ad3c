"""Where each rank runs: the bijection rank -> (node, slot), as an immutable value.

Position i of the node list holds ranks i*nproc .. i*nproc + nproc-1, in slot order unless that node's ranks have been permuted. So a lost
node is one hole, a spare is one name, and the whole map of 10,000 ranks is a list of names and the few permutations that are not the
identity: small enough to travel in every decision. LOCAL_RANK is the slot; GROUP_RANK is the position.

Ranks never leave their position, so a tensor-parallel group that fits a node stays inside one whatever is replaced, swapped or rotated.
Every change returns a new placement; `moved` tells what a change cost.

This room knows names and numbers. It must never know whether a node is alive, why it is replaced, or what a rank computes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeGuard


@dataclass(frozen=True, slots=True)
class Placement:
    """`nodes[i]` holds nproc ranks from i*nproc on; `slots[node][local position] = slot` only where that is not the identity.

    Raises ValueError for what is no bijection: no node, a node named twice, nproc < 1, a permutation that is none or of an unknown node.
    """

    nodes: tuple[str, ...]
    nproc: int
    slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    _position: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(self.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        _check_nodes(nodes, position, self.nproc)
        for node, permutation in self.slots.items():
            if node not in position:
                raise ValueError(f"slots of {node!r}: no such node in this placement")
            if len(permutation) != self.nproc or sorted(permutation) != list(range(self.nproc)):
                raise ValueError(f"slots of {node!r}: {list(permutation)} is no permutation of 0..{self.nproc - 1}")
        kept = {node: tuple(permutation) for node, permutation in self.slots.items() if list(permutation) != sorted(permutation)}
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "slots", MappingProxyType(kept))
        object.__setattr__(self, "_position", position)

    def __reduce__(self) -> tuple[type[Placement], tuple[tuple[str, ...], int, dict[str, tuple[int, ...]]]]:
        return Placement, (self.nodes, self.nproc, dict(self.slots))  # a mapping proxy can be neither pickled nor deep-copied

    def __contains__(self, node: object) -> bool:
        return node in self._position

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.nodes) * self.nproc

    def node_of(self, rank: int) -> str:
        """The node that holds `rank`. ValueError outside 0..world-1."""
        return self.nodes[self._checked(rank) // self.nproc]

    def slot_of(self, rank: int) -> int:
        """The slot (LOCAL_RANK) of `rank` on its node. ValueError outside 0..world-1."""
        return self.place(rank)[1]

    def place(self, rank: int) -> tuple[str, int]:
        """(node, slot) of `rank`. ValueError outside 0..world-1."""
        position, local = divmod(self._checked(rank), self.nproc)
        node = self.nodes[position]
        permutation = self.slots.get(node)
        return node, permutation[local] if permutation else local

    def rank_at(self, node: str, slot: int) -> int:
        """The rank in `slot` of `node`: the inverse of `place`. ValueError for a node or slot that holds none."""
        first = self.position_of(node) * self.nproc
        return first + self._permutation(node).index(self._checked_slot(slot))

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """The ranks of `node` by slot: `ranks_on(node)[slot]` is the rank there. ValueError for a node that holds none."""
        first = self.position_of(node) * self.nproc
        by_slot = sorted(zip(self._permutation(node), range(first, first + self.nproc), strict=True))
        return tuple(rank for _, rank in by_slot)

    def position_of(self, node: str) -> int:
        """The place of `node` in the node list (GROUP_RANK). ValueError for a node that holds no ranks."""
        try:
            return self._position[node]
        except KeyError:
            raise ValueError(f"node {node!r} holds no ranks in this placement") from None

    def replace(self, lost: str, spare: str) -> Placement:
        """`spare` takes exactly the hole of `lost`, in slot order; everyone else stays put.

        ValueError if `lost` holds no ranks or `spare` does.
        """
        position = self.position_of(lost)
        if spare in self._position:
            raise ValueError(f"node {spare!r} already holds ranks, so it cannot take those of {lost!r}")
        slots = {node: permutation for node, permutation in self.slots.items() if node != lost}
        return Placement((*self.nodes[:position], spare, *self.nodes[position + 1 :]), self.nproc, slots)

    def swap_slots(self, node: str, a: int, b: int) -> Placement:
        """The ranks in slots `a` and `b` of `node` change places. ValueError for a node or slot that holds none."""
        to = {self._checked_slot(a): b, self._checked_slot(b): a}
        return self._permuted({node: tuple(to.get(slot, slot) for slot in self._permutation(node))})

    def rotate(self, node: str) -> Placement:
        """Every rank of `node` moves to the next slot, the last to slot 0. With one slot nothing changes."""
        return self._permuted({node: self._rotated(node)})

    def rotate_all(self) -> Placement:
        """Every rank of the job moves to the next slot of its node. With one slot a node nothing changes."""
        return self._permuted({node: self._rotated(node) for node in self.nodes})

    def exchange(self, a: str, b: str) -> Placement:
        """Two nodes change places, with all that is on them. ValueError for a node that holds none."""
        to = {self.nodes[self.position_of(a)]: b, self.nodes[self.position_of(b)]: a}
        return replace(self, nodes=tuple(to.get(node, node) for node in self.nodes))

    def rotate_nodes(self) -> Placement:
        """Every position moves to the next node, the last to the first. With one node nothing changes."""
        return replace(self, nodes=(*self.nodes[1:], self.nodes[0]))

    def move_to_other_slot(self, node: str, rank: int, avoid: Collection[int] = frozenset()) -> Placement | None:
        """`rank` changes places with another rank of its `node`; None where each other slot is in `avoid`.

        The current slot never counts as other. Among the allowed slots the one that disturbs least: fewest ranks are away from their
        unpermuted slot afterwards, then the nearest, then the lowest. ValueError where `node` does not hold `rank`.
        """
        holder, current = self.place(rank)
        if holder != node:
            raise ValueError(f"rank {rank} is on {holder!r}, not on {node!r}")
        local = rank % self.nproc
        partners = {slot: partner % self.nproc for slot, partner in enumerate(self.ranks_on(node)) if slot != current and slot not in avoid}
        if not partners:
            return None

        def disturbance(slot: int) -> tuple[int, int, int]:
            away = (slot != local) + (current != partners[slot]) - (slot != partners[slot])
            return away, abs(slot - current), slot

        return self.swap_slots(node, current, min(partners, key=disturbance))

    def validate(self) -> None:
        """Walk the whole map both ways: each rank has one place and each place one rank. ValueError with the first that does not."""
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError("a node is named twice")
        for position, node in enumerate(self.nodes):
            by_slot = self.ranks_on(node)
            first = position * self.nproc
            if sorted(by_slot) != list(range(first, first + self.nproc)):
                raise ValueError(f"node {node!r} at position {position} holds ranks {by_slot}")
            for slot, rank in enumerate(by_slot):
                if self.place(rank) != (node, slot) or self.rank_at(node, slot) != rank:
                    raise ValueError(f"{node}/{slot} holds rank {rank}, but that rank is at {self.place(rank)}")

    def to_json(self) -> dict[str, object]:
        """A JSON object: `nodes`, `nproc`, and `slots` with the permutations that are not the identity."""
        return {"nodes": list(self.nodes), "nproc": self.nproc, "slots": {node: list(p) for node, p in self.slots.items()}}

    @classmethod
    def from_json(cls, value: object) -> Placement:
        """The inverse of `to_json`. ValueError with what is wrong, for anything that is no bijection."""
        if not isinstance(value, Mapping):
            raise ValueError(f"placement must be an object, is {type(value).__name__}")
        nodes, nproc, slots = value.get("nodes"), value.get("nproc"), value.get("slots", {})
        if not isinstance(nodes, list | tuple) or not all(isinstance(node, str) for node in nodes):
            raise ValueError("placement: nodes must be a list of names")
        if not isinstance(slots, Mapping):
            raise ValueError("placement: slots must be an object of node -> list of slots")
        for node, permutation in slots.items():
            if not isinstance(permutation, list | tuple) or not all(_is_int(slot) for slot in permutation):
                raise ValueError(f"placement: slots of {node!r} must be a list of whole numbers")
        try:
            return cls(tuple(nodes), nproc, {node: tuple(permutation) for node, permutation in slots.items()})  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"placement: {error}") from None

    def _permutation(self, node: str) -> tuple[int, ...]:
        self.position_of(node)
        return self.slots.get(node) or tuple(range(self.nproc))

    def _rotated(self, node: str) -> tuple[int, ...]:
        return tuple((slot + 1) % self.nproc for slot in self._permutation(node))

    def _permuted(self, changed: Mapping[str, tuple[int, ...]]) -> Placement:
        return replace(self, slots={**self.slots, **changed})

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside 0..{self.world - 1}")
        return rank

    def _checked_slot(self, slot: int) -> int:
        if not 0 <= slot < self.nproc:
            raise ValueError(f"slot {slot} is outside 0..{self.nproc - 1}")
        return slot


def moved(old: Placement, new: Placement) -> tuple[int, ...]:
    """The ranks whose (node, slot) differs, ascending. ValueError where the two are not of one shape."""
    if (len(old.nodes), old.nproc) != (len(new.nodes), new.nproc):
        raise ValueError(f"placements of {len(old.nodes)} x {old.nproc} and {len(new.nodes)} x {new.nproc} slots cannot be compared")
    if old == new:
        return ()
    return tuple(rank for rank in range(old.world) if old.place(rank) != new.place(rank))


def successors(former: Placement | None, now: Placement) -> str:
    """Who is now where somebody else was: `; b in the place of a`, empty for nobody."""
    pairs = [(a, b) for a, b in zip(former.nodes, now.nodes, strict=True) if a != b] if former is not None else []
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return "; " + ", ".join(f"{b} in the place of {a}" for a, b in pairs[:4]) + more if pairs else ""


def order_nodes(nodes: Iterable[tuple[str, int | None]]) -> tuple[str, ...]:
    """Node ids by SLURM_NODEID where every node has one, else by natural sort of the ids (`node2` before `node10`)."""
    known = list(nodes)
    if all(nodeid is not None for _, nodeid in known):
        known.sort(key=lambda node: (node[1] or 0, _natural(node[0])))
    else:
        known.sort(key=lambda node: _natural(node[0]))
    return tuple(node for node, _ in known)


@dataclass(frozen=True, slots=True)
class Spare:
    """A registered node without ranks, as a candidate: `quarantined_slots` are those of its slots that no rank may use."""

    node: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    failed_before: bool = False
    quarantined_slots: frozenset[int] = frozenset()


class SpareChoice(NamedTuple):
    """The spare to use, or None, and why: one sentence with numbers."""

    node: str | None
    reason: str


def choose_spare(lost_labels: Mapping[str, str], spares: Sequence[Spare]) -> SpareChoice:
    """The spare that takes a hole whose node had `lost_labels` (`--node-label K=V`).

    A spare with a quarantined slot cannot take exactly the hole and is passed over. Then, in this order: one that never failed before one
    that did (the spare of last resort), most labels in common, natural order of the ids.
    """
    usable = [spare for spare in spares if not spare.quarantined_slots]
    unfit = [f"; {s.node} passed over, its slots {sorted(s.quarantined_slots)} are quarantined" for s in spares if s.quarantined_slots]
    passed_over = "".join(unfit)
    if not usable:
        return SpareChoice(None, f"none of {len(spares)} spares can take the hole{passed_over}" if spares else "there is no spare")

    def in_common(spare: Spare) -> int:
        return len(spare.labels.items() & lost_labels.items())

    best = min(usable, key=lambda spare: (spare.failed_before, -in_common(spare), _natural(spare.node)))
    history = "failed before (spare of last resort)" if best.failed_before else "never failed"
    labels = f"{in_common(best)} of the lost node's {len(lost_labels)} labels" if lost_labels else "the lost node had no labels"
    return SpareChoice(best.node, f"{best.node} of {len(spares)} spares: {history}, {labels}{passed_over}")


def _check_nodes(nodes: Sequence[str], position: Mapping[str, int], nproc: object) -> None:
    if not _is_int(nproc) or nproc < 1:
        raise ValueError(f"nproc must be a whole number of at least 1, is {nproc!r}")
    if not nodes:
        raise ValueError("a placement needs at least one node")
    if len(position) != len(nodes):
        twice = next(node for i, node in enumerate(nodes) if position[node] != i)
        raise ValueError(f"node {twice!r} is named twice")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _natural(name: str) -> tuple[tuple[tuple[str, int, str], ...], str]:
    """Sort key: digits compare as numbers (by length first: no limit on how many), the rest as text, the name itself decides ties."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return tuple((text, len(digits.lstrip("0")), digits.lstrip("0")) for text, digits in parts), name
