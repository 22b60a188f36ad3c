"""Replacing a file so that every reader, at every moment, sees the old one or the new one, whole.

A temporary file in the same directory, written and fsynced, renamed over the target, the directory fsynced. Knows files and bytes; must
never know what is in them. A symbolic link at the target is followed (Megatron's checkpoint folder may link to our file), not replaced.
Leftovers of writers that were killed are swept by the next writer, by age on the file system's own clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

_SWEEP_AGE_S = 600.0
_DIR_FSYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def stage(path: Path, data: bytes) -> Path:
    """Writes and fsyncs `data` beside `path` (its directory is created where missing); returns the temporary file. Raises `OSError` and
    leaves nothing behind.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(handle, data)
        _keep_mode(handle, target)
        os.fsync(handle)
    except BaseException:
        discard(temp)
        raise
    finally:
        os.close(handle)
    return temp


def commit(temp: Path, path: Path) -> None:
    """Renames the staged file over `path` and makes the rename durable. Raises `OSError` (the temporary file is removed)."""
    target = Path(os.path.realpath(path))
    try:
        temp.replace(target)
    except OSError:
        discard(temp)
        raise
    sync_directory(target.parent)


def discard(temp: Path) -> None:
    """Removes a staged file that is not wanted any more; never raises."""
    with contextlib.suppress(OSError):
        temp.unlink()


def write_atomic(path: Path, data: bytes) -> None:
    """Stage and commit in one. Raises `OSError`; the old content is then still there."""
    commit(stage(path, data), path)


def sync_directory(folder: Path) -> None:
    """Makes renames and new names in `folder` durable; file systems that cannot are left alone. Raises `OSError` for real trouble (EIO,
    ENOSPC).
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _DIR_FSYNC_UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def sweep(path: Path) -> None:
    """Removes temporary files that killed writers of `path` left more than ten minutes ago (by the file system's own clock); never
    raises.
    """
    target = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):
        newest = target.stat().st_mtime
        for name in os.listdir(target.parent):
            if name.startswith(f".{target.name}.") and name.endswith(".tmp"):
                _remove_if_old(target.parent / name, newest)


def _remove_if_old(temp: Path, now_s: float) -> None:
    with contextlib.suppress(OSError):
        if now_s - temp.stat().st_mtime > _SWEEP_AGE_S:
            temp.unlink()


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _keep_mode(handle: int, target: Path) -> None:
    """An operator's chmod survives our rewrite; who may not (another owner's file) gets the umask's."""
    with contextlib.suppress(OSError):
        os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
