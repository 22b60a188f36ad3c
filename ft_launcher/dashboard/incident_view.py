"""One incident as a person wants it: what was decided and why, and the ranks' stacks put together where they are equal.

Ten thousand ranks that hang have a handful of different stacks. The groups are computed here from the incident's files (`monitors.stacks`), so that they can be had of any run folder,
also one copied elsewhere. Reads only; the number comes from outside and never becomes a path before it is known to be one of the folders that exist.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_launcher.core.topology import Topology
from ft_launcher.dashboard.find import json_object
from ft_launcher.dashboard.moment import culprit_of
from ft_launcher.shell.incident import incident_folders
from ft_launcher.state.reading import read_start
from monitors import stacks
from monitors.attribution_places import place_of

MAX_STACK_BYTES = 256 << 10
MAX_FILES = 20_000
RANKS_SHOWN = 2_000
LINES_SHOWN = 50
GROUPS_SHOWN = 64


def folder_of(run_folder: Path | None, number: int) -> Path | None:
    """The incident's folder, None where there is none of that number."""
    folders = incident_folders(run_folder) if run_folder is not None else []
    return next((one for one in folders if int(one.name) == number), None)


def view(folder: Path, topology: Topology | None) -> dict[str, Any] | None:
    """The incident, None while its summary is not written or cannot be read."""
    summary = json_object(folder / "summary.json")
    if summary is None:
        return None
    ranks = summary.get("ranks") if isinstance(summary.get("ranks"), dict) else {}
    culprit = culprit_of(summary.get("culprit"))
    blamed = culprit["rank"] if culprit is not None else None
    progress = json_object(folder / "progress.json") or {}
    return {
        "name": folder.name,
        **{key: summary.get(key) for key in ("cycle", "cause", "rule", "reason", "decision", "reap_s", "settle_s")},
        "culprit": culprit,
        "world": len(ranks or {}),
        "ranks": _ranks(ranks or {}, progress, blamed),
        "stacks": grouped(_texts(folder / "stacks"), topology, len(ranks or {})),
        "last_lines": _last_lines(folder, blamed),
    }


def grouped(texts: Mapping[int, str], topology: Topology | None, world: int) -> dict[str, Any]:
    """`groups` (largest first), `outliers` (ranks outside the majority) and `missing` (ranks without a stack), each also in words."""
    dumps = {rank: stacks.parse(text) for rank, text in texts.items()}
    mains = {rank: main for rank, threads in dumps.items() if (main := stacks.main_thread(threads)) is not None}
    groups = stacks.group({rank: stacks.names(main) for rank, main in mains.items()})
    odd = stacks.outliers(groups)
    missing = [rank for rank in range(world) if rank not in mains] if mains else []
    shape = topology if topology is not None and topology.world >= max([world, *(r + 1 for r in mains)], default=0) else None
    return {
        "dumped": len(mains),
        "groups": [_group(one, dumps, shape, odd) for one in groups[:GROUPS_SHOWN]],
        "more_groups": max(0, len(groups) - GROUPS_SHOWN),
        "outliers": _said(odd, shape),
        "missing": _said(missing, shape),
    }


def _group(
    group: stacks.StackGroup, dumps: Mapping[int, tuple[stacks.Thread, ...]], shape: Topology | None, odd: tuple[int, ...]
) -> dict[str, Any]:
    first = group.ranks[0]
    main = stacks.main_thread(dumps[first])
    place = place_of(dumps[first], linecache.getline)
    frames = [{"file": f.short, "line": f.line, "function": f.function} for f in (main.frames if main is not None else ())]
    said = {"ranks": list(group.ranks[:RANKS_SHOWN]), "count": len(group.ranks), "said": _said(group.ranks, shape), "example": first}
    return {**said, "outlier": first in odd, "place": place.words() if place is not None else "no main thread", "frames": frames}


def _said(ranks: tuple[int, ...] | list[int], shape: Topology | None) -> str | None:
    return stacks.ranks_text(ranks, shape) if ranks else None


def _texts(folder: Path) -> dict[int, str]:
    """The stacks by rank, from `rank_00003.txt`."""
    texts: dict[int, str] = {}
    try:
        names = sorted(os.listdir(folder))[:MAX_FILES]
    except OSError:
        return texts
    for name in names:
        digits = name.removeprefix("rank_").removesuffix(".txt")
        if name.startswith("rank_") and digits.isascii() and digits.isdigit():
            texts[int(digits)] = _read(folder / name)
    return texts


def _read(path: Path) -> str:
    try:
        return read_start(path, MAX_STACK_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _ranks(ranks: Mapping[str, Any], progress: Mapping[str, Any], blamed: int | None) -> list[dict[str, Any]]:
    """Where each rank was, the culprit first; at most `RANKS_SHOWN` of them."""
    known = [(int(rank), said) for rank, said in ranks.items() if rank.isascii() and rank.isdigit() and isinstance(said, dict)]
    known.sort(key=lambda pair: (pair[0] != blamed, pair[0]))
    rows = []
    for rank, said in known[:RANKS_SHOWN]:
        more = progress.get(str(rank))
        seen = {key: more.get(key) for key in ("state", "place", "steps")} if isinstance(more, dict) else {}
        rows.append({"rank": rank, **{key: said.get(key) for key in ("iteration", "section", "since_s", "exit")}, **seen})
    return rows


def _last_lines(folder: Path, blamed: int | None) -> list[str]:
    if blamed is None:
        return []
    return _read(folder / "last_lines" / f"rank_{blamed:05d}.txt").splitlines()[-LINES_SHOWN:]
