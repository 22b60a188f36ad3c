"""Who may commit a checkpoint, decided by the storage itself, so that an owner who was asleep cannot overwrite what came after.

In the checkpoint folder lie two kinds of small files:
- `fence.<n>`, created exclusively: whoever creates the highest number owns the folder. A cycle claims one when it loads.
- `latest.<n>`, written by the owner of fence n alone: the names committed, newest first. Loaders take the highest n.

A claim reads what is there, chooses, and *at once* writes the choice as its own `latest.<n>`. From then on whatever an older owner still writes goes to a
lower number that nobody reads, even when it had passed its last check before it fell asleep and renames its file an hour later. That holds for "nothing usable"
too: the names known at the claim are carried on, to be tried again, and later ones are not.

The record does not protect the checkpoint's own files: give them names that no other owner uses (`f"step_{i}.{fence.number}"`) and commit when they are complete.

Standard library only; works where O_EXCL and rename are atomic (local file systems, Lustre, GPFS, NFS since version 3). Knows nothing of torch, ranks or the
launcher: rank 0 claims and broadcasts `chosen`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FORMAT = "ft-latest/1"
NAMES_KEPT = 8
NUMBERS_KEPT = 16
MOST_BYTES = 64 * 1024
MOST_TRIES = 10_000
_FILE = re.compile(r"(fence|latest)\.([1-9][0-9]{0,17})")
_TEMP = re.compile(r"\.latest\.([1-9][0-9]{0,17})\.[0-9a-f]+\.tmp")


class FenceLost(RuntimeError):  # noqa: N818  a state of affairs, not a mistake
    """A newer owner has claimed the folder: this process may commit nothing more, and what it just committed will not be loaded."""


class CheckpointFence:
    """Ownership of a checkpoint folder; `CheckpointFence.claim` makes it. `number` is the fence's, `chosen` the checkpoint to load (None: start afresh)."""

    def __init__(self, folder: Path, number: int, chosen: str | None, names: list[str]) -> None:
        self.folder = folder
        self.number = number
        self.chosen = chosen
        self._names = names

    @classmethod
    def claim(cls, folder: str | os.PathLike[str], usable: Callable[[str], bool], candidates: Iterable[str] = ()) -> CheckpointFence:
        """Becomes the owner of `folder` (made when missing) and chooses the newest committed checkpoint for which `usable(name)` is true.

        `candidates` are names to try after those, newest first: for a folder that was filled before it had fences. What was newer than the choice is forgotten.
        Raises OSError when the folder cannot be written; whatever `usable` raises passes through, and the claim then is void.
        """
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        number = _create_fence(home)
        known = list(dict.fromkeys([*_newest_names(home, below=number), *candidates]))
        at = next((i for i, name in enumerate(known) if usable(name)), None)
        fence = cls(home, number, None if at is None else known[at], known[at or 0 :][:NAMES_KEPT])
        try:
            fence._write()
        except FileNotFoundError:
            if (
                fence.held()
            ):  # else a newer owner has removed what we had half written: we are superseded already, the first commit will say so
                raise
        _tidy(home, number)
        return fence

    def held(self) -> bool:
        """Whether no newer owner has claimed the folder."""
        return _highest(self.folder) <= self.number

    def commit(self, name: str) -> None:
        """Makes `name` the checkpoint that the next claim tries first; durable on return. The checkpoint's files must be complete and durable before.

        Raises FenceLost when a newer owner has claimed the folder, before or while this was written (then no claim loads it), OSError when it cannot be written,
        ValueError for a name that is empty or longer than 1,024 characters.
        """
        if not name or len(name) > 1024:
            raise ValueError(f"checkpoint name of {len(name)} characters: must have 1 to 1024")
        self._check()
        names, self._names = self._names, [name, *(n for n in self._names if n != name)][:NAMES_KEPT]
        try:
            self._write()
        except OSError:
            self._names = names
            self._check()  # a newer owner removes what older ones had half written: that is why it failed
            raise
        self._check()

    def _check(self) -> None:
        newest = _highest(self.folder)
        if newest > self.number:
            claimed_by = _run_of(self.folder, newest)
            of = f" of run {claimed_by}" if claimed_by else ""
            raise FenceLost(
                f"fence {self.number} is superseded by fence {newest}{of}: a newer owner has {self.folder}, commit nothing and end"
            )

    def _write(self) -> None:
        record = json.dumps({"format": FORMAT, "fence": self.number, "names": self._names})
        temp = self.folder / f".latest.{self.number}.{secrets.token_hex(8)}.tmp"
        try:
            _write_new(temp, record)
            temp.replace(self.folder / f"latest.{self.number}")
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)


def newest_commit(folder: str | os.PathLike[str]) -> str | None:
    """The newest committed checkpoint's name, None when nothing (readable) was committed or there is no such folder. For looking; to load, claim."""
    names = _newest_names(Path(folder))
    return names[0] if names else None


def _create_fence(folder: Path) -> int:
    """Creates the lowest fence above everything there; each call that returns, in whatever process, got a number of its own."""
    number = _highest(folder) + 1
    owner = json.dumps(
        {"run": os.environ.get("FT_RUN_ID"), "host": socket.gethostname(), "pid": os.getpid(), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    )
    for number in range(number, number + MOST_TRIES):  # noqa: B020  the first free one from there
        try:
            _write_new(folder / f"fence.{number}", owner)
        except FileExistsError:
            continue
        _sync_folder(folder)
        return number
    raise OSError(errno.EEXIST, f"no free fence number in {MOST_TRIES} tries", str(folder))


def _run_of(folder: Path, number: int) -> str | None:
    """The run (FT_RUN_ID) whose rank claimed this fence, where that is on record."""
    owner = _read_record(folder / f"fence.{number}")
    run = owner.get("run") if owner is not None else None
    return run if isinstance(run, str) and run.isprintable() and len(run) <= 256 else None


def _numbered(folder: Path, kind: str) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            if match and match[1] == kind:
                yield int(match[2])


def _highest(folder: Path) -> int:
    """The highest number in use; a `latest` counts too, for someone may have removed the fences."""
    return max((*_numbered(folder, "fence"), *_numbered(folder, "latest")), default=0)


def _newest_names(folder: Path, below: int | None = None) -> list[str]:
    """The names in the highest readable `latest`; damaged and foreign ones are passed over."""
    try:
        numbers = sorted(_numbered(folder, "latest"), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for number in numbers:
        names = None if below is not None and number >= below else _read(folder / f"latest.{number}", number)
        if names is not None:
            return names
    return []


def _read(path: Path, number: int) -> list[str] | None:
    record = _read_record(path)
    if record is None or record.get("format") != FORMAT or record.get("fence") != number:
        return None
    names = record.get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return None
    return names


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO of that name must not stop us
        with open(fd, "rb") as file:
            record = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _write_new(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that cannot do it to a folder
            raise
    finally:
        os.close(fd)


def _tidy(folder: Path, number: int) -> None:
    """Removes what older owners left half written, and all but the last numbers; others may do the same at the same time."""
    for entry in os.listdir(folder):
        temp, file = _TEMP.fullmatch(entry), _FILE.fullmatch(entry)
        if (temp and int(temp[1]) < number) or (file and int(file[2]) <= number - NUMBERS_KEPT):
            try:
                (folder / entry).unlink()
            except OSError:
                continue
