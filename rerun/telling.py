"""What a rank tells of rejected results: the last event in its section page, for the launcher; each of them in the file of rejected results, if there is one.

`monitors.client.attach` is not used: it would announce a client, and a script that has none must not be judged by its silence. An event that turned out harmless (the
check was not fatal, training goes on) is taken back, so that it is not mistaken for the reason of an exit that another rank asks for later.

It knows the page; it must never raise, print or know the machine.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ft_launcher.core.rerun_report import RerunStatus
from monitors.rank_page import own_page
from rerun import ranks, tracker
from rerun.place import here

logger = logging.getLogger(__name__)

VERDICT = "FT_RERUN_VERDICT"
"""Set by the launcher once a verdict is acted upon: a rerun state found in a checkpoint is settled."""


def tell(status: RerunStatus, iteration: int, text: str) -> None:
    """Leaves the event in this process's section page, if it has one."""
    page = own_page()
    if page is not None:
        page.report_rerun(int(status), max(-1, min(int(iteration), (1 << 62))), text)


def take_back() -> None:
    """Nothing to report any more."""
    page = own_page()
    if page is not None:
        page.report_rerun(0, -1, "")


def settled() -> str | None:
    """The verdict that the launcher has acted upon, or None."""
    return os.environ.get(VERDICT) or None


class Teller:
    """One machine's events. RuntimeError where `path` is given and cannot be appended to."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._told = False
        if path is not None:
            _must_be_writable(path)

    def tell(self, status: RerunStatus, iteration: int, result: Any, message: str) -> None:
        """One event of this rank, here and now."""
        place = here()
        job = os.environ.get("SLURM_JOBID", "N/A")
        entry = tracker.TrackerEntry(ranks.rank(), iteration, status, place.node, place.device, message, f"{result}", tracker.now(), job)
        tell(status, iteration, entry.text)
        self._told = True
        if self.path is not None:
            try:
                tracker.append(self.path, entry)
            except OSError as error:
                logger.error("Could not log validation error to %s: %s", self.path, error)

    def settle(self) -> None:
        """The step ends normally: what was told about it is no reason to exit any more."""
        if self._told:
            take_back()
            self._told = False


def _must_be_writable(path: str) -> None:
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise RuntimeError(f"the file of rejected results cannot be appended to: {error}: name another one or make it writable") from error
