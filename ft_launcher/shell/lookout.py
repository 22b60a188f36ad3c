"""Takes a closer look at ranks that stand still, between the first suspicion and the kill.

The watchman says who is suspect and who else stands still; `dumps` gathers what they can tell; the watchman keeps it with their positions. This room only knows when to look: once for
each place that a suspect stands at, and never beyond the moment at which the kill begins. It decides nothing and waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ft_launcher.shell.dumps import Dumps, Seen, Target
from ft_launcher.shell.record import Files
from ft_launcher.shell.watchman import Position, Watchman
from monitors.detect import Finding

STANDING_SHARE = 1 / 3
"""Ranks that were quiet for this share of a suspect's age are looked at together with it."""


class Lookout:
    """One node's closer looks. `signal(cycle, ranks)` sends the reserved signal to these ranks' own processes."""

    def __init__(self, watch: Watchman, files: Files, signal: Callable[[int, Sequence[int]], None]) -> None:
        self._watch = watch
        self._files = files
        self._cycle = -1
        self._pids: Mapping[int, int] = {}
        self._dumps = Dumps(lambda ranks: signal(self._cycle, ranks))

    def begin(self, cycle: int, pids: Mapping[int, int]) -> None:
        """A cycle's ranks are being started; `pids` fills as they are."""
        self._dumps.stop()
        self._cycle, self._pids = cycle, pids

    def on_finding(self, finding: Finding) -> bool:
        """Look at a suspect, and at who stands still with it, unless it was looked at where it is. True when this is the first look at it here."""
        if finding.kind != "suspect" or not self._watch.unseen(finding.rank):
            return False
        self.look(finding.since_s)
        return True

    def look(self, since_s: float) -> None:
        """At whoever has been quiet for a good part of `since_s`: the age of a suspect, here or on another node."""
        cycle, standing = self._cycle, self._watch.standing(since_s * STANDING_SHARE)
        where = {rank: position for rank, (_, position) in standing.items()}
        targets = [
            Target(rank, self._pids[rank], self._files.stacks(cycle, rank), signals, os.environ)
            for rank, (signals, _) in standing.items()
            if rank in self._pids
        ]
        self._dumps.gather(targets, lambda seen: self._on_seen(cycle, where, seen))

    def before_kill(self) -> None:
        """The ranks are about to be killed: what is known now is what counts."""
        self._dumps.stop()
        self._watch.freeze()

    def end(self) -> None:
        """The cycle's ranks are gone. Files of ranks that were never asked are removed."""
        self._dumps.stop()
        self._files.drop_empty_stacks(self._cycle, self._pids)

    def _on_seen(self, cycle: int, where: Mapping[int, Position], seen: Mapping[int, Seen]) -> None:
        if cycle != self._cycle:
            return
        self._watch.note_seen(seen, where)
        found = {rank: f"{s.state} {s.place}".strip() for rank, s in seen.items() if s.state or s.place}
        if found:
            self._files.journal.record("seen", cycle, ranks=found)
