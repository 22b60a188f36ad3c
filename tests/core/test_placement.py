"""The placement against a deliberately dumb twin (a dict of rank -> (node, slot)), its bounds in size, and the choice of a spare."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.core.placement import Placement, Spare, choose_spare, moved, order_nodes

Twin = dict[int, tuple[str, int]]


def twin_of(nodes: list[str], nproc: int) -> Twin:
    return {i * nproc + slot: (node, slot) for i, node in enumerate(nodes) for slot in range(nproc)}


def twin_change(twin: Twin, nproc: int, change: tuple[Any, ...]) -> Twin:
    """What a change means, said rank by rank."""
    match change:
        case ("replace", lost, spare):
            return {rank: (spare, rank % nproc) if node == lost else (node, slot) for rank, (node, slot) in twin.items()}
        case ("swap", on, a, b):
            to = {a: b, b: a}
            return {rank: (node, to.get(slot, slot)) if node == on else (node, slot) for rank, (node, slot) in twin.items()}
        case ("rotate", on):
            return {rank: (node, (slot + 1) % nproc) if on in (node, None) else (node, slot) for rank, (node, slot) in twin.items()}
    raise AssertionError(change)


def apply(placement: Placement, change: tuple[Any, ...]) -> Placement:
    match change:
        case ("replace", lost, spare):
            return placement.replace(lost, spare)
        case ("swap", on, a, b):
            return placement.swap_slots(on, a, b)
        case ("rotate", None):
            return placement.rotate_all()
        case ("rotate", on):
            return placement.rotate(on)
    raise AssertionError(change)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Placement, Twin]:
    """A placement after up to 8 changes, with its twin."""
    nproc = draw(st.integers(1, 5))
    nodes = [f"node{i}" for i in range(draw(st.integers(1, 5)))]
    placement, twin = Placement(tuple(nodes), nproc), twin_of(nodes, nproc)
    for step in range(draw(st.integers(0, 8))):
        node, slot = draw(st.sampled_from(placement.nodes)), st.integers(0, nproc - 1)
        change = draw(
            st.sampled_from([("replace", node, f"spare{step}"), ("swap", node, draw(slot), draw(slot)), ("rotate", node), ("rotate", None)])
        )
        placement, twin = apply(placement, change), twin_change(twin, nproc, change)
    return placement, twin


@given(histories())
def test_agrees_with_the_dumb_twin_after_any_history(history: tuple[Placement, Twin]) -> None:
    placement, twin = history
    placement.validate()
    assert {rank: placement.place(rank) for rank in range(placement.world)} == twin
    for rank, (node, slot) in twin.items():
        assert (placement.node_of(rank), placement.slot_of(rank), placement.rank_at(node, slot)) == (node, slot, rank)
        assert placement.position_of(node) == rank // placement.nproc
    for node in placement.nodes:
        assert placement.ranks_on(node) == tuple(sorted((r for r, place in twin.items() if place[0] == node), key=lambda r: twin[r][1]))


@given(histories())
def test_round_trips(history: tuple[Placement, Twin]) -> None:
    placement, _ = history
    back = Placement.from_json(json.loads(json.dumps(placement.to_json())))
    assert back == placement == pickle.loads(pickle.dumps(placement)) == copy.deepcopy(placement)
    assert hash(back) == hash(placement)
    assert tuple(range(placement.nproc)) not in placement.slots.values(), "the identity is never written"


@given(histories(), st.data())
def test_a_spare_takes_exactly_the_hole(history: tuple[Placement, Twin], data: st.DataObject) -> None:
    before, _ = history
    lost = data.draw(st.sampled_from(before.nodes))
    after = before.replace(lost, "fresh")
    after.validate()
    assert moved(before, after) == tuple(sorted(before.ranks_on(lost)))
    assert after.ranks_on("fresh") == tuple(sorted(before.ranks_on(lost))), "slot order, whatever the lost node's permutation was"
    assert "fresh" not in after.slots and lost not in after.nodes


@given(histories())
def test_full_turns_come_home(history: tuple[Placement, Twin]) -> None:
    before, _ = history
    turned = before
    for _ in range(before.nproc):
        turned = turned.rotate_all()
    assert turned == before
    expected = () if before.nproc == 1 else tuple(range(before.world))
    assert moved(before, before.rotate_all()) == expected


@given(histories(), st.data())
def test_moving_one_rank_inside_its_node(history: tuple[Placement, Twin], data: st.DataObject) -> None:
    before, _ = history
    rank = data.draw(st.integers(0, before.world - 1))
    avoid = data.draw(st.frozensets(st.integers(0, before.nproc - 1)))
    node, slot = before.place(rank)
    after = before.move_to_other_slot(node, rank, avoid)
    if after is None:
        assert set(range(before.nproc)) - avoid <= {slot}
        return
    after.validate()
    changed = moved(before, after)
    assert rank in changed and len(changed) == 2 and {after.node_of(r) for r in changed} == {node}
    assert after.node_of(rank) == node and after.slot_of(rank) not in avoid | {slot}
    partner = next(r for r in changed if r != rank)
    assert after.slot_of(partner) == slot


def away_from_home(placement: Placement) -> int:
    return sum(placement.slot_of(rank) != rank % placement.nproc for rank in range(placement.world))


@given(histories(), st.data())
def test_the_move_disturbs_least(history: tuple[Placement, Twin], data: st.DataObject) -> None:
    """No other allowed swap leaves fewer ranks away from home."""
    before, _ = history
    rank = data.draw(st.integers(0, before.world - 1))
    avoid = data.draw(st.frozensets(st.integers(0, before.nproc - 1), max_size=2))
    node, slot = before.place(rank)
    after = before.move_to_other_slot(node, rank, avoid)
    others = [before.swap_slots(node, slot, other) for other in range(before.nproc) if other != slot and other not in avoid]
    assert (after is None) == (not others)
    if after is not None:
        assert away_from_home(after) == min(map(away_from_home, others))


def test_moves_by_hand() -> None:
    """The neighbour first; then, that device being suspect too, the next; home again where home is allowed; nothing left: None."""
    start = Placement(("a", "b"), 4)
    first = start.move_to_other_slot("a", 1, {1})
    assert first is not None and first.ranks_on("a") == (1, 0, 2, 3)
    second = first.move_to_other_slot("a", 1, {0, 1})
    assert second is not None and second.slot_of(1) == 2
    assert first.move_to_other_slot("a", 1) == start
    assert start.move_to_other_slot("b", 7, {0, 1, 2}) is None
    assert Placement(("a",), 1).move_to_other_slot("a", 0) is None
    nearest = Placement(("a",), 8).move_to_other_slot("a", 5, {4})
    assert nearest is not None and nearest.slot_of(5) == 6


def test_positions_by_hand() -> None:
    placement = Placement(("a", "b", "c"), 2).swap_slots("b", 0, 1).replace("a", "z")
    assert [placement.place(rank) for rank in range(6)] == [("z", 0), ("z", 1), ("b", 1), ("b", 0), ("c", 0), ("c", 1)]
    assert dict(placement.slots) == {"b": (1, 0)}
    assert placement.swap_slots("b", 1, 1) == placement
    assert placement.rotate("b").slots == {}


def test_a_lost_node_forgets_its_permutation_even_when_it_returns() -> None:
    placement = Placement(("a", "b"), 2).rotate("a").replace("a", "z").replace("b", "a")
    assert placement.nodes == ("z", "a") and placement.slots == {}


@pytest.mark.parametrize(
    ("name", "broken"),
    [("slots", {"a": (0, 0)}), ("slots", {"b": (1, 2)}), ("nodes", ("a", "a")), ("_position", {"a": 1, "b": 0}), ("nproc", 3)],
)
def test_validate_finds_what_should_be_impossible(name: str, broken: object) -> None:
    """The simulator's invariant must be able to fail: a placement broken behind the constructor's back."""
    placement = Placement(("a", "b"), 2).rotate("a")
    object.__setattr__(placement, name, broken)
    with pytest.raises(ValueError, match=r"holds|twice|zip|outside|argument"):
        placement.validate()


def test_a_damaged_size_is_refused_before_it_costs_memory() -> None:
    """A flipped digit in stored JSON must not make the reader build a billion-entry permutation."""
    with pytest.raises(ValueError, match="no permutation"):
        Placement.from_json({"nodes": ["a"], "nproc": 10**15, "slots": {"a": [1, 0]}})


def test_immutable_to_the_last() -> None:
    given_slots = {"a": (1, 0)}
    placement = Placement(("a",), 2, given_slots)
    given_slots["a"] = (0, 1)
    assert placement.slot_of(0) == 1
    with pytest.raises(TypeError):
        placement.slots["a"] = (0, 1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        placement.nproc = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "must be an object, is list"),
        ({"nodes": ["a"]}, "nproc must be a whole number"),
        ({"nodes": ["a"], "nproc": 0}, "at least 1, is 0"),
        ({"nodes": ["a"], "nproc": True}, "is True"),
        ({"nodes": ["a"], "nproc": "2"}, "is '2'"),
        ({"nodes": [], "nproc": 2}, "at least one node"),
        ({"nodes": "ab", "nproc": 2}, "list of names"),
        ({"nodes": ["a", 3], "nproc": 2}, "list of names"),
        ({"nodes": ["a", "b", "a"], "nproc": 2}, "'a' is named twice"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"b": [1, 0]}}, "slots of 'b': no such node"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": [1, 1]}}, "[1, 1] is no permutation of 0..1"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": [0]}}, "no permutation"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": [1, 2]}}, "no permutation"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": [True, False]}}, "whole numbers"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": [1.0, 0]}}, "whole numbers"),
        ({"nodes": ["a"], "nproc": 2, "slots": {"a": "10"}}, "whole numbers"),
        ({"nodes": ["a"], "nproc": 2, "slots": [1, 0]}, "slots must be an object"),
        ({"nodes": ["a"], "nproc": 2, "slots": None}, "slots must be an object"),
    ],
)
def test_from_json_says_what_is_wrong(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match="placement") as refused:
        Placement.from_json(value)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_questions_that_have_no_answer() -> None:
    placement = Placement(("a", "b"), 2)
    for ask in (
        lambda: placement.place(4),
        lambda: placement.node_of(-1),
        lambda: placement.rank_at("c", 0),
        lambda: placement.rank_at("a", 2),
        lambda: placement.rank_at("a", -1),
        lambda: placement.ranks_on("c"),
        lambda: placement.replace("c", "d"),
        lambda: placement.replace("a", "b"),
        lambda: placement.replace("a", "a"),
        lambda: placement.swap_slots("a", 0, 2),
        lambda: placement.swap_slots("c", 0, 1),
        lambda: placement.rotate("c"),
        lambda: placement.move_to_other_slot("b", 0),
        lambda: moved(placement, Placement(("a",), 4)),
    ):
        with pytest.raises(ValueError, match=r"outside|holds no ranks|already holds|is on 'a', not|cannot be compared"):
            ask()


@pytest.mark.parametrize(("nproc", "name_length"), [(4, 40), (8, 63), (16, 63)])
def test_ten_thousand_ranks_all_permuted_fit_into_the_store(nproc: int, name_length: int) -> None:
    """The worst case, every node rotated, within the 256 KiB of the job key, and shapes of up to 2,500 nodes."""
    nodes = tuple(f"{'n' * (name_length - 5)}{i:05d}" for i in range(10_000 // nproc))
    placement = Placement(nodes, nproc).rotate_all()
    text = json.dumps(placement.to_json())
    assert len(text.encode()) <= 256 * 1024
    assert Placement.from_json(json.loads(text)) == placement
    assert len(json.dumps(Placement(nodes, nproc).to_json())) < len(text) / 1.5
    assert moved(placement, placement.replace(nodes[7], "spare")) == tuple(range(7 * nproc, 8 * nproc))


class TestOrderNodes:
    def test_slurm_decides_where_every_node_has_it(self) -> None:
        assert order_nodes([("b", 1), ("c", 0), ("a", 10), ("d", 2)]) == ("c", "b", "d", "a")

    def test_one_without_it_and_names_decide(self) -> None:
        assert order_nodes([("node10", 0), ("node2", 1), ("node1", None)]) == ("node1", "node2", "node10")

    @pytest.mark.parametrize(
        "ordered",
        [
            ("node2", "node10"),
            ("r1n9", "r1n10", "r2n1", "r10n1"),
            ("node", "node1"),
            ("1", "2", "10", "a"),
            ("a-1.x", "a-1.y", "a-2.x"),
            ("node01", "node1", "node2"),
            ("n" + "9" * 5000, "n1" + "0" * 5000),
            ("gpu²", "gpu³"),
        ],
    )
    def test_natural_sort(self, ordered: tuple[str, ...]) -> None:
        shuffled = list(ordered)
        for seed in range(4):
            random.Random(seed).shuffle(shuffled)
            assert order_nodes([(node, None) for node in shuffled]) == ordered

    def test_equal_slurm_ids_fall_back_to_names(self) -> None:
        assert order_nodes([("n10", 0), ("n2", 0)]) == ("n2", "n10")

    def test_none(self) -> None:
        assert order_nodes([]) == ()

    @given(st.dictionaries(st.text("a-.0129", max_size=6), st.none() | st.integers(0, 3), max_size=6), st.data())
    def test_any_ids_in_any_arrival_order_give_one_order(self, nodes: dict[str, int | None], data: st.DataObject) -> None:
        assert order_nodes(nodes.items()) == order_nodes(data.draw(st.permutations(list(nodes.items()))))


class TestChooseSpare:
    LOST: Mapping[str, str] = {"rack": "a", "pod": "1"}

    def test_none_left(self) -> None:
        assert choose_spare(self.LOST, []) == (None, "there is no spare")

    def test_most_labels_in_common(self) -> None:
        choice = choose_spare(self.LOST, [Spare("n1", {"rack": "b", "pod": "1"}), Spare("n9", {"rack": "a", "pod": "1", "x": "y"})])
        assert choice.node == "n9" and "2 of the lost node's 2 labels" in choice.reason and "of 2 spares" in choice.reason

    def test_a_failed_node_is_the_last_resort_even_in_the_right_rack(self) -> None:
        spares = [Spare("n1", self.LOST, failed_before=True), Spare("n2", {"rack": "b"})]
        assert choose_spare(self.LOST, spares).node == "n2"
        last = choose_spare(self.LOST, spares[:1])
        assert last.node == "n1" and "last resort" in last.reason

    def test_then_the_natural_order(self) -> None:
        assert choose_spare({}, [Spare("n10"), Spare("n2")]).node == "n2"

    def test_quarantined_slots_cannot_take_the_hole(self) -> None:
        bad = Spare("n1", self.LOST, quarantined_slots=frozenset({3, 1}))
        choice = choose_spare(self.LOST, [bad, Spare("n2")])
        assert choice.node == "n2" and "n1 passed over, its slots [1, 3] are quarantined" in choice.reason
        none, reason = choose_spare(self.LOST, [bad])
        assert none is None and "none of 1 spares" in reason and "[1, 3]" in reason

    @given(st.permutations([Spare("n1", {"rack": "a"}), Spare("n2", LOST), Spare("n3", LOST, True), Spare("n4", LOST)]))
    def test_the_order_of_arrival_does_not_matter(self, spares: list[Spare]) -> None:
        assert choose_spare(self.LOST, spares).node == "n2"
