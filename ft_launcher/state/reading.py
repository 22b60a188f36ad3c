"""Looking at a file that may be anything: whose it is, what is in it, what is wrong with it. Reads only, never raises for content.

The file may be ours, Megatron's (`{"current_timeouts": ...}` and nothing else), a later launcher's, somebody's by mistake, torn, huge, a
directory or a pipe. Each look says which, in one line for the log, and carries the file's signature so that a writer can notice that it
changed in the meantime.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ft_launcher.state import nvrx
from ft_launcher.state.document import SCHEMA, Document
from ft_launcher.state.history import has_own_keys, repaired

MAX_BYTES = 64 << 20
_RETRY_S = 0.02


class Found(Enum):
    """Whose file it is."""

    OURS = "ours"
    FOREIGN = "rewritten in NVRx's shape"
    OTHER_VERSION = "another version of ft_state"
    STRANGE = "valid JSON, but no ft_state"
    DAMAGED = "damaged"
    EMPTY = "empty"
    MISSING = "missing"
    UNREADABLE = "unreadable"


Signature = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """What was found. `document` is set (and repaired) for OURS, `timeouts` (validated) for FOREIGN, `version` for OTHER_VERSION."""

    found: Found
    notes: tuple[str, ...] = ()
    document: Document | None = None
    timeouts: dict[str, Any] | None = None
    version: str = ""
    signature: Signature | None = None
    intact: bool = False


class BadJsonError(ValueError):
    """The bytes are no JSON that every reader accepts; the message says why, in a few words."""


def look(path: Path, patience_s: float = 0.0) -> Look:
    """Looks at `path`; while it is empty or damaged (somebody may be rewriting it in place this moment) again for up to `patience_s`."""
    deadline = time.monotonic() + patience_s
    seen = _look_once(path)
    while seen.found in (Found.EMPTY, Found.DAMAGED) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
        seen = _look_once(path)
    return seen


def parse(data: bytes) -> object:
    """The JSON value in `data`. Raises `BadJsonError` for all that a strict reader refuses: NaN, Infinity, numbers too big, not UTF-8,
    too deeply nested.
    """
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadJsonError("not UTF-8") from error
    except RecursionError as error:
        raise BadJsonError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise BadJsonError(f"torn or not JSON: {error.msg}, line {error.lineno} column {error.colno}") from error
    except ValueError as error:
        raise BadJsonError(f"not JSON: {str(error)[:100]}") from error


def signature_of(path: Path) -> Signature | None:
    """(device, inode, size, modification time in ns), None where there is nothing; tells one version of a file from another."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _look_once(path: Path) -> Look:
    try:
        data, signature = _bytes_of(path)
    except FileNotFoundError:
        return Look(Found.MISSING)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return Look(Found.UNREADABLE, (f"{path}: unreadable ({getattr(error, 'strerror', None) or error})",), signature=signature_of(path))
    if not data.strip():
        return Look(Found.EMPTY, (f"{path}: empty",), signature=signature)
    try:
        value = parse(data)
    except BadJsonError as error:
        return Look(Found.DAMAGED, (f"{path}: {error}",), signature=signature)
    return _judge(path, value, signature)


def _bytes_of(path: Path) -> tuple[bytes, Signature]:
    """Content of a regular file; a pipe or a device in its place is refused without being waited for. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb", closefd=True) as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if status.st_size > MAX_BYTES:
            raise OSError(0, f"{status.st_size} bytes, more than {MAX_BYTES}")
        return file.read(status.st_size + 1), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_bytes(path: Path) -> bytes:
    """Content of a regular file of at most `MAX_BYTES`. Raises `OSError`; never waits for a pipe."""
    return _bytes_of(path)[0]


def read_start(path: Path, limit: int) -> bytes:
    """At most the first `limit` bytes of a regular file. Raises `OSError`; never waits for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb", closefd=True) as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(0, "not a regular file")
        return file.read(limit)


def _judge(path: Path, value: object, signature: Signature) -> Look:
    if not isinstance(value, dict):
        return Look(Found.STRANGE, (f"{path}: not a JSON object",), signature=signature)
    if value.get("schema") == SCHEMA:
        document, notes = repaired(value)
        intact = not notes and has_own_keys(value)
        return Look(Found.OURS, tuple(f"{path}: {note}" for note in notes), document, signature=signature, intact=intact)
    if "schema" in value:
        version = str(value["schema"])[:60]
        return Look(Found.OTHER_VERSION, (f"{path}: schema {version!a} is not {SCHEMA!r}",), version=version, signature=signature)
    if set(value) != {"current_timeouts"}:
        return Look(Found.STRANGE, (f"{path}: a JSON object, but not an ft_state",), signature=signature)
    trouble = nvrx.trouble_in(value["current_timeouts"])
    if trouble:
        return Look(Found.FOREIGN, (f"{path}: rewritten by another program, {trouble}: ignored",), signature=signature)
    return Look(Found.FOREIGN, timeouts=value["current_timeouts"], signature=signature)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too big")
    return number
