"""Section names that look like a slip: a section without a limit of its own counts as out of section, is never learned and is no progress, whatever its author meant.

Said once a name, by the node of rank 0 alone: the ranks of a job run one script.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches

ALIKE = 0.75
"""difflib's ratio from which a name counts as near another: `steps`, `stpe` and `checkpoint` do, `validation_step` and `data` do not."""


def meant(name: str, limited: Collection[str]) -> str | None:
    """The section with a limit that `name` was probably to be; None for a name that is one of them, or like none."""
    close = [] if name in limited else get_close_matches(name.casefold(), list(limited), n=1, cutoff=ALIKE)
    return close[0] if close else None


class Slips:
    """What has been said of a job's section names."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._looked_at: set[str] = set()

    def look(self, names: Collection[str], limited: Collection[str]) -> None:
        """At the names of the sections that a rank has used so far; `limited` are those that have a limit."""
        for name in sorted(set(names) - self._looked_at):
            self._looked_at.add(name)
            other = meant(name, limited)
            if other is not None and other not in names:
                self._say(
                    f"the script uses a section {name!r}, which has no limit: time in it counts as out of section; "
                    f"if it was to be {other!r}, write that, else give it a limit: --timeouts +{name}=SECONDS"
                )
