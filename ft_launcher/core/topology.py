"""The fixed topology: which part of the model a rank is, and who waits with it.

A job has `world` ranks and two views of them. The dense view splits them into tp x cp x dp x pp, the expert view (mixture-of-experts
layers) splits the same ranks into etp x ep x edp x pp. In each view a rank is a number written in mixed radix: `order` names the digits,
fastest first, so that with `tp-cp-ep-dp-pp` neighbouring ranks differ in tp. A digit of a view has a size and a stride, and everything
else (coordinates, groups, peers) is arithmetic on the two.

The rules are megatron-core's (`megatron.core.parallel_state`, 0.16): one order serves both views, with ep = 1 in the dense and cp = 1 in
the expert one; etp is tp unless given; the pipeline groups of both views must be the same. A test compares every answer with that package.

This room knows numbers only. It must never know nodes, slots or devices (that is `placement`), nor that a rank is a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import TypedDict, Unpack

from ft_launcher.errors import ConfigError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_WORDS = ("tp", "cp", "dp", "pp")
EXPERT_WORDS = ("etp", "ep", "edp", "pp")
KINDS = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "tp-pp", "dp-cp")
"""The kinds of group that people debug by; `groups` also takes any other combination of words of one view, such as `etp-ep`."""

_EXPERT_NAME = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
_LIST_DIVISORS_UP_TO = 1_000_000  # an error message is not worth a long search

_Axes = dict[str, tuple[int, int]]
"""word -> (size, stride in ranks), fastest first."""


@dataclass(frozen=True, slots=True)
class Coords:
    """A rank's place in the dense view; `str()` is the form of FT_COORDS: `tp=1,cp=0,dp=3,pp=0`."""

    tp: int
    cp: int
    dp: int
    pp: int

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp},dp={self.dp},pp={self.pp}"


@dataclass(frozen=True, slots=True)
class ExpertCoords:
    """The same rank's place in the expert view; `str()` as in `Coords`."""

    etp: int
    ep: int
    edp: int
    pp: int

    def __str__(self) -> str:
        return f"etp={self.etp},ep={self.ep},edp={self.edp},pp={self.pp}"


class Degrees(TypedDict, total=False):
    """Keyword arguments of `Topology.build`; each defaults to 1, etp to tp."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`world` ranks in their two views. Cannot exist in a state that megatron-core would refuse: raises ConfigError instead."""

    world: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    order: str = DEFAULT_ORDER
    dp: int = field(init=False)
    edp: int = field(init=False)
    _dense: _Axes = field(init=False, repr=False, compare=False)
    _expert: _Axes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_sizes({"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep, "etp": self.etp}, self.world)
        words = _order_words(self.order)
        dp = _quotient(self.world, {"tp": self.tp, "cp": self.cp, "pp": self.pp})
        edp = _quotient(self.world, {"etp": self.etp, "ep": self.ep, "pp": self.pp})
        dense = {"tp": self.tp, "cp": self.cp, "dp": dp, "pp": self.pp}
        expert = {"etp": self.etp, "ep": self.ep, "edp": edp, "pp": self.pp}
        derived = {
            "order": "-".join(words),
            "dp": dp,
            "edp": edp,
            "_dense": _axes((word for word in words if word != "ep"), dense),
            "_expert": _axes((_EXPERT_NAME[word] for word in words if word != "cp"), expert),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_pipeline()

    @classmethod
    def build(cls, *, world: int, order: str = DEFAULT_ORDER, **degrees: Unpack[Degrees]) -> Topology:
        """The topology of `world` ranks; tp, cp, pp, ep default to 1 and etp to tp (also where given as None), dp and edp follow.

        Raises ConfigError, in one line that names flag, value and what is allowed: a degree or `world` that is no whole number >= 1;
        tp x cp x pp or etp x ep x pp that does not divide `world`; an order with unknown, missing or repeated words; pipeline groups that
        differ between the views.
        """
        if unknown := set(degrees) - set(Degrees.__annotations__):
            raise TypeError(f"unknown degree {', '.join(sorted(unknown))}: expected tp, pp, cp, ep or etp")
        tp, etp = degrees.get("tp", 1), degrees.get("etp")
        return cls(
            world=world,
            tp=tp,
            cp=degrees.get("cp", 1),
            pp=degrees.get("pp", 1),
            ep=degrees.get("ep", 1),
            etp=tp if etp is None else etp,
            order=order,
        )

    def _check_pipeline(self) -> None:
        """Megatron-core's two assertions on the pipeline groups of the dense and the expert view."""
        if self.pp == 1 or self.order.endswith("pp"):
            return
        if self.dp != self.edp:
            raise ConfigError(
                f"--rank-order {self.order}: with --pp {self.pp} pp must come last, because dp is {self.dp} in the dense view and "
                f"{self.edp} in the expert one; put pp last, or choose --etp x --ep = --tp x --cp = {self.tp * self.cp}"
            )
        if self._dense["pp"] != self._expert["pp"]:
            raise ConfigError(
                f"--rank-order {self.order}: the pipeline groups of the dense and the expert view differ "
                f"(neighbouring stages are {self._dense['pp'][1]} and {self._expert['pp'][1]} ranks apart); put pp last"
            )

    def coords(self, rank: int) -> Coords:
        """Dense coordinates of `rank`. ValueError outside 0..world-1."""
        return Coords(**self._digits(rank, self._dense))

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Expert coordinates of `rank`. ValueError outside 0..world-1."""
        return ExpertCoords(**self._digits(rank, self._expert))

    def rank_of(self, coords: Coords | ExpertCoords) -> int:
        """The rank at these coordinates, of either view. ValueError where one is out of its range."""
        rank = 0
        for word, (size, stride) in (self._dense if isinstance(coords, Coords) else self._expert).items():
            digit: int = getattr(coords, word)
            if not 0 <= digit < size:
                raise ValueError(f"{coords}: {word} must be within 0..{size - 1}")
            rank += digit * stride
        return rank

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `kind` (one of `KINDS`, or words of one view joined by `-`); together they partition the world.

        The order of the groups, and of the ranks within each, is Megatron's. ValueError for an unknown kind.
        """
        axes, inside = self._view(kind)
        offsets = _offsets(axis for word, axis in axes.items() if word in inside)
        bases = _offsets(axis for word, axis in axes.items() if word not in inside)
        return tuple(tuple(base + offset for offset in offsets) for base in bases)

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The one group of `kind` that holds `rank`, `rank` included. ValueError for an unknown kind or rank."""
        axes, inside = self._view(kind)
        digits = self._digits(rank, axes)
        base = rank - sum(digits[word] * axes[word][1] for word in inside)
        return tuple(base + offset for offset in _offsets(axis for word, axis in axes.items() if word in inside))

    def blast_radius(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Who waits in a collective with `rank`: each of `KINDS` -> the other ranks of its group (empty where the rank is alone)."""
        return {kind: tuple(peer for peer in self.group_of(kind, rank) if peer != rank) for kind in KINDS}

    def to_json(self) -> dict[str, int | str]:
        """A JSON object: world, the degrees, the order. dp and edp are in it for the reader's sake."""
        names = ("world", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "order")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, value: object) -> Topology:
        """The inverse of `to_json`. ValueError with what is wrong, for anything else."""
        if not isinstance(value, Mapping):
            raise ValueError(f"topology must be an object, is {type(value).__name__}")
        try:
            read = cls(**{name: value[name] for name in ("world", "tp", "cp", "pp", "ep", "etp", "order")})
        except KeyError as missing:
            raise ValueError(f"topology has no {missing}") from None
        except ConfigError as error:
            raise ValueError(f"topology: {error}") from None
        for name in ("dp", "edp"):
            if value.get(name, getattr(read, name)) != getattr(read, name):
                raise ValueError(f"topology: {name} {value[name]!r} does not follow from the others, {getattr(read, name)} does")
        return read

    def _digits(self, rank: int, axes: _Axes) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside 0..{self.world - 1}")
        return {word: rank // stride % size for word, (size, stride) in axes.items()}

    def _view(self, kind: str) -> tuple[_Axes, frozenset[str]]:
        words = kind.split("-")
        inside = frozenset(words)
        if len(inside) == len(words):
            for axes in (self._dense, self._expert):
                if inside <= axes.keys():
                    return axes, inside
        raise ValueError(f"unknown kind of group {kind!r}: expected {', '.join(KINDS)}, or words of one view joined by '-'")


def _axes(words: Iterable[str], sizes: Mapping[str, int]) -> _Axes:
    axes: _Axes = {}
    stride = 1
    for word in words:
        axes[word] = (sizes[word], stride)
        stride *= sizes[word]
    return axes


def _offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    """All sums of digit x stride, the first axis fastest."""
    offsets = [0]
    for size, stride in axes:
        offsets = [offset + digit * stride for digit in range(size) for offset in offsets]
    return offsets


def _check_sizes(degrees: Mapping[str, int], world: int) -> None:
    if not _is_size(world):
        raise ConfigError(f"a world of {world!r} ranks: --nnodes x --nproc-per-node must be a whole number of at least 1")
    for word, size in degrees.items():
        if not _is_size(size):
            raise ConfigError(f"--{word} {size}: must be a whole number of at least 1")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _order_words(order: object) -> list[str]:
    """The five words of a rank order, case ignored as Megatron does. ConfigError names each word that is wrong."""
    known = DEFAULT_ORDER.split("-")
    words = order.lower().split("-") if isinstance(order, str) else []
    counts = Counter(words)
    wrong = [f"unknown {word!r}" for word in counts if word not in known]
    wrong += [f"{word} missing" for word in known if word not in counts]
    wrong += [f"{word} repeated" for word in known if counts[word] > 1]
    if wrong:
        allowed = f"name each of tp, cp, ep, dp, pp once, fastest first, as in {DEFAULT_ORDER}"
        raise ConfigError(f"--rank-order {order}: {', '.join(wrong)}; {allowed}")
    return words


def _quotient(world: int, degrees: Mapping[str, int]) -> int:
    """`world` / product of the degrees: what is left for dp or edp. ConfigError where it is not whole."""
    product = prod(degrees.values())
    if world % product == 0:
        return world // product
    flags = " x ".join(f"--{word} {size}" for word, size in degrees.items() if size > 1)
    said = flags if flags.count("--") == 1 else f"{flags} = {product}"
    expert = " in the expert view (--etp defaults to --tp)" if "etp" in degrees else ""
    allowed = f"{' x '.join(f'--{word}' for word in degrees)} must be {_divisors_text(world, product)}"
    raise ConfigError(f"{said}: does not divide the world of {world} ranks{expert}; {allowed}")


def _divisors_text(world: int, near: int) -> str:
    """`one of 1, 2, 4, 8`, or where that list would be long the two divisors around `near`."""
    if world > _LIST_DIVISORS_UP_TO:
        return f"a divisor of {world}"
    small = [n for n in range(1, isqrt(world) + 1) if world % n == 0]
    divisors = sorted({*small, *(world // n for n in small)})
    if len(divisors) <= 8:
        return f"one of {', '.join(map(str, divisors))}"
    around = [max(n for n in divisors if n < near), *(n for n in divisors if n > near)][:2]
    return f"a divisor of {world}, such as {' or '.join(map(str, around))}"
