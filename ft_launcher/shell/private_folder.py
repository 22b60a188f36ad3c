"""A folder for this process's sockets: short enough for their addresses, open to nobody else, and gone at the end.

A unix socket's path may have 107 bytes, and TMPDIR can be longer than that alone, so the folder is made in the first place that is short enough. Its owner holds a lock in it
as long as it lives; what an owner that was killed has left (its lock is free) the next one clears away. Knows nothing of what the sockets are for.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ft_launcher.errors import PlatformError

PREFIX = "ft-launch-"
MAX_PATH_BYTES = 107
ROOM_BYTES = 40
"""For the folder's own name and the socket's."""
_LOCK = "lock"
_YOUNG_S = 60.0
"""A folder without a lock that is younger than this may be about to get one."""


class PrivateFolder:
    """Mode 0700, with the lock. Raises PlatformError when there is no place for one. `close()` removes it with everything in it."""

    def __init__(self, places: Iterable[str] | None = None) -> None:
        self.path, self._lock_fd = "", -1
        tried = []
        for place in dict.fromkeys(_places() if places is None else places):
            try:
                self.path = self._make(place)
                return
            except OSError as error:
                tried.append(f"{place}: {error.strerror or error}")
        raise PlatformError(
            f"no folder for unix sockets could be made ({'; '.join(tried)}); set TMPDIR to a writable folder with a short name"
        )

    def _make(self, place: str) -> str:
        if len(os.fsencode(place)) > MAX_PATH_BYTES - ROOM_BYTES:
            raise OSError(0, f"its name is longer than {MAX_PATH_BYTES - ROOM_BYTES} bytes")
        sweep(place)
        path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        self._lock_fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        return path

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock_fd >= 0:
            _remove(self.path)
            os.close(self._lock_fd)
            self._lock_fd = -1


def sweep(place: str) -> None:
    """Remove the folders that dead owners (of this user) have left in `place`."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _abandoned(entry):
                _remove(entry.path)


def _abandoned(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        about = entry.stat(follow_symlinks=False)
        if about.st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
            return False
        try:
            fd = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return time.time() - about.st_mtime > _YOUNG_S
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(fd)
    return False


def _remove(path: str) -> None:
    """A flat folder: only files of ours are in it."""
    folder = Path(path)
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                file.unlink()
        folder.rmdir()


def _places() -> list[str]:
    return [tempfile.gettempdir(), *filter(None, [os.environ.get("XDG_RUNTIME_DIR")]), "/tmp", "/var/tmp", "/dev/shm"]
