"""Whether the launcher has been heard of: a run that is not over states its position every 15 s (`STATED_EVERY_S`), so a file that stands still is worth a word.

Nothing is known beyond that: the launcher may be gone, its store away, its disk full, or this file a copy. Pure.
"""

from __future__ import annotations

from ft_launcher.dashboard.losses import seconds_of
from ft_launcher.dashboard.moment import text
from ft_launcher.state.document import STATED_EVERY_S, Document

SILENT_AFTER_S = 4 * STATED_EVERY_S


def silence(document: Document, over: bool, now_s: float) -> str | None:
    """The line for a run whose launcher has said nothing for so long; None where all is well, or over. `now_s`: seconds since the epoch."""
    written = text((document["run"] or {}).get("written"))
    stated_s = seconds_of(written)
    if over or stated_s is None or now_s - stated_s < SILENT_AFTER_S:
        return None
    return f"no word of the launcher since {written}: it is gone, its store is away, or it cannot write here"
