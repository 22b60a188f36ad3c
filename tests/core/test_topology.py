"""The topology on its own: bijection, partition, and what a user reads when degrees do not fit (Megatron's agreement has its own module)."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ft_launcher.core.topology import DEFAULT_ORDER, KINDS, Coords, ExpertCoords, Topology
from ft_launcher.errors import ConfigError


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Shapes of up to a few hundred ranks, any order; the few that the views refuse are drawn again."""
    size = st.integers(1, 4)
    tp, cp, pp, dp = (draw(size) for _ in range(4))
    world = tp * cp * pp * dp
    left = world // pp
    ep = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, left // ep + 1) if left // ep % n == 0]))
    order = "-".join(draw(st.permutations(DEFAULT_ORDER.split("-"))))
    try:
        return Topology.build(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
    except ConfigError:
        assume(False)
        raise


@given(topologies())
def test_rank_and_coords_are_a_bijection(topology: Topology) -> None:
    ranks = range(topology.world)
    dense = [topology.coords(rank) for rank in ranks]
    expert = [topology.expert_coords(rank) for rank in ranks]
    assert len(set(dense)) == len(set(expert)) == topology.world
    assert [topology.rank_of(coords) for coords in dense] == [topology.rank_of(coords) for coords in expert] == list(ranks)
    assert [coords.pp for coords in dense] == [coords.pp for coords in expert]


@given(topologies(), st.sampled_from([*KINDS, "tp-cp", "cp-tp-dp", "etp-ep", "ep-edp-etp-pp"]))
def test_groups_partition_the_world(topology: Topology, kind: str) -> None:
    groups = topology.groups(kind)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
    assert len({len(group) for group in groups}) == 1
    assert all(topology.group_of(kind, rank) == group for group in groups for rank in group)


@given(topologies(), st.data())
def test_a_group_shares_all_other_coordinates(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world - 1))
    for kind in KINDS:
        words = kind.split("-")
        view = topology.coords if set(words) <= {"tp", "cp", "dp", "pp"} else topology.expert_coords
        mine = view(rank)
        fixed = [word for word in mine.__slots__ if word not in words]
        alike = [other for other in range(topology.world) if all(getattr(view(other), word) == getattr(mine, word) for word in fixed)]
        assert sorted(topology.group_of(kind, rank)) == alike


@given(topologies())
def test_json_and_pickle_round_trips(topology: Topology) -> None:
    back = Topology.from_json(json.loads(json.dumps(topology.to_json())))
    assert back == topology == pickle.loads(pickle.dumps(topology)) == copy.deepcopy(topology)
    assert back.coords(topology.world - 1) == topology.coords(topology.world - 1)
    assert hash(back) == hash(topology)


def test_the_default_order_by_hand() -> None:
    """16 ranks of Megatron's own documentation: tp 2, pp 4, dp 2."""
    topology = Topology.build(world=16, tp=2, pp=4)
    assert topology.dp == topology.edp == 2 and topology.etp == 2
    assert topology.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert topology.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert str(topology.coords(7)) == "tp=1,cp=0,dp=1,pp=1"


def test_order_turns_the_digits_round() -> None:
    """With dp before pp swapped (--use-tp-pp-dp-mapping) the neighbours at stride tp are stages, not replicas."""
    assert Topology.build(world=8, tp=2, pp=2, order="tp-cp-ep-pp-dp").groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Topology.build(world=8, tp=2, pp=2).groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_ft_coords_text() -> None:
    assert str(Coords(tp=1, cp=0, dp=3, pp=0)) == "tp=1,cp=0,dp=3,pp=0"
    assert str(ExpertCoords(etp=0, ep=5, edp=1, pp=2)) == "etp=0,ep=5,edp=1,pp=2"


def test_blast_radius_names_who_waits() -> None:
    topology = Topology.build(world=8, tp=2, pp=2, ep=2, etp=1)
    assert topology.blast_radius(3) == {
        "tp": (2,),
        "cp": (),
        "dp": (1,),
        "pp": (7,),
        "ep": (2,),
        "etp": (),
        "edp": (1,),
        "tp-pp": (2, 6, 7),
        "dp-cp": (1,),
    }


def test_ten_thousand_ranks() -> None:
    """The largest job: every rank and group answers, and the strides are right at the far end."""
    topology = Topology.build(world=10_000, tp=5, pp=8, cp=2, ep=25, etp=1)
    assert [topology.rank_of(topology.coords(rank)) for rank in range(10_000)] == list(range(10_000))
    assert topology.coords(9_999) == Coords(tp=4, cp=1, dp=124, pp=7)
    assert topology.expert_coords(9_999) == ExpertCoords(etp=0, ep=24, edp=49, pp=7)
    assert all(len(topology.groups(kind)) * len(topology.group_of(kind, 0)) == 10_000 for kind in KINDS)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"world": 0}, ["0 ranks", "--nnodes", "--nproc-per-node", "at least 1"]),
    ({"world": -4}, ["-4 ranks"]),
    ({"world": 8, "tp": 3}, ["--tp 3", "world of 8 ranks", "1, 2, 4, 8"]),
    ({"world": 8, "tp": 2, "pp": 3}, ["--tp 2 x --pp 3 = 6", "8 ranks", "1, 2, 4, 8"]),
    ({"world": 8, "tp": 16}, ["--tp 16", "8 ranks"]),
    ({"world": 10_080, "cp": 11}, ["--cp 11", "such as 10 or 12"]),
    ({"world": 10_080, "cp": 20_000}, ["such as 10080"]),
    ({"world": 2_000_003, "cp": 2}, ["a divisor of 2000003"]),
    ({"world": 8, "ep": 3}, ["--ep 3", "expert view", "1, 2, 4, 8"]),
    ({"world": 8, "tp": 4, "ep": 4}, ["--etp 4 x --ep 4 = 16", "defaults to --tp"]),
    ({"world": 8, "tp": 0}, ["--tp 0", "at least 1"]),
    ({"world": 8, "pp": -2}, ["--pp -2", "at least 1"]),
    ({"world": 8, "cp": 1.0}, ["--cp 1.0", "whole number"]),
    ({"world": 8, "ep": "2"}, ["--ep 2", "whole number"]),
    ({"world": 8, "etp": True}, ["--etp True", "whole number"]),
    ({"world": 8, "tp": None}, ["--tp None", "whole number"]),
    ({"world": 8, "order": "tp-cp-ep-dp-xp"}, ["--rank-order tp-cp-ep-dp-xp", "unknown 'xp'", "pp missing", DEFAULT_ORDER]),
    ({"world": 8, "order": "tp-dp-pp"}, ["cp missing", "ep missing"]),
    ({"world": 8, "order": "tp-cp-ep-dp-pp-tp"}, ["tp repeated"]),
    ({"world": 8, "order": ""}, ["unknown ''", "tp missing"]),
    ({"world": 8, "order": "tp,cp,ep,dp,pp"}, ["unknown 'tp,cp,ep,dp,pp'"]),
    ({"world": 16, "tp": 2, "pp": 2, "ep": 2, "order": "tp-cp-ep-pp-dp"}, ["pp must come last", "--pp 2", "dp is 4", "2 in the expert"]),
    ({"world": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 1, "order": "tp-cp-pp-ep-dp"}, ["pipeline groups", "2 and 1 ranks apart", "pp last"]),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[str(arguments) for arguments, _ in REFUSED])
def test_a_refusal_is_one_line_that_names_flag_value_and_choice(arguments: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Topology.build(**arguments)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 250
    assert [words for words in said if words not in message] == [], message


def test_an_order_in_capitals_is_the_same_order() -> None:
    assert Topology.build(world=8, tp=2, order="TP-CP-EP-DP-PP") == Topology.build(world=8, tp=2)


def test_a_misspelt_degree_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match="vpp"):
        Topology.build(world=8, vpp=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("rank", [-1, 8, 10**9])
def test_no_rank_outside_the_world(rank: int) -> None:
    topology = Topology.build(world=8, tp=2)
    for ask in (topology.coords, topology.expert_coords, topology.blast_radius, lambda r: topology.group_of("tp", r)):
        with pytest.raises(ValueError, match=r"outside 0\.\.7"):
            ask(rank)


def test_no_coordinates_outside_their_degrees() -> None:
    topology = Topology.build(world=8, tp=2)
    with pytest.raises(ValueError, match=r"tp must be within 0\.\.1"):
        topology.rank_of(Coords(tp=2, cp=0, dp=0, pp=0))
    with pytest.raises(ValueError, match=r"edp must be within 0\.\.3"):
        topology.rank_of(ExpertCoords(etp=0, ep=0, edp=-1, pp=0))


@pytest.mark.parametrize("kind", ["", "xp", "tp-ep", "tp-tp", "etp-dp", "tp-", "TP"])
def test_unknown_kinds_of_group(kind: str) -> None:
    topology = Topology.build(world=8, tp=2)
    with pytest.raises(ValueError, match="unknown kind"):
        topology.groups(kind)
    with pytest.raises(ValueError, match="unknown kind"):
        topology.group_of(kind, 0)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ([], "must be an object"),
        (None, "must be an object"),
        ({}, "no 'world'"),
        ({"tp": 3}, "--tp 3"),
        ({"tp": "2"}, "--tp 2"),
        ({"dp": 5}, "dp 5"),
        ({"edp": [4]}, "edp"),
        ({"order": 7}, "--rank-order 7"),
        ({"world": None}, "None ranks"),
    ],
)
def test_from_json_says_what_is_wrong(broken: Any, said: str) -> None:
    value = {**Topology.build(world=8, tp=2).to_json(), **broken} if isinstance(broken, dict) and broken else broken
    with pytest.raises(ValueError, match="topology") as refused:
        Topology.from_json(value)
    assert said in str(refused.value)
