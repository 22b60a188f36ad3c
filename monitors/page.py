"""The section page as the agent sees it: make it, look at it, write the agent's three words.

One `SectionPage` per rank process, handed down by descriptor. Sealed against shrinking and fully allocated, so that no writer can make a reader of it die. The rank
may be broken or hostile and scribble anything: a look at the page is a bounded number of steps, never raises, and says `broken` with a reason instead of guessing.

A look costs one comparison when nothing changed; else only what changed is decoded. Knows nothing of clocks, limits or what a sample means (`monitors.detect`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ft_launcher.errors import PlatformError
from monitors import layout
from monitors.hooks import STACKS_SIGNAL
from monitors.rank_page import claim

__all__ = ["OpenSection", "PageSample", "RerunReport", "SectionPage", "SectionStats", "claim"]

_HOT = struct.Struct(f"<{layout.HOT_WORDS}q")
_RING = struct.Struct(f"<{layout.RING_WORDS}q")
_NAMES = slice(layout.NAMES * 8, (layout.NAMES + layout.SECTIONS * layout.NAME_WORDS) * 8)
_NAME_STRIDE = layout.NAME_WORDS * 8


@dataclass(frozen=True, slots=True)
class OpenSection:
    """A section that is open now; `since_ns` is CLOCK_MONOTONIC, `iteration` what the script gave with it."""

    name: str
    since_ns: int
    iteration: int | None = None


@dataclass(frozen=True, slots=True)
class SectionStats:
    """Occurrences ended so far, the last and longest duration, and when it last ended (CLOCK_MONOTONIC; also when an exception ended it)."""

    count: int
    last_ns: int
    max_ns: int
    last_end_ns: int


@dataclass(frozen=True, slots=True)
class RerunReport:
    """What the rank's rerun state machine left: its own status code (not 0), the iteration, one line of text."""

    status: int
    iteration: int
    text: str


@dataclass(frozen=True, slots=True)
class PageSample:
    """One look at a page. Times are CLOCK_MONOTONIC ns; 0 where there is none. `open` is ordered by start; `misuse` has the counters that are not zero.

    `stacks_signal` is the signal on which the rank dumps its stacks, 0 when sending one would kill it. `broken` says why the page cannot be trusted. All of it is
    what the rank claims: `owner_pid` is for comparing, never for killing.
    """

    owner_pid: int = 0
    attached: bool = False
    iteration: int | None = None
    steps: int = 0
    last_progress_ns: int = 0
    open: tuple[OpenSection, ...] = ()
    sections: Mapping[str, SectionStats] = field(default_factory=lambda: MappingProxyType({}))
    exception: tuple[int, str] | None = None
    rerun: RerunReport | None = None
    misuse: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    stacks_signal: int = 0
    broken: str | None = None


class SectionPage:
    """The agent's end of one rank's page. Not thread-safe; `close()` when the rank is reaped (the rank's own mapping is its own)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, layout.PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._hot = b""
        self._raw_names = b""
        self._names: dict[int, str] = {}
        self._stats: tuple[int, ...] = ()
        self._sections: Mapping[str, SectionStats] = MappingProxyType({})
        self._sample = PageSample()

    @classmethod
    def create(cls, rank: int, cycle: int) -> SectionPage:
        """A fresh page for `rank` in `cycle`; its descriptor is close-on-exec. Raises PlatformError when the system has no descriptor or memory for it."""
        fd = -1
        try:
            fd = os.memfd_create(layout.MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, layout.PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            page = cls(fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise PlatformError(f"rank {rank}: no section page of {layout.PAGE_BYTES // 1024} KiB could be made: {error}") from error
        words = page._words
        words[layout.VERSION] = layout.LAYOUT_VERSION
        words[layout.RANK], words[layout.CYCLE], words[layout.ITERATION] = rank, cycle, -1
        words[layout.MAGIC] = layout.MAGIC_WORD
        return page

    # -- what the agent writes ------------------------------------------------------------------------------------------------------------------------------

    def set_cycle(self, cycle: int) -> None:
        """Names the cycle that is current now; a rank that attached in another one may not commit."""
        self._words[layout.CYCLE] = cycle

    def set_lease(self, deadline_ns: int) -> None:
        """Until when this node's lease is known to hold (CLOCK_BOOTTIME ns), 0 for no lease."""
        self._words[layout.LEASE_NS] = deadline_ns

    def revoke(self) -> None:
        """Forbids the rank all further commits."""
        self._words[layout.REVOKED] = 1

    def close(self) -> None:
        """Gives back mapping and descriptor; a second call does nothing."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # -- what the agent reads -------------------------------------------------------------------------------------------------------------------------------

    def sample(self) -> PageSample:
        """What the page says now; the same object as before when nothing changed. Never raises."""
        if self.fd < 0:
            return PageSample(broken="the page is closed")
        hot = self._map[: layout.HOT_BYTES]
        if hot != self._hot:
            self._sample = self._decode(_HOT.unpack(hot))
            self._hot = hot
        return self._sample

    def occurrences(self, name: str, after_index: int = -1) -> list[tuple[int, int]]:
        """The (index, duration in ns) of section `name`'s ended occurrences after `after_index` (the first is 0), in order, at most `layout.RING`.

        An entry being written just now is left for the next call. Empty for an unknown name.
        """
        if self.fd < 0:
            return []
        self._read_names()
        index = next((i for i, known in self._names.items() if known == name), None)
        if index is None:
            return []
        at = (layout.RINGS + index * layout.RING_WORDS) * 8
        once = _RING.unpack_from(self._map, at)
        twice = _RING.unpack_from(self._map, at)
        pairs = zip(once[::2], once[1::2], twice[::2], twice[1::2], strict=True)
        return sorted((i - 1, took) for i, took, i2, took2 in pairs if i > after_index + 1 and i >= 1 and i == i2 and took == took2)

    def _decode(self, words: tuple[int, ...]) -> PageSample:
        if words[layout.MAGIC] != layout.MAGIC_WORD or words[layout.VERSION] != layout.LAYOUT_VERSION:
            return PageSample(broken=f"its header was overwritten (magic {words[layout.MAGIC]:#x}, layout {words[layout.VERSION]})")
        self._read_names()
        self._read_stats(words[layout.STATS : layout.HOT_WORDS])
        opened, broken = self._read_open(words[layout.OPEN : layout.STATS])
        iteration = words[layout.ITERATION]
        return PageSample(
            owner_pid=words[layout.OWNER_PID],
            attached=words[layout.ATTACHED] != 0,
            iteration=iteration if iteration >= 0 else None,
            steps=words[layout.STEPS],
            last_progress_ns=words[layout.PROGRESS_NS],
            open=opened,
            sections=self._sections,
            exception=self._read_exception(words),
            rerun=self._read_rerun(words),
            misuse=MappingProxyType({k: n for k, n in zip(layout.MISUSES, words[layout.MISUSE :], strict=False) if n}),
            stacks_signal=STACKS_SIGNAL if words[layout.STACKS_SIGNAL] == STACKS_SIGNAL else 0,
            broken=broken,
        )

    def _read_names(self) -> None:
        raw = self._map[_NAMES]
        if raw == self._raw_names:
            return
        self._raw_names = raw
        self._stats = ()  # what they are called has changed
        self._names = {}
        for index in range(layout.SECTIONS):
            name = raw[index * _NAME_STRIDE : (index + 1) * _NAME_STRIDE]
            if name[0]:
                self._names[index] = _printable(name[1 : 1 + name[0]])

    def _read_stats(self, stats: tuple[int, ...]) -> None:
        if stats == self._stats:
            return
        self._stats = stats
        sections = {}
        for index, name in self._names.items():
            count, last, longest, end = stats[index * 4 : index * 4 + 4]
            if count or end:
                sections[name] = SectionStats(count, last, longest, end)
        self._sections = MappingProxyType(sections)

    def _read_open(self, slots: tuple[int, ...]) -> tuple[tuple[OpenSection, ...], str | None]:
        found, broken = [], None
        for i in range(0, len(slots), layout.OPEN_WORDS):
            section, since_ns, iteration = slots[i : i + 3]
            if not section:
                continue
            name = self._names.get(section - 1)
            if name is None:
                broken = f"an open section has number {section - 1}, which has no name"
                continue
            found.append(OpenSection(name, since_ns, iteration if iteration >= 0 else None))
        found.sort(key=lambda o: o.since_ns)
        return tuple(found), broken

    def _read_exception(self, words: tuple[int, ...]) -> tuple[int, str] | None:
        at_ns = words[layout.EXCEPTION_NS]
        if not at_ns:
            return None
        return at_ns, self._text(layout.EXCEPTION_TEXT, words[layout.EXCEPTION_BYTES])

    def _read_rerun(self, words: tuple[int, ...]) -> RerunReport | None:
        status = words[layout.RERUN_STATUS]
        if not status:
            return None
        return RerunReport(status, words[layout.RERUN_ITERATION], self._text(layout.RERUN_TEXT, words[layout.RERUN_BYTES]))

    def _text(self, at: int, size: int) -> str:
        return _printable(self._map[at * 8 : at * 8 + min(max(size, 0), layout.TEXT_BYTES)])


def _printable(data: bytes) -> str:
    """Text that is fit for a log line and a terminal, whatever the bytes."""
    return "".join(c if c.isprintable() else " " for c in data.decode("utf-8", "replace"))
