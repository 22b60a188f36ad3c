"""`ft-state watch`: the tables of `show`, and how the ranks fare, drawn again when something has changed.

Between two looks it sleeps; a look at files that have not changed is a handful of `stat` calls, and nothing is drawn then. On a terminal it uses the alternate screen, so that what
was there before is there afterwards; elsewhere each change of position is one line, for a log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ft_launcher.dashboard.api import counts
from ft_launcher.dashboard.heard import silence
from ft_launcher.dashboard.moment import Latest
from ft_launcher.dashboard.show import culprit, plain, seconds, tables
from ft_launcher.dashboard.source import Snapshot, Source
from ft_launcher.shell.journal import utc_now
from ft_launcher.state.document import empty

STANDING_SHOWN = 5
_STYLE = {
    "running": "green",
    "finished": "green",
    "starting": "cyan",
    "suspect": "yellow",
    "hung": "red",
    "culprit": "bold red",
    "failed": "bold red",
}


def rendered(snapshot: Snapshot) -> Iterable[RenderableType]:
    """What is known, most urgent first."""
    yield _now(snapshot)
    seen = snapshot.as_seen()
    if seen is not None:
        yield from tables(seen)


def live(source: Source, every_s: float) -> None:
    """Draws until Ctrl-C."""
    console = Console(highlight=False, emoji=False, markup=False)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as screen:
        _follow(source, every_s, screen)


def _follow(source: Source, every_s: float, screen: Live) -> None:
    drawn: tuple[Snapshot, object, str | None] | None = None
    while True:
        snapshot, size = source.look(), screen.console.size
        silent = _silent(snapshot)
        if drawn is None or drawn[0] is not snapshot or drawn[1:] != (size, silent):
            head = Text(f"{plain(str(snapshot.path))}, changed {utc_now()} (Ctrl-C ends)", style="dim")
            screen.update(Group(head, *(part for table in rendered(snapshot) for part in ("", table))), refresh=True)
            drawn = (snapshot, size, silent)
        time.sleep(every_s)


def lines(source: Source, every_s: float, out: Callable[[str], None]) -> None:
    """Writes a line for each change until Ctrl-C."""
    said = ""
    with suppress(KeyboardInterrupt):
        while True:
            line = summary(source.look())
            if line != said:
                out(f"{utc_now()} {line}")
                said = line
            time.sleep(every_s)


def summary(snapshot: Snapshot) -> str:
    """Where the run is, in one line."""
    run = (snapshot.document or {}).get("run") or {}
    if not run:
        return plain(snapshot.notes[0]) if snapshot.notes else "no run yet"
    moment = snapshot.moment
    where = f"{plain(run.get('id'))}: cycle {moment.cycle} {plain(moment.phase)}, iteration {plain(run.get('iteration'))}; {_ranks_text(snapshot)}"
    latest = f"; last incident: {_latest_text(snapshot.latest)}" if snapshot.latest is not None else ""
    silent = _silent(snapshot)
    ended = f"; {plain(moment.outcome)}, exit code {plain(moment.exit_code)}" if moment.outcome is not None else ""
    notes = [plain(note) for note in (silent, *snapshot.notes[:1]) if note]
    return "; ".join([where + latest + ended, *notes])


def _silent(snapshot: Snapshot) -> str | None:
    return silence(snapshot.document or empty(), snapshot.moment.outcome is not None, time.time())


def _now(snapshot: Snapshot) -> Table:
    table = Table(title=Text("Now"), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for note in snapshot.notes:
        table.add_row(Text("note"), Text(plain(note), style="yellow"))
    moment, silent = snapshot.moment, _silent(snapshot)
    if silent is not None:
        table.add_row(Text("note"), Text(plain(silent), style="yellow"))
    table.add_row(Text("phase"), Text(f"{plain(moment.phase)}, cycle {moment.cycle}: {plain(moment.reason)}"))
    table.add_row(Text("ranks"), _ranks(snapshot))
    for rank, found in sorted(snapshot.findings.items(), key=lambda pair: (pair[1].kind != "hung", pair[0]))[:STANDING_SHOWN]:
        table.add_row(
            Text(plain(found.kind)), Text(plain(found.reason) + (f" [{plain(snapshot.seen[rank])}]" if rank in snapshot.seen else ""))
        )
    if snapshot.latest is not None:
        table.add_row(Text("last incident"), Text(_latest_text(snapshot.latest)))
    lost = snapshot.losses
    if lost.goodput is not None:
        table.add_row(
            Text("goodput"), Text(f"{lost.goodput:.1%}: {seconds(lost.outage_s)} of outages, {lost.repeated} iterations done again")
        )
    return table


def _ranks(snapshot: Snapshot) -> Text:
    parts = [Text(f"{count} {name}", style=_STYLE.get(name, "")) for name, count in counts(snapshot.states).items()]
    return Text(", ").join(parts) if parts else Text("-")


def _ranks_text(snapshot: Snapshot) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts(snapshot.states).items()) or "no ranks"


def _latest_text(latest: Latest) -> str:
    who = culprit(latest.culprit) if latest.culprit is not None else "nobody could be blamed"
    after = f", training again after {seconds(latest.recovery_s)}" if latest.recovery_s is not None and latest.complete else ""
    return f"cycle {latest.cycle}, {plain(latest.cause)}: {who} -> {plain(latest.decision)}{after}"
