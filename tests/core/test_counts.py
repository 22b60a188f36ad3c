"""What the roster counts, against a twin that walks over all reports each time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ft_launcher.core.evidence import NO_CYCLE, Address, NodeInfo, NodeReport, RankExit
from ft_launcher.core.placement import Placement
from ft_launcher.core.roster import Roster
from ft_launcher.core.state import JobState, Options

NODES, NPROC = 5, 2
NAMES = [f"n{i}" for i in range(NODES + 2)]


def a_report(rng: random.Random, name: str, cycle: int, sequence: int) -> NodeReport:
    codes = [rng.choice((0, 1)) for _ in range(rng.randint(0, NPROC))]
    exits = {rank: RankExit(rank, code, None, 0, rank) for rank, code in enumerate(codes)}
    return NodeReport(
        name,
        0,
        cycle,
        sequence,
        started=rng.random() < 0.6,
        exits=exits,
        reaped=rng.random() < 0.6,
        standby=Address(name, 1) if rng.random() < 0.5 else None,
        unfit="broken" if rng.random() < 0.1 else None,
        signals=(15,) if rng.random() < 0.1 else (),
        incarnation=rng.choice("ab"),
    )


def agrees_with_the_twin(roster: Roster, state: JobState) -> None:
    placed = state.placement.nodes if state.placement else ()
    current = [r for n in placed if (r := roster.reports.get(n)) is not None and r.cycle == state.cycle]
    assert roster.current(state) == current
    assert roster.left(state) == sum(len(r.exits) for r in current)
    assert roster.started(state) == (len(current) == len(placed) and all(r.started for r in current))
    assert roster.finished_some(state) == any(e.success for r in current for e in r.exits.values())
    cleared = {r.node_id for r in current if r.reaped}
    assert roster.unacknowledged(state) == [n for n in placed if n not in cleared and n not in state.lost]
    unfit = {r.node_id: r.unfit for r in roster.reports.values() if r.unfit and (r.node_id in roster.nodes or r.node_id in placed)}
    assert roster.holes(state) == unfit | {n: why for n, why in state.lost.items() if n in placed and not roster.ready(n, state)}
    free = {n for n in roster.nodes if n not in placed and roster.ready(n, state)}
    assert {s.node for s in roster.spares(state)} == {n for n in free if not roster.reports[n].signals}


@pytest.mark.parametrize("seed", range(40))
def test_counts_are_what_walking_over_all_reports_gives(seed: int) -> None:
    rng = random.Random(seed)
    roster = Roster(Options(NODES, NPROC, can_join=True))
    state = JobState("r", 0)
    for sequence in range(120):
        what = rng.random()
        if what < 0.15:
            roster.join(NodeInfo(rng.choice(NAMES), "a", NPROC, 0, incarnation=rng.choice("ab")))
        elif what < 0.2:
            roster.leave(rng.choice(NAMES), state)
        elif what < 0.25:
            nodes = tuple(rng.sample(NAMES, NODES))
            state = state.but(cycle=state.cycle + 1, placement=Placement(nodes, NPROC), lost={})
        elif what < 0.3:
            state = state.but(lost={**state.lost, rng.choice(NAMES): "gone"})
        else:
            cycle = rng.choice((NO_CYCLE, state.cycle, state.cycle, state.cycle))
            roster.keep(a_report(rng, rng.choice(NAMES), cycle, sequence), state)
        agrees_with_the_twin(roster, state)


def test_nobody_forms_a_job_before_enough_nodes_are_warm() -> None:
    roster, state = Roster(Options(2, 1, can_join=True)), JobState("r", 0)
    for name in ("a", "b"):
        roster.join(NodeInfo(name, name, 1, 0))
    warm = NodeReport("a", 0, NO_CYCLE, 1, reaped=True, standby=Address("a", 1))
    roster.keep(warm, state)
    roster.keep(replace(warm, node_id="b", unfit="no"), state)
    assert roster.next_placement(state) is None
    roster.keep(replace(warm, node_id="b", sequence=2), state)
    placement = roster.next_placement(state)
    assert placement is not None
    assert placement.nodes == ("a", "b")
    roster.join(NodeInfo("b", "b", 1, 0, incarnation="new"))
    assert roster.next_placement(state) is None, "a new agent has reported nothing yet"
