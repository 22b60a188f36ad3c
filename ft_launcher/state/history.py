"""What is never lost: the rules by which a document about to be written meets the one that lies on disk. Pure.

Who writes has usually read the file first. But a disk may not have answered then, two controllers may have taken turns, another run may
have used the file: so each save is a merge. The newer statement wins key by key, histories are united, and applying the rules twice
changes nothing.
"""

from __future__ import annotations

from typing import Any

from ft_launcher.state import nvrx
from ft_launcher.state.document import KEEP_RUNS, OWN_KEYS, Document, empty, number_of, summary_of_run, trimmed


def fence(document: Document) -> tuple[int, int, int]:
    """(generation, cycle, store revision or -1): of two documents of one run id, the lower is the older and never replaces the higher."""
    run = document["run"] or {}
    generation, cycle, revision = (_count_or_minus_one(run.get(key)) for key in ("generation", "cycle", "revision"))
    return generation, cycle, revision


def is_older(document: Document, disk: Document) -> bool:
    """Whether `document` is of the same run id as `disk` and older: by generation and cycle, and by revision where both know one."""
    if run_id(document) is None or run_id(document) != run_id(disk):
        return False
    mine, theirs = fence(document), fence(disk)
    if mine[2] < 0 or theirs[2] < 0:
        return mine[:2] < theirs[:2]
    return mine < theirs


def run_id(document: Document) -> str | None:
    """The run id of the document, None where it has no run."""
    run = document.get("run")
    return run.get("id") if isinstance(run, dict) and isinstance(run.get("id"), str) else None


def united(document: Document, disk: Document) -> Document:
    """`document` plus what only `disk` knows: cycles of the same run, devices, sections, earlier runs, and top-level keys of a later
    launcher.
    """
    merged = {**{key: value for key, value in disk.items() if key not in document}, **document}
    for key in ("hardware", "sections"):
        merged[key] = {**{name: value for name, value in disk[key].items() if name not in document[key]}, **document[key]}
    earlier = {**disk["earlier_runs"], **document["earlier_runs"]}
    theirs = run_id(disk)
    if theirs is not None and theirs != run_id(document):
        earlier[theirs] = summary_of_run(disk)
    earlier.pop(run_id(document) or "", None)
    merged["earlier_runs"] = dict(list(earlier.items())[-KEEP_RUNS:])
    return _with_cycles_of(merged, disk) if theirs == run_id(document) else merged


def _with_cycles_of(document: Document, disk: Document) -> Document:
    dropped = max(document["dropped"], disk["dropped"], key=lambda one: tuple(one["through"] or (-1, -1)))
    through = tuple(dropped["through"] or (-1, -1))
    cycles = {number_of(cycle): cycle for cycle in disk["cycles"]}
    cycles |= {number_of(cycle): _fuller(cycle, cycles.get(number_of(cycle))) for cycle in document["cycles"]}
    kept = [cycles[number] for number in sorted(cycles) if number > through]
    return trimmed({**document, "cycles": kept, "dropped": dropped})


def _fuller(cycle: dict[str, Any], disk: dict[str, Any] | None) -> dict[str, Any]:
    """Ours, unless the one on disk tells of the end of what ours still sees running: a former controller's last word came after we had read."""
    if disk is None or cycle.get("end") is not None or disk.get("end") is None:
        return cycle
    ends_later = isinstance(disk["end"], str) and isinstance(cycle.get("start"), str) and disk["end"] > cycle["start"]
    return disk if ends_later else cycle


def repaired(raw: dict[str, Any]) -> tuple[Document, list[str]]:
    """A document whose every own key has the shape that the launcher relies on, and one line for each that had not (and was emptied or
    thinned out).
    """
    notes: list[str] = []
    document = {**empty(), **raw}
    found = nvrx.trouble_in(document["current_timeouts"])
    if found:
        document["current_timeouts"] = {}
        notes.append(f"{found}: ignored")
    for key in ("sections", "hardware", "budgets", "earlier_runs"):
        document[key] = _objects_in(key, document[key], notes)
    for entry in document["sections"].values():
        entry["history"] = [
            change for change in _list_in(entry, "history") if isinstance(change, dict) and isinstance(change.get("at"), str)
        ]
    for entry in document["hardware"].values():
        entry["verdicts"] = [verdict for verdict in _list_in(entry, "verdicts") if isinstance(verdict, dict)]
    document["cycles"] = _cycles_in(document["cycles"], notes)
    document["dropped"] = _dropped_in(document["dropped"], notes)
    if not isinstance(document["run"], dict | None) or (document["run"] is not None and run_id(document) is None):
        document["run"] = None
        notes.append("run is not an object with an id: ignored")
    return document, notes


def has_own_keys(raw: dict[str, Any]) -> bool:
    """Whether the object carries our keys, that is: it was written by us and not rewritten by somebody since."""
    return all(key in raw for key in OWN_KEYS)


def _objects_in(key: str, value: object, notes: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        notes.append(f"{key} is not an object: ignored")
        return {}
    good = {name: dict(entry) for name, entry in value.items() if isinstance(entry, dict)}
    if len(good) < len(value):
        notes.append(f"{key}: {len(value) - len(good)} entries are not objects: ignored")
    return good


def _list_in(entry: dict[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    return value if isinstance(value, list) else []


def _cycles_in(value: object, notes: list[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        notes.append("cycles is not a list: ignored")
        return []
    good = [one for one in value if isinstance(one, dict) and _is_count(one.get("n")) and _is_count(one.get("generation"))]
    if len(good) < len(value):
        notes.append(f"cycles: {len(value) - len(good)} entries have no number and generation: ignored")
    return sorted(good, key=lambda one: (one["generation"], one["n"]))


def _dropped_in(value: object, notes: list[str]) -> dict[str, Any]:
    through = value.get("through") if isinstance(value, dict) else 0
    pair = isinstance(through, list) and len(through) == 2 and all(_is_count(number) for number in through)
    if isinstance(value, dict) and _is_count(value.get("cycles")) and (through is None or pair):
        return value
    notes.append("dropped is not an object of cycles and through: ignored")
    return {"cycles": 0, "through": None}


def _count_or_minus_one(value: object) -> int:
    return value if isinstance(value, int) and _is_count(value) else -1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
