"""`/api/state`: the document and what is derived from it, as one JSON text that a page can draw without knowing the launcher.

Ranks travel as one letter each and coordinates as size and stride of each axis, so that 10,000 ranks are some ten kilobytes. The text depends on the files alone, not on the clock:
its hash is its ETag, and who asks again while nothing happened is told so without a body.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ft_launcher.core.topology import Coords, Topology
from ft_launcher.dashboard.moment import MAX_WORLD, STATES, world_of
from ft_launcher.dashboard.source import Snapshot
from ft_launcher.errors import ConfigError
from ft_launcher.state.document import Document, empty

FINDINGS_SHOWN = 50
_HIDDEN = ("learning",)
"""Keys of the document that are the launcher's own memory, not for people."""


def state(snapshot: Snapshot) -> dict[str, Any]:
    """The document plus `derived`."""
    document = snapshot.document or empty()
    shown = {key: value for key, value in document.items() if key not in _HIDDEN}
    return {**shown, "derived": _derived(snapshot, document)}


def body(snapshot: Snapshot) -> tuple[bytes, str]:
    """The JSON text and its ETag (quoted)."""
    data = json.dumps(state(snapshot), allow_nan=False, separators=(",", ":"), default=str).encode("ascii")
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def _derived(snapshot: Snapshot, document: Document) -> dict[str, Any]:
    moment, latest = snapshot.moment, snapshot.latest
    return {
        "up": snapshot.up,
        "known": snapshot.document is not None,
        "notes": list(snapshot.notes),
        "path": str(snapshot.path),
        "run_folder": str(snapshot.run_folder) if snapshot.run_folder is not None else None,
        **asdict(moment),
        "world": world_of(document),
        "axes": axes(document),
        "placement": _placement(snapshot.placement),
        "states": snapshot.states,
        "state_names": STATES,
        "counts": counts(snapshot.states),
        "latest": {**asdict(latest), "incident": incident_of_cycle(snapshot, latest.cycle)} if latest is not None else None,
        "standing": _standing(snapshot),
        "incidents": [_incident_row(name, summary) for name, summary in snapshot.incidents],
        "incident_count": snapshot.incident_count,
        "verdict": dict(snapshot.verdict) if snapshot.verdict is not None else None,
        "losses": asdict(snapshot.losses),
    }


def counts(states: str) -> dict[str, int]:
    """How many ranks are in each state that occurs, by its name."""
    found = Counter(states)
    return {name: found[letter] for letter, name in STATES.items() if found[letter]}


def axes(document: Document) -> list[dict[str, Any]] | None:
    """Name, size and stride in ranks of tp, cp, dp, pp; None where the file's topology is none."""
    built = topology_of(document)
    if built is None:
        return None
    names = ("tp", "cp", "dp", "pp")
    sizes = {name: int(getattr(built, name)) for name in names}
    strides = {name: built.rank_of(Coords(**{**dict.fromkeys(names, 0), name: 1})) if sizes[name] > 1 else 1 for name in names}
    return [{"name": name, "size": sizes[name], "stride": strides[name]} for name in names]


def topology_of(document: Document) -> Topology | None:
    """The run's topology, None where the file has none that could exist."""
    run = document["run"] or {}
    said, world = run.get("topology"), run.get("world_size")
    if not isinstance(said, dict) or not isinstance(world, int) or not 0 < world <= MAX_WORLD:
        return None
    try:
        degrees = {name: said[name] for name in ("tp", "pp", "cp", "ep", "etp", "order") if name in said}
        return Topology.build(world=world, **degrees)
    except (ConfigError, TypeError, ValueError):
        return None


def incident_of_cycle(snapshot: Snapshot, cycle: int) -> str | None:
    """The folder name of the newest incident of a cycle, once it is written."""
    return next((name for name, summary in reversed(snapshot.incidents) if summary.get("cycle") == cycle), None)


def _placement(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None or not isinstance(value.get("nodes"), list):
        return None
    return {"nodes": value["nodes"], "nproc": value.get("nproc"), "slots": value.get("slots") or {}}


def _standing(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Ranks that stand still: the culprit, those past their limit, the others."""
    blamed = snapshot.latest.culprit["rank"] if snapshot.latest is not None and snapshot.latest.culprit is not None else None
    found = sorted(snapshot.findings.items(), key=lambda pair: (pair[0] != blamed, pair[1].kind != "hung", -pair[1].since_s, pair[0]))
    return [{"rank": rank, "seen": snapshot.seen.get(rank), **asdict(one)} for rank, one in found[:FINDINGS_SHOWN] if one.kind != "silent"]


def _incident_row(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **{key: summary.get(key) for key in ("cycle", "cause", "reason", "decision", "culprit")}}
