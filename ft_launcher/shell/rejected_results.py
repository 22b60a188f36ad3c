"""What ranks say of rejected results, collected for the report: from their section pages, and from the tracker file that the script's arguments name.

Our own ranks leave it on the page, also when they run unmodified Megatron (rerun/megatron_hook.py). The file is the second witness: for start-up code that we do not
control, and for what a page cannot hold. It lies on storage, so it is only touched on threads; of what is in it, only what came after the start of the cycle counts, and
only what speaks of this node's own ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ft_launcher.core.rerun_report import RerunFinding, RerunStatus
from monitors.page import PageSample
from rerun import tracker


class TrackerFile:
    """The tracker file of one agent's script; `path` None: the script has none."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._offset: int | None = None

    def begin(self) -> None:
        """A cycle starts: note where the file ends now, without waiting for it."""
        self._offset = None
        if self._path is not None:
            threading.Thread(target=self._measure, args=(self._path,), name="ft-tracker", daemon=True).start()

    def _measure(self, path: str) -> None:
        self._offset = tracker.size(path)

    def findings(self, ranks: Iterable[int]) -> dict[int, RerunFinding]:
        """The last word of each of these ranks since `begin`; nothing when the storage has not said yet where the file ended. May block: call it on a thread."""
        offset = self._offset
        if self._path is None or offset is None:
            return {}
        own = set(ranks)
        return {entry.rank: entry.finding for entry in tracker.read(self._path, offset) if entry.rank in own}


def on_pages(samples: Mapping[int, PageSample]) -> dict[int, RerunFinding]:
    """What these ranks left on their pages; a status that nobody knows counts as nothing said."""
    known = {status.value for status in RerunStatus}
    reports = {rank: sample.rerun for rank, sample in samples.items() if sample.rerun is not None and sample.rerun.status in known}
    return {rank: RerunFinding(rank, RerunStatus(r.status), r.iteration, r.text) for rank, r in reports.items()}
