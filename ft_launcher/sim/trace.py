"""The full course of events as a hash, and the readable part of it as a story.

Every event that a machine is given and every action it returns goes into the hash, one line each, with its virtual time: two runs with the same hash
were the same run. Job states appear as digest and revision, for at 10,000 ranks they are long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ft_launcher.core import actions as do
from ft_launcher.core import events as ev


def clock_text(seconds: float) -> str:
    """`03:07:05.250`, hours without a bound."""
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}"


class Trace:
    """`digest()` of everything; `story` is what people read, `(seconds, who, text)`, kept whole."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.count = 0
        self.story: list[tuple[float, str, str]] = []

    def fed(self, now: float, who: str, event: object, actions: Sequence[object]) -> None:
        """A machine was given an event and answered."""
        answer = ";".join(map(brief, actions))
        self._hash.update(f"{now!r} {who} {brief(event)} -> {answer}\n".encode())
        self.count += 1

    def note(self, now: float, who: str, text: str) -> None:
        """Something for the reader; part of the hash, too."""
        self._hash.update(f"{now!r} {who}: {text}\n".encode())
        self.story.append((now, who, text))

    def digest(self) -> str:
        """sha256 of all so far, in hexadecimal."""
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        """The story, a line each."""
        return [f"{clock_text(now)} {who + ':':12} {text}" for now, who, text in self.story]


def brief(thing: Any) -> str:
    """One event or action, short but complete in what can differ."""
    match thing:
        case ev.JobChanged():
            return f"JobChanged({thing.revision})"
        case ev.ReportReceived():
            return f"Report({thing.report.node_id} {thing.report.sequence} {thing.report.cycle})"
        case do.Report():
            report = thing.report
            return f"Report({report.sequence} {len(report.exits)} {len(report.hangs)} {report.reaped:d} {report.standby} {report.unfit})"
        case do.Commit():
            job = thing.job
            return f"Commit({job.phase} {job.cycle} {job.reason} {sorted(job.lost)} {job.budgets})"
        case do.StartRanks():
            return f"StartRanks({thing.job.cycle})"
        case do.RecordDecision():
            return f"RecordDecision({thing.cycle} {thing.rule} {thing.decision} {thing.reason})"
        case ev.RanksReaped():
            return f"RanksReaped({thing.cycle} {thing.left} {thing.seconds!r})"
        case _:
            return repr(thing)
