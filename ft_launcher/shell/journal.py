"""What happened, in order: `journal.<node>.jsonl`, one event or decision a line, and the reading of it.

A line is written once and never changed. Each node writes its own file; merged by the store's revision they tell one story. Lines are
serialised by the caller (so that nothing can change afterwards) and written by the writer thread. Readers are tolerant: a process killed
in the middle of a line leaves a torn one, which is skipped and counted. Knows nothing of what the events mean.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ft_launcher.shell.writer import Keep, Writer

LANE = "journal"
_LINE_MAX_BYTES = 1 << 20
_OWN_KEYS = ("t", "mono_ns", "node", "rev", "cycle", "kind")

_Key = tuple[int, str, int, int]


def utc_now() -> str:
    """Wall-clock time as the project's files write it: ISO 8601, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Journal:
    """Appends to one node's journal through the writer thread; never blocks, never raises."""

    def __init__(self, writer: Writer, path: Path, node: str) -> None:
        self.path = path
        self._writer = writer
        self._node = node
        self._file = _AppendFile(path)

    def record(self, kind: str, cycle: int | None, revision: int | None = None, /, **fields: Any) -> None:
        """One event or decision, now. `revision` is the store's, None for what the store does not know; a field may not replace the
        line's own keys.
        """
        line: dict[str, Any] = {
            "t": utc_now(), "mono_ns": time.monotonic_ns(), "node": self._node, "rev": revision, "cycle": cycle, "kind": kind,
        }  # fmt: skip
        line.update((key if key not in _OWN_KEYS else f"{key}_", value) for key, value in fields.items())
        data = _serialised(line)
        self._writer.submit(LANE, lambda: self._file.append(data), Keep.LINE)


class _AppendFile:
    """An append-only file that survives its folder's deletion and a write that got only half way. Used by the writer thread alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1
        self._torn = False

    def append(self, line: bytes) -> None:
        """Writes the whole line (after ending a torn one). Raises `OSError`; calling again with the same line is then right."""
        self._open_if_gone()
        data = b"\n" + line if self._torn else line
        self._torn = True
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        self._torn = False

    def _open_if_gone(self) -> None:
        if self._handle >= 0 and os.fstat(self._handle).st_nlink > 0:
            return
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._handle).st_size
        self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"

    def __del__(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line: `data` as written, and where it came from."""

    data: dict[str, Any]
    path: Path
    line: int


@dataclass(frozen=True, slots=True)
class RunJournal:
    """All journals of a run, merged; `skipped` lines were torn or no events, `notes` name files that could not be read."""

    entries: tuple[JournalEntry, ...]
    skipped: int
    notes: tuple[str, ...] = ()


def merge(paths: Iterable[Path]) -> RunJournal:
    """The journals as one: by store revision, each file's own order kept; between files of the same revision by wall clock. Never raises
    for content.
    """
    sources: list[Iterator[tuple[_Key, JournalEntry]]] = []
    skipped, notes = 0, list[str]()
    for path in paths:
        try:
            entries, bad = _entries_of(path)
        except OSError as error:
            notes.append(f"{path}: unreadable ({error.strerror or error})")
            continue
        skipped += bad
        sources.append(_keyed(entries, len(sources)))
    return RunJournal(tuple(entry for _, entry in heapq.merge(*sources, key=lambda pair: pair[0])), skipped, tuple(notes))


def read_run(folder: Path) -> RunJournal:
    """All of a run folder's journals, merged; none (and a note) where the folder cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("journal.") and name.endswith(".jsonl"))
    except OSError as error:
        return RunJournal((), 0, (f"{folder}: unreadable ({error.strerror or error})",))
    return merge(folder / name for name in names)


def _keyed(entries: Sequence[JournalEntry], source: int) -> Iterator[tuple[_Key, JournalEntry]]:
    """Entries with a key that never falls within a file: an entry without a revision belongs to the latest one seen before it."""
    revision, moment = -1, ""
    for entry in entries:
        known, written = entry.data.get("rev"), entry.data.get("t")
        if isinstance(known, int) and known > revision:
            revision, moment = known, ""
        moment = max(moment, written if isinstance(written, str) else "")
        yield (revision, moment, source, entry.line), entry


def _entries_of(path: Path) -> tuple[list[JournalEntry], int]:
    entries, skipped = [], 0
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        for number, line in enumerate(file, 1):
            data = _event_in(line)
            if data is not None:
                entries.append(JournalEntry(data, path, number))
            elif line.strip():
                skipped += 1
    return entries, skipped


def _event_in(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a field's own repr may do anything
        return f"<{type(value).__name__}>"


def _serialised(line: dict[str, Any]) -> bytes:
    """One line whatever the fields hold: numbers that JSON lacks and objects become text, a line too long keeps only its own keys."""
    try:
        text = json.dumps(line, default=str, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        text = json.dumps({key: value if key in _OWN_KEYS else _text_of(value) for key, value in line.items()}, separators=(",", ":"))
    if len(text) > _LINE_MAX_BYTES:
        text = json.dumps({**{key: line[key] for key in _OWN_KEYS}, "cut": f"{len(text)} bytes"}, separators=(",", ":"))
    return text.encode("ascii") + b"\n"
