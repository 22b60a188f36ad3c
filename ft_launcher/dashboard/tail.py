"""Reading the journals of a run folder as they grow: each line is read and parsed once, however often somebody looks.

A journal belongs to its node's writer thread; this only follows it. Tolerates what happens to files: a line half written (kept until the rest comes), a journal replaced or cut
short (read anew), a folder that goes away and comes back. Knows lines, not what they mean (`board`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_LOOK_BYTES = 64 << 20
"""So much of all journals together is read at the first look; what is older is history that ft_state.json keeps."""
_LEAST_BYTES = 256 << 10
_CHUNK_BYTES = 1 << 20
_LINE_MAX_BYTES = 2 << 20
_IDLE = (b'"kind":"said"', b'"kind":"note"', b'"kind":"launch"', b'"kind":"timeout"', b'"kind":"nvrx-')
"""Lines that no derivation needs are not parsed."""


@dataclass(slots=True)
class _Place:
    """How far one file has been read. `rest`: the beginning of a line whose end is not written yet; `torn`: the read began in the middle of a line."""

    inode: int
    offset: int
    rest: bytes = b""
    torn: bool = False


class JournalTail:
    """Follows `journal.*.jsonl` of one folder. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}
        self._looked = False

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        """The lines since the last call. The flag says that a file was replaced: what was told before is void and the lines begin anew."""
        found = self._files()
        if any(self._was_replaced(name, status) for name, status in found):
            self._places.clear()
            return True, self._poll(found)
        return False, self._poll(found)

    def _poll(self, found: list[tuple[str, os.stat_result]]) -> list[dict[str, Any]]:
        first, self._looked = not self._looked, True
        share = max(_LEAST_BYTES, FIRST_LOOK_BYTES // max(1, len(found)))
        lines: list[dict[str, Any]] = []
        for name, status in found:
            place = self._places.get(name)
            if place is None:
                start = max(0, status.st_size - share) if first else 0
                place = self._places[name] = _Place(status.st_ino, start, torn=start > 0)
            if status.st_size > place.offset:
                lines += self._grown(self.folder / name, place)
        return lines

    def _files(self) -> list[tuple[str, os.stat_result]]:
        try:
            with os.scandir(self.folder) as entries:
                found = [
                    (e.name, e.stat())
                    for e in entries
                    if e.name.startswith("journal.") and e.name.endswith(".jsonl") and e.is_file(follow_symlinks=False)
                ]
        except OSError:
            return []
        return sorted(found, key=lambda pair: pair[0])

    def _was_replaced(self, name: str, status: os.stat_result) -> bool:
        place = self._places.get(name)
        return place is not None and (place.inode != status.st_ino or status.st_size < place.offset)

    def _grown(self, path: Path, place: _Place) -> Iterator[dict[str, Any]]:
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                while data := file.read(_CHUNK_BYTES):
                    place.offset += len(data)
                    yield from self._lines(place, data)
        except OSError:
            return

    def _lines(self, place: _Place, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, place.rest = (place.rest + data).split(b"\n")
        if len(place.rest) > _LINE_MAX_BYTES:
            place.rest, place.torn = b"", True
        for line in lines:
            torn, place.torn = place.torn, False
            if not torn and (event := _event_in(line)) is not None:
                yield event


def _event_in(line: bytes) -> dict[str, Any] | None:
    if not line or any(kind in line[:400] for kind in _IDLE):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None
