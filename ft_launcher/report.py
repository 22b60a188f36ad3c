"""What a person reads before anything runs: the banner at the start, and the tables of `--dry-run`.

Plain text, aligned, the same in a terminal, a Slurm output file and a bug report: no colour, no terminal width. Tables are elided above
`limit` ranks so that the answer for 2,048 ranks fits a screen or two; what is elided is counted, never silently missing.

This room turns values into text and returns it. It must never print, read configuration, or know how a value came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isinf

from ft_launcher.core.placement import Placement
from ft_launcher.core.topology import KINDS, Topology

ROWS = 64
"""Above this many ranks `dry_run_table` elides."""

_COLUMNS = ("tp", "cp", "dp", "pp")
_EXPERT_COLUMNS = ("etp", "ep", "edp")
_GROUPS_SHOWN = 4
_NODES_SHOWN = 4


def describe(topology: Topology, placement: Placement) -> str:
    """The topology in words: `8 ranks = tp 2 x cp 1 x dp 2 x pp 2 on 2 nodes x 4 slots, order ...; expert view etp 1 x ep 2 x edp 2`.

    ValueError where topology and placement are not of the same world.
    """
    if topology.world != placement.world:
        raise ValueError(f"the topology has {topology.world} ranks, the placement {placement.world}")
    dense = " x ".join(f"{word} {getattr(topology, word)}" for word in _COLUMNS)
    expert = " x ".join(f"{word} {getattr(topology, word)}" for word in _EXPERT_COLUMNS)
    where = f"{_count(len(placement.nodes), 'node')} x {_count(placement.nproc, 'slot')}"
    return f"{_count(topology.world, 'rank')} = {dense} on {where}, order {topology.order}; expert view {expert}"


def banner(
    topology: Topology,
    placement: Placement,
    run_id: str,
    paths: Mapping[str, object],
    timeouts_s: Mapping[str, float | None],
    spares: Sequence[str] = (),
) -> str:
    """The few lines at the start of a run, without a newline at the end.

    `paths` are shown in their order under their names (store, logs, ft_state, ...); `timeouts_s` are seconds by section, None or infinite
    for unlimited. ValueError where topology and placement are not of the same world.
    """
    timeouts = ", ".join(f"{section} {_seconds(seconds)}" for section, seconds in timeouts_s.items())
    facts: dict[str, object] = {"topology": describe(topology, placement), "nodes": nodes_text(placement)}
    if spares:
        facts["spares"] = _elided(spares, _NODES_SHOWN, ", ")
    if warning := _spread_warning(topology, placement):
        facts["note"] = warning
    return "\n".join((f"ft-launch run {_plain(run_id)}", *_pairs({**facts, **paths, "timeouts": timeouts or None})))


def dry_run_table(topology: Topology, placement: Placement, options: Mapping[str, object] | None = None, limit: int = ROWS) -> str:
    """Rank -> coordinates -> node/slot, the groups of each kind, and the effective `options`, without a newline at the end.

    Above `limit` ranks the first and last ranks stand for all; `limit=topology.world` shows everything. ValueError where topology and
    placement are not of the same world.
    """
    sections = [[describe(topology, placement)], _rank_rows(topology, placement, limit), _group_rows(topology, placement, limit)]
    if warning := _spread_warning(topology, placement):
        sections[0].append(f"note: {warning}")
    if options:
        sections.append(["effective options", *_pairs(options)])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _rank_rows(topology: Topology, placement: Placement, limit: int) -> list[str]:
    head, tail = _ends(topology.world, limit)
    rows: list[tuple[str, ...]] = [("rank", *_COLUMNS, *_EXPERT_COLUMNS, "node/slot")]
    rows += [_rank_row(topology, placement, rank) for rank in (*head, *tail)]
    lines = _table(rows, left=8)
    if hidden := topology.world - len(head) - len(tail):
        first, last = head.stop, tail.start - 1
        nodes = f"{_plain(placement.node_of(first))} to {_plain(placement.node_of(last))}"
        lines.insert(1 + len(head), f"... {_count(hidden, 'rank')} not shown: {first} to {last}, on {nodes}")
    return lines


def _rank_row(topology: Topology, placement: Placement, rank: int) -> tuple[str, ...]:
    dense, expert = topology.coords(rank), topology.expert_coords(rank)
    node, slot = placement.place(rank)
    digits = [getattr(dense, word) for word in _COLUMNS] + [getattr(expert, word) for word in _EXPERT_COLUMNS]
    return (str(rank), *map(str, digits), f"{_plain(node)}/{slot}")


def _group_rows(topology: Topology, placement: Placement, limit: int) -> list[str]:
    rows = [("kind", "groups", "size", "nodes", "ranks of each group")]
    for kind in KINDS:
        groups = topology.groups(kind)
        size = len(groups[0])
        shown = len(groups) if topology.world <= limit else _GROUPS_SHOWN
        members = "each rank alone" if size == 1 else _elided([_ranks_text(group) for group in groups], shown, " | ")
        spread = _span([_node_count(placement, group) for group in groups])
        rows.append((kind, str(len(groups)), str(size), spread, members))
    return _table(rows, left=4, also_left=0)


def _spread_warning(topology: Topology, placement: Placement) -> str:
    """A tensor-parallel group is expected to stay inside a node; the words to say where it does not, else none."""
    spread = sum(_node_count(placement, group) > 1 for group in topology.groups("tp"))
    if not spread:
        return ""
    return f"{spread} of {_count(topology.world // topology.tp, 'tp group')} span nodes: tensor-parallel traffic will cross the network"


def _node_count(placement: Placement, ranks: Iterable[int]) -> int:
    return len({rank // placement.nproc for rank in ranks})


def nodes_text(placement: Placement) -> str:
    """Who holds which ranks: `n0: 0-7, n1: 8-15, ... (12 more)`."""
    starts = range(0, placement.world, placement.nproc)
    held = [f"{node}: {_ranks_text(range(first, first + placement.nproc))}" for node, first in zip(placement.nodes, starts, strict=True)]
    permuted = f"; slots permuted on {_elided(list(placement.slots), _NODES_SHOWN, ', ')}" if placement.slots else ""
    return _elided(held, _NODES_SHOWN, ", ") + permuted


def _ranks_text(ranks: Sequence[int]) -> str:
    """`7`, `0-3`, `0 4`, `0-60 by 4`, `0-7 256-263 ... 1792-1799 (64)`: ranks in their order, as short as the pattern allows."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")
    runs = _runs(ranks)
    if len(runs) <= 4:
        return " ".join(runs)
    return f"{runs[0]} {runs[1]} ... {runs[-1]} ({len(ranks)})"


def _runs(ranks: Sequence[int]) -> list[str]:
    """Neighbours joined: 0 1 2 7 8 -> `0-2`, `7-8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _elided(parts: Sequence[str], shown: int, joint: str) -> str:
    """All parts, or where there are more than `shown` the first ones, the count of the others, and the last."""
    if len(parts) <= shown:
        return joint.join(map(_plain, parts))
    head = joint.join(map(_plain, parts[: shown - 1]))
    return f"{head}{joint}... {len(parts) - shown} more{joint}{_plain(parts[-1])}"


def _ends(world: int, limit: int) -> tuple[range, range]:
    """The ranks shown first and last: all, or three quarters of `limit` and one quarter."""
    if world <= limit:
        return range(world), range(world, world)
    limit = max(limit, 0)
    tail = limit // 4
    return range(limit - tail), range(world - tail, world)


def _table(rows: Sequence[tuple[str, ...]], left: int, also_left: int | None = None) -> list[str]:
    """Columns two spaces apart, numbers to the right; columns `left` (the last) and `also_left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(index: int, text: str) -> str:
        return text.ljust(widths[index]) if index in (left, also_left) else text.rjust(widths[index])

    return ["  ".join(cell(index, text) for index, text in enumerate(row)).rstrip() for row in rows]


def _pairs(facts: Mapping[str, object]) -> list[str]:
    width = max(map(len, facts), default=0)
    return [f"  {name.ljust(width)}  {_plain('-' if value is None else str(value))}" for name, value in facts.items()]


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _seconds(seconds: float | None) -> str:
    if seconds is None or isinf(seconds):
        return "unlimited"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _plain(text: str) -> str:
    """One line, whatever a value holds: control characters are shown, not obeyed."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
