"""What is known of a stuck job, prepared for the rules of `monitors.attribution`: who lives and stands still, where each rank's stack stands, and who is before whom.

The *order* is a partial one. Completed steps compare always; iterations only where every rank gives one; having begun the next step after that. Between steps the sections ended are
compared, where all ranks have the same habit of sections. Ranks without a client among ranks with one have no place in it: they may be anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft_launcher.core.evidence import RankExit, RankProgress
from ft_launcher.core.topology import Topology
from monitors.attribution_places import Place
from monitors.stacks import ranks_text

STANDING_SHARE = 0.5
"""Who made progress within this share of the hang's age goes on."""

STATES = {
    "C": "is dumping core",
    "T": "is stopped (process state T)",
    "t": "is stopped by a debugger (process state t)",
    "Z": "is dead (process state Z)",
    "X": "is dead (process state X)",
    "D": "is in uninterruptible sleep (process state D)",
}


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is known. `still` are the ranks that live and stand still; `gone` have left with 0, `broken` otherwise (by themselves), `moving` make progress.

    `iterations`: every rank that is compared gives one, so that they can be compared.
    """

    progress: Mapping[int, RankProgress]
    topology: Topology
    still: tuple[int, ...]
    moving: tuple[int, ...]
    gone: tuple[int, ...]
    broken: tuple[int, ...]
    places: Mapping[int, Place] = field(default_factory=dict)
    iterations: bool = False
    least_iteration: int = 0
    least_steps: int = 0
    most_steps: int = 0

    def name(self, rank: int) -> str:
        """`rank 3 (tp=1,cp=0,dp=1,pp=0)`."""
        return f"rank {rank} ({self.topology.coords(rank)})"

    def where(self, rank: int) -> str:
        """`in section 'step' of iteration 7, for 3.2 s`."""
        p = self.progress[rank]
        at = f"in section '{p.section}'" if p.section else "out of section" if p.client else "before any section"
        of = f" of iteration {p.iteration}" if p.iteration is not None else f" after {p.steps} steps"
        return f"{at}{of}, for {p.since_s:.1f} s"

    def ranks(self, ranks: Sequence[int]) -> str:
        """`ranks 1,3 = tp 1`."""
        return ranks_text(ranks, self.topology)


def look(progress: Mapping[int, RankProgress], exits: Mapping[int, RankExit], since_s: float, topology: Topology) -> Scene:
    """The scene of a hang of age `since_s`."""
    known = {r: p for r, p in progress.items() if 0 <= r < topology.world}
    own = {r: e for r, e in exits.items() if not e.ended}
    gone = tuple(sorted(r for r, e in own.items() if e.success))
    broken = tuple(sorted(r for r, e in own.items() if not e.success))
    living = [r for r in sorted(known) if r not in own]
    limit_s = since_s * STANDING_SHARE
    moving = tuple(r for r in living if (age := known[r].still_s) is not None and age < limit_s and not hard(known[r]))
    going = set(moving)
    still = tuple(r for r in living if r not in going)
    read = {text: Place.of(text) for text in {known[r].place for r in still}}  # few different ones, however many ranks
    places = {r: place for r in still if (place := read[known[r].place]) is not None}
    placed = [known[r] for r in still if known[r].client]
    numbers = [p.iteration for p in (*placed, *(known[r] for r in gone if r in known)) if p.iteration is not None]
    return Scene(
        known,
        topology,
        still,
        moving,
        gone,
        broken,
        places,
        iterations=len(numbers) == len(placed) + sum(r in known for r in gone) and bool(numbers),
        least_iteration=min(numbers, default=0),
        least_steps=min((p.steps for p in placed), default=0),
        most_steps=max((p.steps for p in placed), default=0),
    )


def hard(p: RankProgress) -> bool:
    """The state of its process is evidence by itself."""
    return p.state in STATES


def order(scene: Scene, rank: int) -> tuple[int, int, bool]:
    """Grows with everything that a rank gives to others: completed steps, the iteration (where all give one), having begun the next step."""
    p = scene.progress[rank]
    return (p.steps, p.iteration if scene.iterations and p.iteration is not None else -1, p.stepping)


def _is_unplaced(scene: Scene, rank: int) -> bool:
    """A rank without a client among ranks that have one and have made steps: how far it is, is unknown."""
    return not scene.progress[rank].client


def earliest(scene: Scene, ranks: Sequence[int]) -> list[int]:
    """The ranks that nobody is behind; those of unknown order are among them."""
    unknown = [r for r in ranks if _is_unplaced(scene, r)]
    known = [r for r in ranks if not _is_unplaced(scene, r)] if unknown else list(ranks)
    if unknown and known and all(scene.progress[r].steps == 0 for r in known):
        return unknown  # nobody has made a step: who has not even attached is the earliest
    if not known:
        return unknown
    orders = [order(scene, r) for r in known]  # once for each: there may be ten thousand
    lowest = min(orders)
    first = [r for r, at in zip(known, orders, strict=True) if at == lowest]
    return sorted(unknown + _before_others(scene, first))


def _before_others(scene: Scene, ranks: Sequence[int]) -> list[int]:
    """Between steps: where all have the same habit of sections, the one that has ended exactly one section fewer than all others is the earliest."""
    if len(ranks) < 3 or any(scene.progress[r].stepping for r in ranks):
        return list(ranks)
    counts: dict[tuple[int, str | None], list[int]] = {}
    for rank in ranks:
        counts.setdefault((scene.progress[rank].ended, scene.progress[rank].section), []).append(rank)
    if len(counts) != 2:
        return list(ranks)
    (low, few), (high, many) = sorted(counts.items(), key=lambda item: item[0][0])
    one_fewer = high[0] - low[0] == 1 and low[1] is not None and high[1] is None
    return few if one_fewer and len(few) == 1 and len(many) > 1 else list(ranks)


def steps_ahead(scene: Scene, rank: int) -> int:
    """How many steps this rank is ahead of the earliest; iterations where the script has no `step` section."""
    p = scene.progress[rank]
    if scene.most_steps == 0 and scene.iterations and p.iteration is not None:
        return p.iteration - scene.least_iteration
    return p.steps - scene.least_steps


def lead(scene: Scene, rank: int) -> int:
    """Steps between this rank and the next one."""
    return min((steps_ahead(scene, r) for r in scene.still if r != rank), default=0)


def distance(scene: Scene, rank: int) -> str:
    """`2 steps further`: how far the others are, for a sentence."""
    ahead = lead(scene, rank)
    return f"{ahead} step{'s' if ahead > 1 else ''} further" if ahead else "one section further"
