"""Checkpoints on disk: complete or absent, whatever dies and whenever.

Knows: names, a manifest of sizes and checksums written last, one rename. A save writes under a temporary name; only when every file is on
the disk does it get its manifest and its final name. A name carries iteration and fence number, so no two owners of the folder ever write to
the same one and nothing that exists is ever replaced. Must never know what is in the files: no torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "ft-example-checkpoint/1"
TEMPORARY = ".tmp-"
OLDEST = (0, 0, False)
FAULT = ".fault"
NAME = re.compile(rf"iter_(\d{{7,}})\.f(\d{{4,}})({re.escape(FAULT)})?")


def name_of(iteration: int, fence: int, fault: bool = False) -> str:
    """The name of the checkpoint after `iteration`, written by the owner of `fence`; with `fault` the one that also holds a disputed step, for another device to compute."""
    return f"iter_{iteration:07d}.f{fence:04d}" + (FAULT if fault else "")


def checkpoints(folder: Path) -> list[str]:
    """Names of the finished checkpoints, newest (by fence, then iteration) first; whether they are intact is another question."""
    if not folder.is_dir():
        return []
    return sorted((entry.name for entry in folder.iterdir() if NAME.fullmatch(entry.name)), key=_order, reverse=True)


def digest(path: Path, sync: bool = False) -> tuple[int, str]:
    """(size in bytes, SHA-256) of a file; with `sync`, after its content has reached the disk."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, checksum


def seal(folder: Path, name: str, files: Mapping[str, tuple[int, str]], run: Mapping[str, Any]) -> None:
    """Turn the finished temporary folder of `name` into a checkpoint: the manifest, then the rename. `run` says who wrote it."""
    temporary = folder / (TEMPORARY + name)
    manifest = {"schema": FORMAT, "run": dict(run), "files": {file: list(found) for file, found in sorted(files.items())}}
    with (temporary / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    temporary.rename(folder / name)
    _sync_folder(folder)


def manifest_of(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest, or None where it is missing, torn or of another format."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        good = manifest["schema"] == FORMAT and bool(manifest["files"]) and isinstance(manifest["run"], dict)
        sized = all(isinstance(size, int) and isinstance(checksum, str) for size, checksum in manifest["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if good and sized else None


def damage(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint, in a few words, or None. Looks at every `shares`-th file from `share` on, so that ranks divide the work."""
    manifest = manifest_of(checkpoint)
    if manifest is None:
        return f"{MANIFEST} is missing or torn"
    for name, (size, checksum) in sorted(manifest["files"].items())[share::shares]:
        try:
            found = digest(checkpoint / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != (size, checksum):
            return f"{name} has {found[0]} bytes instead of {size}" if found[0] != size else f"{name} does not match its checksum"
    return None


def sweep(folder: Path, fence: int) -> None:
    """Remove what killed saves of older owners have left behind."""
    for entry in folder.glob(f"{TEMPORARY}*"):
        if 0 < _order(entry.name.removeprefix(TEMPORARY))[0] < fence:
            shutil.rmtree(entry, ignore_errors=True)


def prune(folder: Path, keep: int, fence: int, chosen: str | None) -> None:
    """Keep the `keep` newest checkpoints of this line: those of `fence`, its owner calling, and those up to `chosen`, which it resumed from.

    Others (damaged, or finished by an older owner that had lost the folder) don't count; they go once `fence` has `keep` of its own. Dying midway
    leaves a temporary name for `sweep`.
    """
    resumed = _order(chosen) if chosen else OLDEST
    found = checkpoints(folder)
    line = [name for name in found if _order(name) <= resumed or _order(name)[0] >= fence]
    strays = set(found) - set(line)
    settled = len(line) >= keep and all(_order(name)[0] >= fence for name in line[:keep])
    for name in line[keep:] + (sorted(strays) if settled else []):
        condemned = folder / (TEMPORARY + name)
        (folder / name).rename(condemned)
        shutil.rmtree(condemned, ignore_errors=True)


def _order(name: str) -> tuple[int, int, bool]:
    """(fence, iteration, whether it holds a disputed step): newer is higher."""
    match = NAME.fullmatch(name)
    return (int(match[2]), int(match[1]), bool(match[3])) if match else OLDEST


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
