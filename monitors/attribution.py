"""Whose hang it is: the culprit among all ranks of a stuck job, or that it cannot be told.

In lock-step training one rank that stands still makes all others stand still, and their timeouts run out at almost the same moment, often before its own. So nothing is
concluded from who was reported first. What separates the culprit from its victims:

1. *Hard evidence*: a stopped process, one that is dumping core or dead, one in uninterruptible sleep.
2. *It alone stands still*: the others go on, or have left.
3. *Places*: a rank that waits in a collective, a point-to-point call or a barrier needs somebody else; the one that is somewhere else is that somebody.
4. *Order*: whoever has completed a step has given everything that others need to complete it. So the culprit is never ahead: it is among those with the fewest completed
   steps, and of these among those that have not begun the next. A rank that waits is not blamed for being behind, and a rank whose place is unknown is not blamed for
   being a single step behind where a pipeline lets others run ahead.
5. *An odd stack*: everybody else stands at one and the same place of which it is not known that it waits.

All waiting at once is a network or library fault: nobody is named, but the smallest group that is stuck is. One rule for all cases would be shorter and sometimes wrong:
a wrong name sends a good node away and keeps the bad one, so wherever two ranks are left the answer is "cannot tell" with both of them.

Pure, and O(ranks): values in (`core.evidence.RankProgress`, exits, the topology), a `Blame` out. It kills nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ft_launcher.core.evidence import Blame, RankExit, RankProgress
from ft_launcher.core.topology import Topology
from monitors.attribution_places import Place
from monitors.attribution_scene import STATES, Scene, distance, earliest, hard, lead, look, order, steps_ahead
from monitors.stacks import shared


def attribute(progress: Mapping[int, RankProgress], exits: Mapping[int, RankExit], since_s: float, topology: Topology) -> Blame:
    """Name the culprit of a hang of age `since_s`. `progress` and `exits` by rank; ranks without progress (their node was lost) count as unknown. Never raises for odd values."""
    scene = look(progress, exits, since_s, topology)
    for rule in RULES:
        blame = rule(scene)
        if blame is not None:
            return blame
    return _cannot(scene, f"no progress of any rank is known ({len(progress)} of {topology.world} reported)", ())


def _named(scene: Scene, rank: int, why: str) -> Blame:
    return Blame(rank, f"it {why}", victims=tuple(r for r in (*scene.still, *scene.broken) if r != rank))


def _cannot(scene: Scene, why: str, suspects: Sequence[int]) -> Blame:
    left = f"; {scene.ranks(sorted(scene.gone))} {'have' if len(scene.gone) > 1 else 'has'} left with exit 0" if scene.gone else ""
    return Blame(None, f"the culprit cannot be told: {why}{left}", suspects=tuple(suspects))


def _others(count: int) -> str:
    return "the only other rank" if count == 1 else f"the other {count} ranks"


# -- the rules, in order -----------------------------------------------------------------------------------------------------------------------------


def stopped(scene: Scene) -> Blame | None:
    """Rule 1: the kernel says so. Uninterruptible sleep counts only where somebody is not in it: all of them wait for the same storage."""
    found = [r for r in scene.still if hard(scene.progress[r])]
    worst = [r for r in found if scene.progress[r].state != "D"] or found
    if not worst:
        return None
    if len(worst) > 1 and all(scene.progress[r].state == "D" for r in worst):
        return _cannot(scene, f"{scene.ranks(worst)} are in uninterruptible sleep at once: storage or a driver that they share", worst)
    first = worst[0]
    also = f"; so are {scene.ranks(worst[1:])}" if len(worst) > 1 else ""
    return _named(scene, first, f"{STATES[scene.progress[first].state]} {scene.where(first)}{also}")


def alone(scene: Scene) -> Blame | None:
    """Rule 2: one rank stands still, and the others go on or have left."""
    if len(scene.still) != 1 or not (scene.moving or scene.gone or len(scene.progress) == 1):
        return None
    (rank,) = scene.still
    place = scene.places.get(rank)
    if len(scene.progress) < scene.topology.world:
        return _cannot(scene, f"{scene.name(rank)} stands still, but not every rank's progress is known", (rank,))
    if place is not None and place.waiting and scene.topology.world > 1:
        return _cannot(scene, f"{scene.name(rank)} {place.words()} and nobody else stands still: {_left(scene)}", (rank,))
    stands = f"stands still {scene.where(rank)}" + (f", and {place.words()}" if place else "")
    return _named(scene, rank, f"{stands}; {_left(scene)}" if scene.topology.world > 1 else stands)


def _left(scene: Scene) -> str:
    counted = [
        (len(scene.moving), "goes on", "go on"),
        (len(scene.gone), "has left with exit 0", "have left with exit 0"),
        (len(scene.broken), "has failed", "have failed"),
    ]
    said = [f"{count} other ranks {many}" if count > 1 else f"1 other rank {one}" for count, one, many in counted if count]
    return ", ".join(said) or "no other rank is left"


def not_waiting(scene: Scene) -> Blame | None:
    """Rules 3 and 4: of the ranks that are not seen to wait for others, the earliest, if it is a single one and good enough."""
    open_ = [r for r in scene.still if not _waits(scene, r)]
    if not scene.still or not open_:
        return None
    behind, free = earliest(scene, scene.still), set(open_)
    suspects = [r for r in behind if r in free]
    if not suspects:
        suspects = [r for r in open_ if scene.topology.pp > 1 and steps_ahead(scene, r) <= 1]
        if len(open_) > 1 or not suspects:
            return _cannot(
                scene,
                f"{scene.ranks(behind)} {_is(behind)} behind but wait{'s' if len(behind) == 1 else ''} for others; not waiting: {scene.ranks(open_)}",
                open_,
            )
    elif not all(_own(scene, r) for r in suspects):
        suspects = sorted({*suspects, *(r for r in open_ if _explained(scene, r))})
    suspects = _firm(scene, suspects) or suspects
    missing = scene.topology.world - len(scene.progress)
    if len(suspects) == 1 and missing <= 0:
        return _single(scene, suspects[0], open_, behind)
    return None


def _firm(scene: Scene, suspects: Sequence[int]) -> list[int]:
    """The single suspect that waits for its data or a file, where all others are known to be in calls that may wait for it."""
    kinds = {r: p.kind if (p := scene.places.get(r)) is not None else "" for r in suspects}
    firm = [r for r, kind in kinds.items() if kind in ("dataloader", "file")]
    return firm if len(firm) == 1 and all(kind in ("device", "autograd", "wait") for r, kind in kinds.items() if r != firm[0]) else []


def _waits(scene: Scene, rank: int) -> bool:
    place = scene.places.get(rank)
    return place is not None and place.waiting


def _own(scene: Scene, rank: int) -> bool:
    place = scene.places.get(rank)
    return place is not None and place.own


def _single(scene: Scene, rank: int, open_: Sequence[int], behind: Sequence[int]) -> Blame:
    """One rank is left. Its own place convicts it when all others wait; else it must be behind them as well."""
    place, count = scene.places.get(rank), len(scene.still) - 1
    is_behind = list(behind) == [rank] and count > 0
    doubtful = [r for r in open_ if r != rank]
    if place is not None and place.own:
        if not doubtful or is_behind or place.kind in ("dataloader", "file"):
            rest = f"{_others(count)} {_wait_words(scene, rank)}" if count else _left(scene)
            return _named(scene, rank, f"{place.words()} {scene.where(rank)}, while {rest}")
        return _cannot(
            scene, f"{scene.name(rank)} {place.words()}, but {scene.ranks(doubtful)} may not be waiting either", (rank, *doubtful)
        )
    if is_behind and (lead(scene, rank) != 1 or scene.topology.pp == 1):
        seen = f" and {place.words()}" if place else ""
        return _named(
            scene,
            rank,
            f"is behind all others: it is {scene.where(rank)}{seen}; {_others(count)} {_is(range(count))} at least {distance(scene, rank)}",
        )
    if is_behind:
        return _cannot(
            scene,
            f"{scene.name(rank)} is one step behind the others, which a pipeline of {scene.topology.pp} stages explains as well",
            (rank,),
        )
    return _cannot(scene, f"all ranks but {scene.name(rank)} wait for others, and whether it waits as well is not known", (rank,))


def _wait_words(scene: Scene, but: int) -> str:
    waits = [scene.places[r] for r in scene.still if r != but and _waits(scene, r)]
    calls = sorted({p.op for p in waits})
    if len(waits) == len(scene.still) - 1:
        return f"wait{'s' if len(waits) == 1 else ''} in {', '.join(calls[:3])}"
    return f"are not earlier ({len(waits)} of them wait in {', '.join(calls[:3])})" if waits else "are not earlier"


def odd_one(scene: Scene) -> Blame | None:
    """Rule 5: all others, at least two, stand at one place and nobody is behind; the odd one does not wait."""
    placed = [r for r in scene.still if r in scene.places]
    if len(placed) != len(scene.still) or len(placed) < 3 or len(scene.progress) < scene.topology.world:
        return None
    at: dict[Place, list[int]] = {}
    for rank in placed:
        at.setdefault(scene.places[rank], []).append(rank)
    single = [ranks[0] for ranks in at.values() if len(ranks) == 1]
    if len(at) != 2 or len(single) != 1 or not _own(scene, single[0]) or single[0] not in earliest(scene, scene.still):
        return None
    place = next(p for p, ranks in at.items() if len(ranks) > 1)
    rank = single[0]
    return _named(
        scene,
        rank,
        f"{scene.places[rank].words()} {scene.where(rank)}; {_others(len(placed) - 1)} stand at one other place: {place.kind} at {place.site or place.op}",
    )


def left_early(scene: Scene) -> Blame | None:
    """Everybody who is left waits, and one rank has left with 0 before the step that they are in."""
    if len(scene.gone) != 1 or not scene.still or not all(_waits(scene, r) for r in scene.still):
        return None
    (rank,) = scene.gone
    p = scene.progress.get(rank)
    if p is None or not all(order(scene, r) > order(scene, rank) for r in scene.still):
        return None
    ops = sorted({scene.places[r].op for r in scene.still})
    return _named(
        scene, rank, f"left with exit 0 after {p.steps} steps, and the other {len(scene.still)} wait in {', '.join(ops[:3])} of a later one"
    )


def undecided(scene: Scene) -> Blame | None:
    """Nobody can be named: say what is known, smallest stuck group first."""
    if not scene.still:
        return None
    waiting = [r for r in scene.still if _waits(scene, r)]
    if len(waiting) < len(scene.still):
        behind = earliest(scene, scene.still)
        left = [r for r in behind if not _waits(scene, r)] or behind
        known = len([r for r in left if r in scene.places])
        return _cannot(
            scene,
            f"{scene.ranks(left)} {_is(left)} equally far, {scene.where(left[0])}; stacks of {known} of them show no difference that would convict one",
            left,
        )
    return _all_wait(scene, waiting)


def _all_wait(scene: Scene, waiting: Sequence[int]) -> Blame:
    at: dict[tuple[str, str], list[int]] = {}
    for rank in waiting:
        place = scene.places[rank]
        at.setdefault((place.op, place.group), []).append(rank)
    if len(at) == 1:
        ((op, group),) = at
        return _cannot(
            scene,
            f"all {len(waiting)} ranks wait in {op}{f' ({group})' if group else ''}: the network, the communication library or a device",
            (),
        )
    inner = _stuck_group(scene, at)
    parts = "; ".join(
        f"{scene.ranks(ranks)} in {op}{f' ({group})' if group else ''}"
        for (op, group), ranks in sorted(at.items(), key=lambda i: len(i[1]))[:4]
    )
    first = f"; the innermost is that of {scene.ranks(inner)}" if inner else ""
    return _cannot(scene, f"all {len(waiting)} ranks wait, in {len(at)} different calls: {parts}{first}", inner)


_INNERMOST = ("tp", "ep", "pp", "dp")


def _stuck_group(scene: Scene, at: Mapping[tuple[str, str], list[int]]) -> tuple[int, ...]:
    """The ranks of the one group that waits in the innermost kind of collective, when they are such a group."""
    for kind in _INNERMOST:
        ranks = sorted(r for (_, group), found in at.items() for r in found if group == kind)
        if ranks:
            whole = all(set(scene.topology.group_of(kind, r)) <= set(ranks) for r in ranks)
            return tuple(ranks) if whole and len(ranks) < len(scene.still) and shared(ranks, scene.topology) else ()
    return ()


Rule = Callable[[Scene], Blame | None]
RULES: tuple[Rule, ...] = (stopped, alone, not_waiting, odd_one, left_early, undecided)


def _explained(scene: Scene, rank: int) -> bool:
    """Ahead by no more than what a pipeline's asynchronous sends allow: being ahead clears nobody of unknown place then."""
    return scene.topology.pp > 1 and steps_ahead(scene, rank) == 1 and not _own(scene, rank)


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
