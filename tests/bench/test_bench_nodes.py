"""Several nodes and many agents: who plays which role, who is said to decide, what is promised of which figure. Without any launcher."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nodes
import pytest
import store
from _common import light
from _common.contestants import FT, NVRX, TORCHRUN
from _common.etcd import Seen
from _common.figures import Options, Results
from _common.fleet import Fleet
from _common.processes import BenchError

from ft_launcher.core.state import JobState, Phase
from ft_launcher.shell.store import Change, Entry

LEADER, JOB = "/ft/v1/bench/leader", "/ft/v1/bench/job"


def _options(runs: int, *contestants: str, quick: bool = False) -> Options:
    return Options(runs, quick, None, contestants, strict=False)


def _fleet(tmp_path: Path, *history: tuple[int, str, str | None]) -> Fleet:
    """A fleet that has started nothing; `history`: (nanoseconds, key, controller's node or None for gone)."""
    fleet = Fleet(FT, tmp_path)
    seen = [
        Seen(Change(key, Entry(key, json.dumps({"node": node}), n, n) if node else None, n), at)
        for n, (at, key, node) in enumerate(history)
    ]
    fleet.watch = SimpleNamespace(history=seen)  # type: ignore[assignment]
    return fleet


def test_a_controller_decides_when_it_writes_not_when_it_is_elected(tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, (10, LEADER, "s1"), (11, JOB, "-"), (20, LEADER, None), (30, LEADER, "n0"), (34, JOB, "-"), (40, JOB, "-"))
    assert fleet.deciding_since(12, but="s1") == 34


def test_what_the_lost_controller_still_wrote_is_not_its_successors(tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, (10, LEADER, "s1"), (13, JOB, "-"), (20, LEADER, None), (21, JOB, "-"), (30, LEADER, "n0"))
    assert fleet.deciding_since(12, but="s1") is None


def test_a_successor_that_loses_the_office_again_before_writing_does_not_count(tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, (20, LEADER, "n0"), (25, LEADER, None), (26, JOB, "-"), (30, LEADER, "n1"), (37, JOB, "-"))
    assert fleet.deciding_since(12, but="s1") == 37


def _roles(controller: str, contestant: str = FT) -> Any:
    return SimpleNamespace(contestant=contestant, holders=lambda: ["a", "b"], controller=lambda: controller, ttl_s=3.0)


@pytest.mark.parametrize(("controller", "plain"), [("a", "b"), ("b", "a"), ("s1", "b")])
def test_a_plain_node_holds_ranks_and_not_the_office(controller: str, plain: str) -> None:
    assert nodes.in_role(_roles(controller), nodes.PLAIN) == plain
    assert nodes.in_role(_roles(controller), nodes.CONTROLLER) == controller


def test_the_node_of_rank_0_is_measured_only_where_it_is_not_the_controllers(tmp_path: Path) -> None:
    assert nodes.in_role(_roles("b"), nodes.RANK0) == "a"
    with pytest.raises(BenchError):
        nodes.in_role(_roles("a"), nodes.RANK0)


def test_every_limit_follows_from_the_figures_name() -> None:
    results = Results("nodes")
    values = {
        nodes.name_of(_roles("a"), nodes.PLAIN, silent=True): (5.9, 6.0),
        nodes.name_of(_roles("a"), nodes.PLAIN, silent=False): (2.9, 3.1),
        f"{FT}: controller silent, TTL 10 {nodes.DECIDING}": (12.1, 12.0),
        f"{FT}: controller killed {nodes.DECIDING}": (1.9, 2.0),
        f"{FT}: {nodes.FORKED}": (0.21, 0.2),
        nodes.name_of(_roles("a", TORCHRUN), nodes.PLAIN, silent=False): (20.0, 3.0),
    }
    nodes.judge(results, {name: results.add(name, "s", [value]) for name, (value, _) in values.items()})
    limits = {check.name: (check.limit, check.passed) for check in results.checks}
    assert [limit for limit, _ in limits.values()] == pytest.approx([0.2, 6.0, 3.0, 12.0, 2.0])
    assert [passed for _, passed in limits.values()] == [False, True, True, False, True]
    assert any(TORCHRUN in note and "0.145" in note for note in results.notes)  # 2.9 / 20


def test_one_touched_rank_among_many_losses_is_a_miss() -> None:
    results = Results("nodes")
    name = f"{FT}: {nodes.TOUCHED}"
    nodes.judge(results, {name: results.add(name, "", [0.0, 0.0, 0.0, 1.0, 0.0])})
    assert [check.passed for check in results.checks] == [False]


def test_figures_can_be_told_apart_in_the_table() -> None:
    names = {
        nodes.name_of(SimpleNamespace(contestant=who, ttl_s=ttl), role, silent)[:52]  # type: ignore[arg-type]
        for who in (FT, TORCHRUN) for role in (nodes.PLAIN, nodes.RANK0, nodes.CONTROLLER) for silent in (False, True) for ttl in (3.0, 10.0)
    }  # fmt: skip
    assert len(names) == 3 * 3 + 3 * 2  # only ours has a TTL, and only a silent host depends on it


def test_contestants_alternate_and_ours_meets_every_role() -> None:
    turns = [(turn.contestant, turn.scene.__name__, turn.number) for turn in nodes.turns(_options(4, FT, TORCHRUN, NVRX))]
    names = [name for name, _, _ in turns]
    assert names.index(TORCHRUN) < len(names) - 1 - names[::-1].index(FT)
    assert {number % 2 for name, scene, number in turns if scene == "crashes_and_kills"} == {0, 1}
    assert names.count(TORCHRUN) == names.count(NVRX) == nodes.OTHERS_TURNS
    assert [(turn.contestant, turn.scene.__name__) for turn in nodes.turns(_options(1, FT, quick=True))] == [(FT, "look")]


def test_all_agents_must_have_seen_a_cycle_and_the_last_one_decides() -> None:
    sight = light.Sight(2)
    sight.seen[(Phase.RUNNING, 1)] = {0: 50}
    assert sight.all_saw(Phase.RUNNING, 1) is None
    sight.seen[(Phase.RUNNING, 1)][1] = 70
    assert (sight.all_saw(Phase.RUNNING, 1), sight.first_saw(Phase.RUNNING, 1)) == (70, 50)


def test_a_job_state_is_parsed_once_a_revision() -> None:
    sight = light.Sight(2)

    def change(revision: int, cycle: int) -> Change:
        return Change(JOB, Entry(JOB, json.dumps(JobState("scale", 0, cycle=cycle).to_json()), 1, revision), revision)

    first = sight.parse(change(5, 0))
    assert sight.parse(change(5, 0)) is first
    assert sight.parse(change(6, 1)).cycle == 1


def test_the_bystander_tells_only_of_the_restart(tmp_path: Path) -> None:
    pings = tmp_path / "pings"
    pings.write_text("1000000000 9.0\n5000000000 0.02\n5900000000 0.3\n8000000000 7.0\n9000")
    restart = store.Restart(0.1, 0.2, 1.0, 5_000_000_000, 0.0, 0.0)
    assert store.slowest_ping_s(pings, restart) == 0.3


def test_more_nodes_are_more_and_larger_messages() -> None:
    results = Results("store")
    values = {"per node": (200.0, 200.0), "sent": (10.0, 40.0), "restart": (0.5, 1.0)}
    smaller, larger = ({key: results.add(f"{size} {key}", "", [pair[size]]) for key, pair in values.items()} for size in (0, 1))
    store.extrapolate(results, smaller, larger, (500, 1000))
    steady, sent, cpu = results.notes
    assert "40 % of a core" in steady and "160 MB" in sent and "x4.00" in sent
    assert "2.0 s if linear, 4.0 s if squared" in cpu
