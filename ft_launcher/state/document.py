"""The ft_state document: what it holds and how it changes. Pure: plain dicts in, new dicts out, no clock, no file.

A document that was handed to the writer thread is never changed afterwards: every function copies what it changes. Times are ISO 8601
texts in UTC given by the caller, durations seconds, devices are "node/slot". The size is bounded whatever happens: the newest cycles in
full and the older ones counted, long texts cut, histories short. `docs/ft_state.schema.json` describes the result; `docs/ft-state.md`
explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from ft_launcher.state import nvrx

SCHEMA = "ft-state/1"
OUT_OF_SECTION = "out-of-section"
KEEP_CYCLES = 200
KEEP_CHANGES = 20
KEEP_RUNS = 50
KEEP_DEVICES = 4096
KEEP_VERDICTS = 20
KEEP_SECTIONS = 256
TEXT_MAX_CHARS = 2000
STATED_EVERY_S = 15.0
"""A run that is not over states its position at least this often, also where nothing changes."""
OWN_KEYS = ("schema", "run", "sections", "cycles", "dropped", "earlier_runs", "hardware", "budgets")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What does not change within one generation. `topology` maps tp, pp, cp, dp, ep, etp to degrees, and `order` to the rank order."""

    id: str
    generation: int
    started: str
    script: str = ""
    args: tuple[str, ...] = ()
    world_size: int = 1
    nodes: int = 1
    nproc_per_node: int = 1
    topology: Mapping[str, int | str] = field(default_factory=dict)
    log_dir: str = ""
    launcher: str = ""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who was found to be the cause; `coords` maps tp, cp, dp, pp to the rank's coordinates."""

    rank: int
    coords: Mapping[str, int]
    node: str
    slot: int
    why: str


@dataclass(frozen=True, slots=True)
class CycleRecord:
    """One attempt of the whole job. `end` and what follows from it are None while it runs; `recovery_s`: fault to the first step
    of all ranks (of a script that tells of no steps: to the start of all); None also where the cycle ended before that.
    """

    n: int
    generation: int
    start: str
    end: str | None = None
    reason: str | None = None
    cause: str | None = None
    decision: str | None = None
    culprit: Culprit | None = None
    recovery_s: float | None = None
    reap_s: float | None = None
    iteration_start: int | None = None
    iteration_end: int | None = None


@dataclass(frozen=True, slots=True)
class SectionTimeout:
    """The timeout of one section now. `hard_s` None: never; `distribution` is the learner's summary, any JSON object, or None."""

    hard_s: float | None
    why: str
    soft_s: float | None = None
    learned: bool = False
    distribution: Mapping[str, Any] | None = None


def coords_of(text: str) -> dict[str, int]:
    """`tp=1,cp=0,dp=3,pp=0` as a mapping."""
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}


def empty() -> Document:
    """A document without a run: what is loaded where a foreign file holds timeouts and nothing of ours exists."""
    return {
        "schema": SCHEMA,
        "current_timeouts": {},
        "run": None,
        "sections": {},
        "cycles": [],
        "dropped": {"cycles": 0, "through": None},
        "earlier_runs": {},
        "hardware": {},
        "budgets": {},
    }


def begin_run(previous: Document | None, run: RunInfo) -> Document:
    """The document of a new generation, over what was loaded: the same run id goes on with its cycles, another run id leaves a summary in
    `earlier_runs`.
    """
    base = {**empty(), **(previous or {}), "schema": SCHEMA}
    if base["run"] is not None and base["run"].get("id") != run.id:
        base = _left_behind(base)
    info = asdict(run)
    info["args"] = [short(arg) for arg in run.args[:1000]]
    info["topology"] = dict(run.topology)
    position = {"cycle": 0, "phase": "starting", "since": run.started, "iteration": None, "spares": 0, "revision": None}
    return {**base, "run": {**info, **position, "outcome": None, "exit_code": None, "written": run.started}}


def taken_over(document: Document, found: Document) -> Document:
    """The document of a run that has another controller now: when it began and where it is are as `found`, the former one's, says, if that is of the same generation."""
    run, before = document["run"] or {}, found["run"] or {}
    if (before.get("id"), before.get("generation")) != (run.get("id"), run.get("generation")):
        return document
    kept = ("started", "cycle", "phase", "since", "iteration", "spares", "revision", "reason")
    return {**document, "run": {**run, **{key: before[key] for key in kept if key in before}}}


def cycles_in(document: Document, generation: int) -> dict[int, CycleRecord]:
    """The records of one generation's cycles by number. Entries that make no sense are left out."""
    found = {}
    names = [one.name for one in fields(CycleRecord)]
    for entry in document["cycles"]:
        if entry["generation"] != generation or not isinstance(entry.get("start"), str):
            continue
        with suppress(TypeError):
            culprit = Culprit(**entry["culprit"]) if entry.get("culprit") else None
            found[entry["n"]] = CycleRecord(**{**{name: entry.get(name) for name in names}, "culprit": culprit})
    return found


def still_written(document: Document | None, run: str, now: str) -> str | None:
    """Which other run than `run` has stated its position so lately, without being over, that it probably still does."""
    other = (document or {}).get("run") or {}
    if not other or other.get("id") == run or other.get("outcome") is not None:
        return None
    try:
        age_s = (datetime.fromisoformat(now) - datetime.fromisoformat(str(other.get("written")))).total_seconds()
    except (ValueError, TypeError):
        return None
    name = str(other.get("id"))
    return None if abs(age_s) >= 2 * STATED_EVERY_S else name if name.isprintable() else ascii(name)


def at_position(document: Document, at: str, **position: Any) -> Document:
    """The run now: any of `cycle`, `phase`, `since`, `iteration`, `spares`, `revision`, `outcome`, `exit_code`, `reason`; `at` is the
    time of this statement.
    """
    return {**document, "run": {**(document["run"] or {}), **position, "written": at}}


def with_cycle(document: Document, record: CycleRecord) -> Document:
    """Adds the cycle, or replaces what was known of it (same generation and number); beyond `KEEP_CYCLES` the oldest are only counted."""
    entry = asdict(record)
    for key in ("reason", "decision"):
        entry[key] = short(entry[key])
    if entry["culprit"] is not None:
        entry["culprit"]["why"] = short(entry["culprit"]["why"])
    others = [cycle for cycle in document["cycles"] if number_of(cycle) != number_of(entry)]
    return trimmed({**document, "cycles": sorted([*others, entry], key=number_of)})


def with_timeouts(document: Document, timeouts: Mapping[str, SectionTimeout], at: str) -> Document:
    """All sections' timeouts as they hold now (`OUT_OF_SECTION` among them); a changed value is added to its section's history, and
    NVRx's key follows.
    """
    sections = dict(document["sections"])
    for name, timeout in list(timeouts.items())[:KEEP_SECTIONS]:
        sections[name] = _section(sections.get(name), timeout, at)
    for name in [name for name in sections if name not in timeouts][: max(0, len(sections) - KEEP_SECTIONS)]:
        del sections[name]
    inside = {name: timeout for name, timeout in timeouts.items() if name != OUT_OF_SECTION}
    outside = timeouts.get(OUT_OF_SECTION)
    exported = nvrx.current_timeouts(
        {name: timeout.hard_s for name, timeout in inside.items()},
        outside.hard_s if outside else None,
        [name for name, timeout in inside.items() if timeout.learned],
        bool(outside and outside.learned),
    )
    heartbeat = {key: value for key, value in document["current_timeouts"].items() if key == "heartbeat"}
    return {**document, "sections": sections, "current_timeouts": {**heartbeat, **exported}}


def with_device(document: Document, device: str, /, **known: Any) -> Document:
    """What is held against the device "node/slot": any of `suspicions` (count), `verdict` (one object, appended), `quarantine_until` (ISO
    time or None), `device` (its stable name), `rank` (whose results it spoiled), `why`.
    """
    entry = {"suspicions": 0, "verdicts": [], "quarantine_until": None, **document["hardware"].get(device, {})}
    verdict = known.pop("verdict", None)
    if verdict is not None:
        entry["verdicts"] = [*entry["verdicts"], dict(verdict)][-KEEP_VERDICTS:]
    hardware = {**{name: value for name, value in document["hardware"].items() if name != device}, device: {**entry, **known}}
    surplus = [name for name, value in hardware.items() if not value.get("quarantine_until")][: max(0, len(hardware) - KEEP_DEVICES)]
    return {**document, "hardware": {name: value for name, value in hardware.items() if name not in surplus}}


def with_budget(document: Document, kind: str, used: int, limit: int | None) -> Document:
    """How much of a budget is used; `limit` None: unlimited."""
    return {**document, "budgets": {**document["budgets"], kind: {"used": used, "limit": limit}}}


def trimmed(document: Document) -> Document:
    """Moves the oldest cycles beyond `KEEP_CYCLES` into the count of dropped ones."""
    surplus = document["cycles"][: max(0, len(document["cycles"]) - KEEP_CYCLES)]
    if not surplus:
        return document
    count = document["dropped"]["cycles"] + len(surplus)
    dropped = {"cycles": count, "through": list(number_of(surplus[-1]))}
    return {**document, "cycles": document["cycles"][len(surplus) :], "dropped": dropped}


def short(text: str | None) -> str | None:
    """The text, cut in the middle where it is longer than `TEXT_MAX_CHARS`."""
    if text is None or len(text) <= TEXT_MAX_CHARS:
        return text
    half = TEXT_MAX_CHARS // 2 - 20
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def summary_of_run(document: Document) -> dict[str, Any]:
    """What stays of a run once the file belongs to another run id."""
    run, causes = document["run"], dict[str, int]()
    for cycle in document["cycles"]:
        if cycle.get("cause"):
            causes[str(cycle["cause"])] = causes.get(str(cycle["cause"]), 0) + 1
    kept = {key: run.get(key) for key in ("generation", "started", "written", "outcome", "exit_code", "iteration")}
    return {**kept, "cycles": document["dropped"]["cycles"] + len(document["cycles"]), "causes": causes}


def _left_behind(document: Document) -> Document:
    earlier = {**document["earlier_runs"], str(document["run"].get("id")): summary_of_run(document)}
    newest = dict(list(earlier.items())[-KEEP_RUNS:])
    fresh = empty()
    kept = {key: value for key, value in document.items() if key != "rerun"}
    return {**kept, "earlier_runs": newest, **{key: fresh[key] for key in ("cycles", "dropped", "budgets", "run")}}


def _section(before: Mapping[str, Any] | None, timeout: SectionTimeout, at: str) -> dict[str, Any]:
    history = list(before["history"]) if before else []
    if before is None or before.get("hard_s") != timeout.hard_s:
        history.append({"at": at, "hard_s": timeout.hard_s, "soft_s": timeout.soft_s, "why": short(timeout.why)})
    entry = asdict(timeout)
    return {**entry, "why": short(timeout.why), "since": history[-1]["at"] if history else at, "history": history[-KEEP_CHANGES:]}


def number_of(cycle: Mapping[str, Any]) -> tuple[int, int]:
    """(generation, number) of an entry of `cycles`."""
    return cycle["generation"], cycle["n"]
