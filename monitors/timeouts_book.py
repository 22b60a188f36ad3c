"""From what each rank says to what a section took: one sample an occurrence, its longest duration over all ranks, in order. Pure.

A section that all ranks pass together (a step, a save) takes as long as its slowest rank; that is what a timeout must allow. Ranks report the same occurrence at
different moments, twice, late or never, so a `SectionBook` waits: an occurrence is emitted once every rank has reported it; or every rank that uses this section at
all (rank 0 may save alone), when the book has seen an index `LAG` further on; or whoever did, `WINDOW` further on. Always in the order of its index; what comes
later than that is counted and dropped. Two books in a row are one: an agent merges its own ranks, the controller takes the agents for ranks.

Not every occurrence is one. Megatron opens `checkpointing` in every iteration, for microseconds, and once in 500 for a minute: learning from the empty ones would get
the first real save killed. `Relevance` decides, at the controller only:

- a `step` counts always: its end is progress by definition;
- elsewhere an occurrence shorter than a thousandth of the ceiling does nothing (nobody allows 420 s for what takes 0.4 s);
- in a section that has shown such ones only what takes 2 s counts (as long a pause may make an empty one look; the rule's floor has the same reason), and at least a
  fiftieth of the longest that counted lately. A section whose real occurrences are shorter is not learned and keeps its ceiling, which is the safe side.

What this file must never know: who the ranks are, how samples travel, what is learned from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW, LAG = 256, 8
"""How many occurrences of a section may wait (twice what a section page's ring holds), and how many do for a rank that never used the section."""
MAX_JUMP = 4096
"""A rank that is so many occurrences ahead of all others is broken."""
MAX_SECTIONS = 64
WARMUP = 5
PAUSE_S = 2.0
NOTHING_SHARE, SMALL_SHARE, SMALL_FADES = 1e-3, 1 / 50, 0.97
STEP = "step"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence of a section: its index in this cycle (the first is 0), the longest duration of any rank that reported it, how many did, and whether it is one
    of the cycle's first (`warmup`), which are judged by the ceiling."""

    section: str
    index: int
    duration_s: float
    ranks: int
    warmup: bool = False


@dataclass(slots=True)
class _Row:
    """An occurrence that waits, and who has reported it (one byte a rank)."""

    seen: bytearray
    count: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class _Page:
    """A section in the book: rows by index, the next index to emit, the highest seen, the ranks that use it (one byte each)."""

    users: bytearray
    rows: dict[int, _Row] = field(default_factory=dict)
    next: int = 0
    highest: int = -1

    def expects(self, index: int) -> bool:
        """Whether a report about this occurrence can still be used."""
        return index >= self.next and (self.highest < 0 or index <= self.highest + MAX_JUMP)


class SectionBook:
    """Of one cycle. `ranks`: how many report (ids 0 ... ranks - 1). `warmup`: how many first occurrences of a section are warm-up (default: 5 steps, none else).

    Memory: at most `MAX_SECTIONS` x `WINDOW` rows of one byte a rank, whatever is reported.
    """

    def __init__(self, ranks: int, *, warmup: Mapping[str, int] | None = None) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: at least one must report")
        self._ranks = ranks
        self._warmup = {STEP: WARMUP} if warmup is None else dict(warmup)
        self._pages: dict[str, _Page] = {}
        self.dropped = 0

    def add(self, section: str, rank: int, index: int, duration_s: float) -> list[Occurrence]:
        """A rank has ended its occurrence number `index` after `duration_s`. Returns what is complete now, in order of index.

        Duplicates change nothing. What comes after its occurrence was emitted, from an unknown rank, about too many sections, or is no duration, is dropped
        and counted in `dropped`.
        """
        page = self._page(section)
        if page is None or not page.expects(index) or not 0 <= rank < self._ranks or not 0 <= duration_s < float("inf"):
            self.dropped += 1
            return []
        row = page.rows.get(index)
        if row is None:
            row = page.rows[index] = _Row(bytearray(self._ranks))
        if not row.seen[rank]:
            row.seen[rank] = page.users[rank] = 1
            row.count += 1
            row.longest_s = max(row.longest_s, duration_s)
        page.highest = max(page.highest, index)
        return self._emit(section, page)

    def add_column(self, section: str, index: int, durations_s: Iterable[tuple[int, float]]) -> list[Occurrence]:
        """Many ranks' (rank, duration) of one occurrence."""
        found: list[Occurrence] = []
        for rank, duration_s in durations_s:
            found += self.add(section, rank, index, duration_s)
        return found

    def flush(self) -> list[Occurrence]:
        """The cycle has ended: what has waited for ranks that will never report, by section and index. Nothing can be added to these occurrences any more."""
        found: list[Occurrence] = []
        for section, page in self._pages.items():
            for index in sorted(page.rows):
                found.append(self._occurrence(section, index, page.rows.pop(index)))
            page.next = page.highest + 1
        return found

    def _page(self, section: str) -> _Page | None:
        page = self._pages.get(section)
        if page is None and len(self._pages) < MAX_SECTIONS:
            page = self._pages[section] = _Page(bytearray(self._ranks))
        return page

    def _emit(self, section: str, page: _Page) -> list[Occurrence]:
        found: list[Occurrence] = []
        while (row := self._ripe(page)) is not None:
            found.append(self._occurrence(section, page.next, row))
            page.next += 1
        return found

    def _ripe(self, page: _Page) -> _Row | None:
        """The next row, taken out, if it may go. An index that nobody has reported `LAG` later was lost by all."""
        row = page.rows.get(page.next)
        behind = page.highest - page.next
        if row is None:
            if behind < LAG or not page.rows:
                return None
            page.next = min(page.rows)
            return self._ripe(page)
        if row.count == self._ranks or (behind >= LAG and row.seen == page.users) or behind >= WINDOW:
            return page.rows.pop(page.next)
        return None

    def _occurrence(self, section: str, index: int, row: _Row) -> Occurrence:
        return Occurrence(section, index, row.longest_s, row.count, index < self._warmup.get(section, 0))


class Relevance:
    """Which occurrences of one section do something. `ceiling_s`: its fixed timeout. Kept over cycles (`to_json`), else a restart would have to find out again."""

    def __init__(self, section: str, ceiling_s: float) -> None:
        self._always = section == STEP
        self._nothing_s = ceiling_s * NOTHING_SHARE if ceiling_s < float("inf") else PAUSE_S
        self.idle = 0
        self.longest_s = 0.0

    def counts(self, duration_s: float) -> bool:
        """Whether this occurrence, the next in order, is a sample."""
        if self._always:
            return True
        least_s = max(self._nothing_s, PAUSE_S, self.longest_s * SMALL_SHARE) if self.idle else self._nothing_s
        if duration_s < least_s:
            self.idle += 1
            return False
        self.longest_s = max(duration_s, self.longest_s * SMALL_FADES)
        return True

    def to_json(self) -> dict[str, float]:
        """Two numbers."""
        return {"idle": self.idle, "longest_s": self.longest_s}

    @classmethod
    def from_json(cls, value: object, section: str, ceiling_s: float) -> Relevance:
        """As it was; anything strange: as new."""
        self = cls(section, ceiling_s)
        if isinstance(value, Mapping):
            idle, longest_s = value.get("idle"), value.get("longest_s")
            if isinstance(idle, int) and isinstance(longest_s, int | float) and idle >= 0 and 0 <= longest_s < float("inf"):
                self.idle, self.longest_s = int(idle), float(longest_s)
        return self


def learning_key(section: str, topology: Mapping[str, object], script: str, arguments: Sequence[str]) -> str:
    """Under which name a section's timeout is kept: the section and 16 hexadecimal digits that are the same exactly when topology (any order of its words), script and
    arguments are. The same on every machine and Python."""
    content = json.dumps([sorted((word, str(size)) for word, size in topology.items()), script, list(arguments)], ensure_ascii=True)
    return f"{section}@{hashlib.sha256(content.encode()).hexdigest()[:16]}"
