"""One state as tables for a terminal: the run, where it is, its timeouts and why, its cycles, incidents, hardware under suspicion and
budgets.

Pure towards the world: takes what was found, returns things that rich can print. Whatever the file holds, nothing here raises and no text
in it can colour, move or clear the reader's terminal: values are shown as plain text, control characters made visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ft_launcher.dashboard.find import Seen

CYCLES_SHOWN = 20
_TEXT_SHOWN = 400


def tables(seen: Seen, silent: str | None = None) -> Iterable[RenderableType]:
    """All that is known, most important first. `silent`: what is to be said of a launcher that is not heard of."""
    document = seen.document
    yield _run(seen, silent)
    if document["sections"] or document["current_timeouts"]:
        yield _timeouts(document)
    if document["cycles"]:
        yield _cycles(document)
    if seen.incidents:
        yield _incidents(seen)
    if document["hardware"]:
        yield _hardware(document["hardware"])
    if document["budgets"]:
        yield _budgets(document["budgets"])
    if document["earlier_runs"]:
        yield _earlier(document["earlier_runs"])


def counted(value: object, noun: str) -> str:
    """`1 node`, `2 nodes`, and `- nodes` where it is not known."""
    return f"{plain(value)} {noun}{'' if value == 1 else 's'}"


def plain(value: object) -> str:
    """Any value as text that is safe to print: no control or surrogate characters, bounded."""
    text = (
        "-"
        if value is None
        else str(value)
        if isinstance(value, str | int)
        else f"{value:g}"
        if isinstance(value, float)
        else _inner(value)
    )
    safe = "".join(
        char if char.isprintable() or char == " " else " " if char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )
    return safe if len(safe) <= _TEXT_SHOWN else safe[: _TEXT_SHOWN - 3] + "..."


def coords(value: object) -> str:
    """Coordinates as `tp=1,cp=0,dp=3,pp=0`."""
    return ",".join(f"{plain(key)}={plain(entry)}" for key, entry in value.items()) if isinstance(value, dict) else plain(value)


def culprit(value: object) -> str:
    """A culprit in a few words, `-` where there is none."""
    if not isinstance(value, dict):
        return plain(None)
    return f"rank {plain(value.get('rank'))} ({coords(value.get('coords'))}) on {plain(value.get('node'))}/{plain(value.get('slot'))}"


def seconds(value: object) -> str:
    """A duration with its unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value if value is None else "?")
    return f"{value * 1000:.0f} ms" if 0 < abs(value) < 1 else f"{value:.1f} s" if abs(value) < 100 else f"{value:.0f} s"


def _run(seen: Seen, silent: str | None) -> Table:
    run: dict[str, Any] = seen.document["run"] or {}
    table = Table(title=Text("Run"), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if not run:
        _rows(table, [("state", f"{plain(str(seen.path))}: no run yet, timeouts only")])
        return table
    where = f"cycle {plain(run.get('cycle'))}, {plain(run.get('phase'))} since {plain(run.get('since'))}, iteration {plain(run.get('iteration'))}"
    world, nodes, slots, spares = (
        counted(run.get(key), noun)
        for key, noun in (("world_size", "rank"), ("nodes", "node"), ("nproc_per_node", "slot"), ("spares", "spare"))
    )
    args = run.get("args")
    script = " ".join(plain(word) for word in [run.get("script"), *(args if isinstance(args, list) else [])])
    _rows(table, [
        ("run", f"{plain(run.get('id'))}, generation {plain(run.get('generation'))}, started {plain(run.get('started'))}"),
        ("script", plain(script)),
        ("topology", f"{coords(run.get('topology'))}: {world} on {nodes} x {slots}, {spares}"),
        ("now", where),
        *([("but", plain(silent))] if silent else []),
        ("as of", f"{plain(run.get('written'))} in {plain(str(seen.path))}"),
        ("files", plain(str(seen.run_folder)) if seen.run_folder else "the run's folder is not here: no incidents, no verdict"),
        *_outcome(seen, run),
    ])  # fmt: skip
    return table


def _outcome(seen: Seen, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    verdict, other = seen.verdict, seen.other
    own = [] if run.get("outcome") is None else [("outcome", _said(run))]
    if other is not None:
        return [*own, (f"but {plain(other)}", _verdict_of_another(verdict))]
    if verdict is None:
        return own
    cause = verdict.get("first_cause")
    return [
        ("outcome", _said(verdict)),
        *([("first cause", f"{plain(cause.get('cause'))}, {culprit(cause)}")] if isinstance(cause, dict) else []),
    ]


def _verdict_of_another(verdict: Mapping[str, Any] | None) -> str:
    """Of the launch whose folder was named, where the state is another's."""
    said = "has no verdict.json: it still runs, or its launcher was killed" if verdict is None else _said(verdict)
    return f"{said} (all above is of the run that has the state file now)"


def _said(ended: Mapping[str, Any]) -> str:
    return f"{plain(ended.get('outcome'))}, exit code {plain(ended.get('exit_code'))}: {plain(ended.get('reason'))}"


def _timeouts(document: Mapping[str, Any]) -> Table:
    table = _table("Timeouts", "section", "hard", "soft", "usual", "since", "why")
    for name, section in document["sections"].items():
        hard = "never" if section.get("hard_s") is None else seconds(section.get("hard_s"))
        cells = (
            hard,
            seconds(section.get("soft_s")),
            _usual(section.get("distribution")),
            plain(section.get("since")),
            plain(section.get("why")),
        )
        _rows(table, [(plain(name), *cells)])
    exported = document["current_timeouts"].get("section", {})
    for name, value in exported.get("section", {}).items():
        known = document["sections"].get(name)
        if known is None or known.get("hard_s") != value:
            _rows(table, [(plain(name), seconds(value), "-", "-", "-", "as the training script's own NVRx client wrote it")])
    return table


def _usual(distribution: object) -> str:
    """How long the section takes: the median and the longest of the last occurrences, and how many there were."""
    recent = distribution.get("recent") if isinstance(distribution, dict) else None
    if not isinstance(distribution, dict) or not isinstance(recent, dict):
        return "-"
    return f"{seconds(recent.get('p50_s'))} (to {seconds(recent.get('max_s'))}, {plain(distribution.get('count'))} seen)"


def _cycles(document: Mapping[str, Any]) -> Table:
    cycles = document["cycles"]
    hidden = document["dropped"]["cycles"] + max(0, len(cycles) - CYCLES_SHOWN)
    table = _table(
        f"Cycles ({hidden} older not shown)" if hidden else "Cycles", "cycle", "start", "cause", "recovery", "reap", "iterations", "reason"
    )
    for cycle in cycles[-CYCLES_SHOWN:]:
        blamed = f" [{culprit(cycle['culprit'])}]" if isinstance(cycle.get("culprit"), dict) else ""
        iterations = f"{plain(cycle.get('iteration_start'))}..{plain(cycle.get('iteration_end'))}"
        _rows(table, [(
            f"{cycle['generation']}.{cycle['n']}", plain(cycle.get("start")), plain(cycle.get("cause")), seconds(cycle.get("recovery_s")),
            seconds(cycle.get("reap_s")), iterations, ("running" if cycle.get("end") is None else plain(cycle.get("reason"))) + blamed,
        )])  # fmt: skip
    return table


def _incidents(seen: Seen) -> Table:
    table = _table(
        f"Incidents (last {len(seen.incidents)} of {seen.incident_count})", "incident", "cycle", "cause", "culprit", "reason and decision"
    )
    for name, summary in seen.incidents:
        said = f"{plain(summary.get('reason'))} -> {plain(summary.get('decision'))}" if summary else "summary.json cannot be read"
        _rows(table, [(name, plain(summary.get("cycle")), plain(summary.get("cause")), culprit(summary.get("culprit")), said)])
    return table


def _hardware(hardware: Mapping[str, Any]) -> Table:
    table = _table("Hardware under suspicion", "device", "suspicions", "quarantine until", "verdicts", "why")
    for device, known in sorted(hardware.items(), key=lambda item: (item[1].get("quarantine_until") is None, item[0])):
        verdicts = ", ".join(f"{plain(one.get('verdict'))} ({plain(one.get('at'))})" for one in known.get("verdicts", [])[-3:])
        cells = (plain(known.get("suspicions")), plain(known.get("quarantine_until")), verdicts or "-", plain(known.get("why")))
        _rows(table, [(plain(device), *cells)])
    return table


def _budgets(budgets: Mapping[str, Any]) -> Table:
    table = _table("Budgets", "kind", "used", "limit")
    for kind, budget in budgets.items():
        limit = budget.get("limit")
        _rows(table, [(plain(kind), plain(budget.get("used")), "unlimited" if limit is None else plain(limit))])
    return table


def _earlier(runs: Mapping[str, Any]) -> Table:
    table = _table("Earlier runs", "run", "started", "cycles", "outcome", "exit code")
    for name, run in list(runs.items())[-5:]:
        _rows(table, [(plain(name), *(plain(run.get(key)) for key in ("started", "cycles", "outcome", "exit_code")))])
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("cycle", "recovery", "reap", "hard", "soft", "used", "limit"))
    return table


def _rows(table: Table, rows: Iterable[tuple[str, ...]]) -> None:
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))


def _inner(value: object) -> str:
    return "{...}" if isinstance(value, dict) else "[...]" if isinstance(value, list) else type(value).__name__
