"""Attribution over generated hangs: each rank as culprit, at each of its own operations, in many topologies: right or "cannot tell", never wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from ft_launcher.core.evidence import Blame, RankExit, RankProgress
from ft_launcher.core.topology import Topology
from monitors.attribution import attribute
from monitors.attribution_places import Place
from tests.monitors.lockstep import Job

TOPOLOGIES = [
    Topology.build(world=2),
    Topology.build(world=4),
    Topology.build(world=4, tp=2),
    Topology.build(world=4, tp=4),
    Topology.build(world=4, pp=4),
    Topology.build(world=4, tp=2, pp=2),
    Topology.build(world=8, tp=2, pp=2),
    Topology.build(world=8, pp=4),
    Topology.build(world=8, tp=2, cp=2, pp=2),
    Topology.build(world=6, pp=3, tp=2),
    Topology.build(world=8, tp=2, pp=2, order="tp-pp-cp-ep-dp"),
]
IDS = [f"tp{t.tp}cp{t.cp}dp{t.dp}pp{t.pp}" + ("" if t.order.endswith("pp") else "-odd") for t in TOPOLOGIES]


@cache
def scenes(topology: Topology, global_sync: bool = True) -> list[tuple[int, str, Job]]:
    """(culprit, operation, the stuck job) for each rank and each of its own operations, but the very last ones where nobody is left to wait."""
    found = []
    for rank in range(topology.world):
        for at in Job(topology, global_sync=global_sync).own_work(rank):
            job = Job(topology, global_sync=global_sync)
            job.hang(rank, at)
            job.run()
            found.append((rank, job.ranks[rank].program[at][1][1], job))
    return found


def ask(job: Job, progress: dict[int, RankProgress] | None = None, exits: dict[int, RankExit] | None = None) -> Blame:
    return attribute(job.progress() if progress is None else progress, exits or {}, 9.0, job.topology)


def told(topology: Topology, change: Callable[[Job, int], dict[int, RankProgress]], global_sync: bool = True) -> Counter[bool]:
    """How often it can be told; a wrong name fails."""
    count: Counter[bool] = Counter()
    for culprit, op, job in scenes(topology, global_sync):
        blame = ask(job, change(job, culprit))
        assert blame.rank in (culprit, None), f"{topology} culprit {culprit} in {op}: {blame.why}\n" + "\n".join(
            f"{r}: {p}" for r, p in change(job, culprit).items()
        )
        count[blame.rank is not None] += 1
    return count


@pytest.mark.parametrize("global_sync", [True, False], ids=["sync", "free"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_with_all_stacks_the_culprit_is_always_named(topology: Topology, global_sync: bool) -> None:
    count = told(topology, lambda job, _: job.progress(), global_sync)
    assert count[False] == 0 and count[True] > 0


@pytest.mark.parametrize("global_sync", [True, False], ids=["sync", "free"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_without_stacks_it_is_right_or_cannot_be_told(topology: Topology, global_sync: bool) -> None:
    count = told(topology, lambda job, _: job.progress(lambda rank: False), global_sync)
    assert count[True] > 0, "a hang between steps or in a save shows in the positions alone"


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_without_the_culprits_own_stack(topology: Topology) -> None:
    told(topology, lambda job, culprit: job.progress(lambda rank: rank != culprit))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_a_stopped_process_is_named_whatever_else_is_known(topology: Topology) -> None:
    for culprit, _, job in scenes(topology):
        progress = job.progress(lambda rank: False)
        progress[culprit] = replace(progress[culprit], state="T")
        assert ask(job, progress).rank == culprit


def noisy(seed: int) -> Callable[[Job, int], dict[int, RankProgress]]:
    """Stacks that did not arrive, places that say little, sections that other threads open and close, a rank without client or report, odd iterations."""

    def change(job: Job, culprit: int) -> dict[int, RankProgress]:
        rng = random.Random(f"{seed} {culprit} {job.ranks[culprit].at}")
        progress = job.progress(lambda rank: rng.random() < 0.7)
        unsure = str(Place("wait", "", "", "train.py:wait"))
        for rank, p in list(progress.items()):
            if rng.random() < 0.2 and p.place:
                progress[rank] = p = replace(p, place=unsure)
            if rng.random() < 0.2:
                progress[rank] = p = replace(p, ended=p.ended + rng.randrange(50), section=rng.choice([p.section, "beat"]))
            if rng.random() < 0.1:
                progress[rank] = replace(p, iteration=None)
            if rng.random() < 0.03:
                del progress[rank]
        return progress

    return change


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_with_noise_it_is_never_wrong(topology: Topology) -> None:
    for seed in range(12):
        told(topology, noisy(seed), global_sync=seed % 2 == 0)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
@pytest.mark.parametrize("stacks", [True, False])
def test_when_the_network_is_at_fault_nobody_is_named(topology: Topology, stacks: bool) -> None:
    for broken in range(topology.world):
        for kind in ("tp", "dp-cp"):
            group = topology.group_of(kind, broken)
            job = Job(topology)
            job.broken = frozenset(group) if len(group) > 1 else frozenset(range(topology.world))
            job.run()
            blame = ask(job, job.progress(lambda rank: stacks))
            assert blame.rank is None, blame.why
            assert blame.why.startswith("the culprit cannot be told: ")


def at(place: Place | None = None, **changes: object) -> RankProgress:
    base = RankProgress(5, 5, "step", 9.0, True, ended=6, stepping=True, still_s=9.0, place=str(place) if place else "")
    return replace(base, **changes)  # type: ignore[arg-type]


REDUCE, TP, RECV = (
    Place("collective", "all_reduce", "", "train.py:step"),
    Place("collective", "all_reduce", "tp", "mappings.py:_reduce"),
    Place("p2p", "recv", "pp", "p2p.py:recv"),
)
USER, WRITE, DEVICE = (
    Place("user", "", "", "train.py:f"),
    Place("file", "serialization.save", "", "train.py:save"),
    Place("device", "cuda.synchronize", "", "train.py:g"),
)
FOUR, TWO_STAGES = Topology.build(world=4, tp=2), Topology.build(world=2, pp=2)


def exit_(rank: int, code: int = 0, ended: bool = False) -> RankExit:
    return RankExit(rank, None if ended else code, 9 if ended else None, 1, rank, ended)


def four(*ranks: RankProgress, exits: dict[int, RankExit] | None = None, since_s: float = 9.0) -> Blame:
    return attribute(dict(enumerate(ranks)), exits or {}, since_s, FOUR)


def test_the_reason_is_a_sentence_with_numbers_and_coordinates() -> None:
    blame = four(at(REDUCE), at(REDUCE), at(REDUCE), at(USER, since_s=3.25))
    assert blame.rank == 3 and blame.victims == (0, 1, 2)
    expected = "it is in user code (train.py:f) in section 'step' of iteration 5, for 3.2 s, while the other 3 ranks wait in all_reduce"
    assert blame.why == expected


def test_being_one_step_behind_is_no_proof_where_a_pipeline_explains_it() -> None:
    behind, ahead = at(steps=4, iteration=4), at()
    blame = attribute({0: behind, 1: ahead}, {}, 9.0, TWO_STAGES)
    assert blame.rank is None and ("pipeline of 2 stages" in blame.why or blame.suspects)
    assert attribute({0: at(steps=3, iteration=3), 1: ahead}, {}, 9.0, TWO_STAGES).rank == 0, (
        "two steps are more than asynchronous sends explain"
    )


def test_a_rank_that_waits_is_not_blamed_for_being_behind() -> None:
    blame = attribute({0: at(RECV, steps=4, iteration=4), 1: at(USER)}, {}, 9.0, TWO_STAGES)
    assert blame.rank == 1, "its neighbour's asynchronous send has not gone out"
    assert four(at(REDUCE, steps=4), at(REDUCE), at(REDUCE), at(REDUCE)).rank is None


def test_a_device_wait_neither_convicts_nor_clears() -> None:
    assert four(at(DEVICE), at(DEVICE), at(DEVICE), at(DEVICE)).rank is None
    assert four(at(REDUCE), at(REDUCE), at(REDUCE), at(DEVICE)).rank is None
    assert four(at(REDUCE), at(DEVICE), at(DEVICE), at(USER)).rank is None, (
        "compute that is launched into a full queue looks like user code"
    )
    assert four(at(DEVICE), at(DEVICE), at(DEVICE), at(USER)).rank == 3, "all others at one place is what ranks look like that wait for one"
    assert four(at(REDUCE), at(DEVICE), at(DEVICE), at(WRITE)).rank == 3


def test_when_all_wait_in_different_calls_the_innermost_stuck_group_is_named() -> None:
    blame = four(at(REDUCE), at(REDUCE), at(TP), at(TP))
    assert blame.rank is None and blame.suspects == (2, 3)
    assert "the innermost is that of ranks 2-3 = dp 1" in blame.why


def test_uninterruptible_sleep_counts_where_it_is_one_and_not_all() -> None:
    assert four(at(), at(), at(state="D"), at()).rank == 2
    blame = four(*[at(state="D")] * 4)
    assert blame.rank is None and "storage" in blame.why
    assert four(at(state="D"), at(state="C"), at(), at()).rank == 1


def test_who_goes_on_or_has_left_is_no_culprit() -> None:
    moving = at(still_s=0.1)
    assert four(moving, at(), moving, moving).rank == 1
    assert four(at(), at(), at(), at(), exits={r: exit_(r) for r in (0, 1, 3)}).rank == 2
    assert four(at(), at(), at(), at(), exits={r: exit_(r, ended=True) for r in range(4)}).rank is None, (
        "killed by the launcher is no exit of its own"
    )


def test_one_that_left_too_early() -> None:
    waiting = at(REDUCE)
    blame = four(at(None, stepping=False), waiting, waiting, waiting, exits={0: exit_(0)})
    assert blame.rank == 0 and "left with exit 0 after 5 steps" in blame.why
    left = {r: exit_(r) for r in (0, 1)}
    assert four(at(None, stepping=False), at(None, stepping=False), waiting, waiting, exits=left).rank is None


def test_the_last_one_waiting_for_those_who_left_is_not_named() -> None:
    assert four(at(), at(), at(), at(REDUCE), exits={r: exit_(r) for r in range(3)}).rank is None


def test_a_rank_that_never_attached_while_nobody_has_stepped() -> None:
    setup = at(steps=0, iteration=None, section="setup", stepping=False, ended=0)
    absent = replace(setup, client=False, section=None)
    assert four(setup, setup, absent, setup).rank == 2
    assert four(setup, absent, absent, setup).rank is None
    assert four(at(), at(), absent, at()).rank is None, "a script may have ranks without a client"
    assert four(*[absent] * 4).rank is None


def test_an_unreported_rank_may_be_the_one() -> None:
    assert attribute({0: at(), 1: at(), 2: at(steps=1)}, {}, 9.0, FOUR).rank is None
    assert attribute({}, {}, 9.0, FOUR).rank is None
    assert attribute({0: at(USER)}, {}, 9.0, Topology.build(world=1)).rank == 0


def test_the_odd_stack_of_many() -> None:
    other = Place("user", "", "", "comm.py:spin")
    blame = four(at(other), at(other), at(USER), at(other))
    assert blame.rank == 2 and "stand at one other place" in blame.why
    assert attribute({0: at(other), 1: at(USER)}, {}, 9.0, Topology.build(world=2)).rank is None


def test_ten_thousand_ranks_are_judged_in_one_pass() -> None:
    topology = Topology.build(world=10_000, tp=8, pp=10)
    progress = dict.fromkeys(range(10_000), at(REDUCE)) | {4711: at(USER)}
    assert attribute(progress, {}, 9.0, topology).rank == 4711
    assert attribute(dict.fromkeys(range(10_000), at(REDUCE)), {}, 9.0, topology).rank is None
