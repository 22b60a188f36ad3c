"""ft_state.json on disk: loaded whatever has become of it, saved so that nothing is lost.

`FtStateFile` is used by one thread at a time (the agent's writer thread; loading happens at start). Beside the file lies `<name>.bak`, a
second copy in an inode of its own, for Megatron rewrites `ft_state.json` in place. What is not ours is never destroyed: it is kept as
`<name>.<what>.saved`. Content never raises; only a file system that refuses to write does (`OSError`), and the caller says that once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_launcher.state.atomic import commit, discard, stage, sweep, write_atomic
from ft_launcher.state.document import Document, empty
from ft_launcher.state.history import is_older, run_id, united
from ft_launcher.state.reading import Found, Look, look, signature_of

LOAD_PATIENCE_S = 0.3
SAVE_PATIENCE_S = 0.1
_ATTEMPTS = 5
_KEEP_DAMAGED = 3
_MAX_DEPTH = 40
_LINE_PER_ENTRY = ("sections", "cycles", "earlier_runs", "hardware", "budgets")


@dataclass(frozen=True, slots=True)
class Loaded:
    """`document` is None where nothing usable exists (a first run); `notes` are lines for the log, none where all was well."""

    document: Document | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """`document` is what the file holds now, `replaced` what it held before; `written` is False where a newer document of the same run was
    there, or nothing needed to be done.
    """

    document: Document
    written: bool
    notes: tuple[str, ...] = ()
    newer_there: bool = False
    replaced: Document | None = None


class FtStateFile:
    """The file at `path` and its copy. Remembers foreign timeouts until our own change: the last who stated them is believed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backup = path.with_name(path.name + ".bak")
        self._ours_then: dict[str, Any] | None = None
        self._foreign: dict[str, Any] | None = None
        self._swept = False

    def load(self) -> Loaded:
        """The document on disk, else the last good copy, else None; merged with timeouts that another program wrote in its place. Never
        raises, never writes.
        """
        seen = look(self.path, LOAD_PATIENCE_S)
        if seen.document is not None:
            return Loaded(seen.document, seen.notes)
        spare = look(self.backup)
        if seen.found is Found.MISSING and spare.found is Found.MISSING:
            return Loaded(None)
        notes = [*seen.notes] or ([f"{self.path}: missing"] if seen.found is Found.MISSING else [])
        document = spare.document
        if seen.timeouts is not None:
            document = {**(document or empty()), "current_timeouts": seen.timeouts}
            notes.append(f"{self.path}: rewritten by another program: its timeouts are taken over")
        notes.append(
            f"using the last good copy {self.backup}" if spare.document is not None else "no good copy of the history: starting without"
        )
        return Loaded(document, (*notes, *spare.notes))

    def save(self, document: Document) -> Saved:
        """Writes `document`, merged with what only the disk knows, to the file and its copy.

        A document older than the one on disk (same run id; generation, cycle, revision) is refused. Raises `OSError` where the file
        cannot be written; the old content is then still there. A copy that cannot be written is only a note.
        """
        return self._save(document, SAVE_PATIENCE_S)

    def restore_if_torn(self, document: Document) -> Saved:
        """Before each cycle: writes `document` where the file is not one that both we and NVRx's plain `json.load` can use; else does
        nothing. Raises `OSError`.
        """
        seen = look(self.path)
        if seen.intact:
            return Saved(document, written=False)
        saved = self._save(document, patience_s=0.0)  # the ranks are gone: nobody is in the middle of writing
        return replace(saved, notes=(*seen.notes, *(note for note in saved.notes if note not in seen.notes)))

    def _save(self, document: Document, patience_s: float) -> Saved:
        for _ in range(_ATTEMPTS):
            saved = self._try_save(document, look(self.path, patience_s))
            if saved is not None:
                return saved
        raise OSError(0, f"changed {_ATTEMPTS} times while being written", str(self.path))

    def _try_save(self, document: Document, seen: Look) -> Saved | None:
        """One attempt; None where somebody changed the file between our look and our rename."""
        disk, notes = self._on_disk(seen)
        if disk is not None and is_older(document, disk):
            refused = f"{self.path}: holds a newer state of run {run_id(disk)}: this older one is not written"
            return Saved(disk, written=False, notes=(*notes, refused), newer_there=True)
        merged = self._with_foreign(united(document, disk) if disk is not None else document, seen)
        data, plain_notes = render(merged)
        temp = stage(self.path, data)
        if signature_of(self.path) != seen.signature:
            discard(temp)
            return None
        try:
            notes += self._keep_aside(seen)
        except OSError:
            discard(temp)
            raise
        commit(temp, self.path)
        return Saved(merged, written=True, notes=(*notes, *plain_notes, *self._copy(data)), replaced=disk)

    def _on_disk(self, seen: Look) -> tuple[Document | None, list[str]]:
        """What was last written, from the file or, where that is no longer ours, from the copy."""
        notes = list(seen.notes)
        if seen.document is not None:
            return seen.document, notes
        return look(self.backup).document, notes

    def _with_foreign(self, document: Document, seen: Look) -> Document:
        ours = document.get("current_timeouts")
        if seen.timeouts is not None:
            self._foreign, self._ours_then = seen.timeouts, ours
        if self._foreign is None or ours != self._ours_then:
            self._foreign = None
            return document
        return {**document, "current_timeouts": self._foreign}

    def _keep_aside(self, seen: Look) -> list[str]:
        """Moves what is not ours out of the way, under a name that says what it is."""
        labels = {
            Found.OTHER_VERSION: seen.version,
            Found.STRANGE: "not-ft-state",
            Found.DAMAGED: "damaged",
            Found.UNREADABLE: "unreadable",
        }
        label = labels.get(seen.found)
        if label is None or (seen.signature is None) or self.path.is_dir():
            return []
        target = Path(os.path.realpath(self.path))
        safe = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in label) or "unnamed"
        for number in range(_KEEP_DAMAGED if seen.found is Found.DAMAGED else 100_000):
            saved = target.with_name(f"{target.name}.{safe}{f'.{number}' if number else ''}.saved")
            if not saved.exists() and not saved.is_symlink():
                target.rename(saved)
                return [f"{self.path}: kept as {saved.name}"]
        return []

    def _copy(self, data: bytes) -> tuple[str, ...]:
        if not self._swept:
            self._swept = True
            sweep(self.path)
            sweep(self.backup)
        try:
            write_atomic(self.backup, data)
        except OSError as error:
            return (f"{self.backup}: the copy was not written ({error.strerror or error})",)
        return ()


def render(document: Document) -> tuple[bytes, tuple[str, ...]]:
    """The document as bytes, one line for each cycle, section and device: quick to write, easy to read and to compare. Numbers that JSON
    has not become null.
    """
    try:
        return _lines(document), ()
    except (TypeError, ValueError):
        return _lines(_plain(document, 0)), ("ft_state: values that JSON cannot hold were written as null or text",)


def _lines(document: Document) -> bytes:
    shown = ((key, _entries(value) if key in _LINE_PER_ENTRY and value else _dumps(value)) for key, value in document.items())
    parts = [f" {_dumps(key)}: {text}" for key, text in shown]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode("ascii")


def _entries(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {_dumps(str(key))}: {_dumps(entry)}" for key, entry in value.items()) + "\n }"
    return "[\n" + ",\n".join(f"  {_dumps(entry)}" for entry in value) + "\n ]"


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if depth < _MAX_DEPTH and isinstance(value, dict):
        return {str(key): _plain(entry, depth + 1) for key, entry in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry, depth + 1) for entry in value]
    with contextlib.suppress(Exception):
        return str(value)
    return None
