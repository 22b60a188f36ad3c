"""Banner and dry run: what they say is true of the maps, they stay usable at 2,048 ranks, and the page in docs/ shows what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ft_launcher.core.placement import Placement
from ft_launcher.core.topology import KINDS, Topology
from ft_launcher.report import banner, describe, dry_run_table

SMALL = Topology.build(world=8, tp=2, pp=2, ep=2, etp=1)
TWO_NODES = Placement(("node1", "node2"), 4)
BIG = Topology.build(world=2048, tp=8, pp=8, cp=2, ep=16, etp=1)
MANY_NODES = Placement(tuple(f"node{i:04d}" for i in range(256)), 8)


def table(text: str, first_word: str) -> list[list[str]]:
    """The rows below the heading that starts with `first_word`, split at blanks."""
    section = next(part for part in text.split("\n\n") if part.startswith(first_word))
    return [line.split() for line in section.splitlines()[1:]]


def test_the_sentence() -> None:
    assert describe(SMALL, TWO_NODES) == (
        "8 ranks = tp 2 x cp 1 x dp 2 x pp 2 on 2 nodes x 4 slots, order tp-cp-ep-dp-pp; expert view etp 1 x ep 2 x edp 2"
    )
    assert describe(Topology.build(world=1), Placement(("a",), 1)).startswith("1 rank = tp 1 x cp 1 x dp 1 x pp 1 on 1 node x 1 slot,")


def test_the_page_in_docs_shows_what_is_printed() -> None:
    page = Path(__file__, "../../docs/topology.md").resolve().read_text(encoding="utf-8")
    assert f"```\n{dry_run_table(SMALL, TWO_NODES)}\n```" in page


def test_banner() -> None:
    paths = {"store": "memory", "logs": "ft_logs/r1.0", "ft_state": "ft_logs/ft_state.json"}
    text = banner(SMALL, TWO_NODES, "r1", paths, {"setup": 600, "step": 1_234_567.5, "checkpointing": float("inf"), "x": None}, ["node3"])
    assert text.splitlines() == [
        "ft-launch run r1",
        f"  topology  {describe(SMALL, TWO_NODES)}",
        "  nodes     node1: 0-3, node2: 4-7",
        "  spares    node3",
        "  store     memory",
        "  logs      ft_logs/r1.0",
        "  ft_state  ft_logs/ft_state.json",
        "  timeouts  setup 600 s, step 1234567.5 s, checkpointing unlimited, x unlimited",
    ]


def test_banner_without_the_optional_parts() -> None:
    lines = banner(SMALL, TWO_NODES, "r1", {}, {}).splitlines()
    assert [line.split()[0] for line in lines] == ["ft-launch", "topology", "nodes", "timeouts"]
    assert lines[-1].split() == ["timeouts", "-"]


def test_banner_names_permuted_nodes() -> None:
    assert "; slots permuted on node2" in banner(SMALL, TWO_NODES.rotate("node2"), "r1", {}, {})


def test_every_row_is_true() -> None:
    placement = TWO_NODES.swap_slots("node2", 0, 3)
    rows = table(dry_run_table(SMALL, placement), "rank")
    assert len(rows) == 8
    for rank, row in enumerate(rows):
        dense, expert, (node, slot) = SMALL.coords(rank), SMALL.expert_coords(rank), placement.place(rank)
        digits = (rank, dense.tp, dense.cp, dense.dp, dense.pp, expert.etp, expert.ep, expert.edp)
        assert row == [*map(str, digits), f"{node}/{slot}"]


def ranks_in(cell: str) -> list[int]:
    """The inverse of a group's text, for those written in full."""
    ranks: list[int] = []
    for start, end, step in re.findall(r"(\d+)(?:-(\d+)(?: by (\d+))?)?", cell):
        ranks += range(int(start), int(end or start) + 1, int(step or 1))
    return ranks


@pytest.mark.parametrize(
    ("topology", "placement"),
    [
        (SMALL, TWO_NODES),
        (Topology.build(world=24, tp=2, cp=3, ep=3, etp=2, order="cp-ep-tp-dp-pp"), Placement(("a", "b", "c"), 8)),
        (Topology.build(world=64, tp=4, pp=4, ep=8, etp=2), Placement(tuple(f"n{i}" for i in range(8)), 8)),
    ],
)
def test_every_group_is_there(topology: Topology, placement: Placement) -> None:
    lines = dry_run_table(topology, placement).split("\n\n")[2].splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(KINDS)
    for line in lines:
        kind, count, size, nodes, members = line.split(maxsplit=4)
        groups = topology.groups(kind)
        assert (int(count), int(size)) == (len(groups), len(groups[0]))
        touched = [len({placement.node_of(rank) for rank in group}) for group in groups]
        assert nodes == (str(min(touched)) if min(touched) == max(touched) else f"{min(touched)}-{max(touched)}")
        cells = members.split(" | ")
        if size == "1":
            assert members == "each rank alone"
        else:
            assert len(cells) == len(groups)
        written_in_full = [(cell, group) for cell, group in zip(cells, groups, strict=False) if "..." not in cell and size != "1"]
        assert all(ranks_in(cell) == list(group) for cell, group in written_in_full)


def test_2048_ranks_stay_usable() -> None:
    text = dry_run_table(BIG, MANY_NODES)
    lines = text.splitlines()
    assert len(lines) < 85 and max(map(len, lines)) <= 180
    rows = table(text, "rank")
    shown = [int(row[0]) for row in rows if row[0] != "..."]
    assert shown == [*range(48), *range(2032, 2048)]
    assert "... 1984 ranks not shown: 48 to 2031, on node0006 to node0253" in lines
    assert "0-1792 by 256 | 1-1793 by 256 | 2-1794 by 256 | ... 252 more | 255-2047 by 256" in text
    assert "0-7 256-263 ... 1792-1799 (64) | " in text


def test_a_large_banner_stays_a_banner() -> None:
    text = banner(BIG, MANY_NODES.rotate_all(), "r1", {}, {}, [f"spare{i}" for i in range(30)])
    assert len(text.splitlines()) <= 6 and max(map(len, text.splitlines())) <= 240
    assert "node0000: 0-7, node0001: 8-15, node0002: 16-23, ... 252 more, node0255: 2040-2047" in text
    assert "spare0, spare1, spare2, ... 26 more, spare29" in text


def test_all_of_it_on_demand() -> None:
    rows = table(dry_run_table(BIG, MANY_NODES, limit=2048), "rank")
    assert [int(row[0]) for row in rows] == list(range(2048))


@pytest.mark.parametrize("limit", [64, 63, 7, 1, 0, -5])
def test_shown_and_hidden_add_up(limit: int) -> None:
    topology, placement = Topology.build(world=64, tp=2), Placement(("a",), 64)
    rows = table(dry_run_table(topology, placement, limit=limit), "rank")
    shown = [int(row[0]) for row in rows if row[0] != "..."]
    hidden = sum(int(row[1]) for row in rows if row[0] == "...")
    assert len(shown) + hidden == 64 and len(shown) == max(0, limit) and shown == sorted(set(shown))


def test_a_tensor_parallel_group_across_nodes_is_said() -> None:
    topology, placement = Topology.build(world=8, tp=4), Placement(("a", "b", "c", "d"), 2)
    said = "2 of 2 tp groups span nodes"
    assert said in banner(topology, placement, "r1", {}, {}) and said in dry_run_table(topology, placement)
    assert "span" not in banner(SMALL, TWO_NODES, "r1", {}, {}) + dry_run_table(SMALL, TWO_NODES)


def test_options_are_aligned_and_cannot_break_the_layout() -> None:
    options = {"--tee": "all", "--max-restarts": 3, "--config": None, "--node-label": "a\nb\x1b[31m"}
    lines = dry_run_table(SMALL, TWO_NODES, options).split("\n\n")[-1].splitlines()
    assert lines == [
        "effective options",
        "  --tee           all",
        "  --max-restarts  3",
        "  --config        -",
        "  --node-label    a\\nb\\x1b[31m",
    ]


def test_hostile_node_names_stay_on_their_line() -> None:
    placement = Placement(("a\nb", "c\x1b[2J"), 4)
    for text in (dry_run_table(SMALL, placement), banner(SMALL, placement, "x\ny", {}, {}, ["d\re"])):
        assert all(char.isprintable() or char == "\n" for char in text)
    assert len(dry_run_table(SMALL, placement).splitlines()) == len(dry_run_table(SMALL, TWO_NODES).splitlines())


def test_maps_of_different_worlds_are_refused() -> None:
    for show in (describe, dry_run_table, lambda t, p: banner(t, p, "r", {}, {})):
        with pytest.raises(ValueError, match="the topology has 8 ranks, the placement 6"):
            show(SMALL, Placement(("a", "b"), 3))
