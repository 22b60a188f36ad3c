"""How many GPUs this process may use, found without torch and without initialising CUDA.

Asks, in this order: NVML (the driver's own library; it also honours the device limits of a container or a Slurm step), the driver's
folder in /proc, the device files. What CUDA_VISIBLE_DEVICES hides is then taken away; where no source knows any device, that list itself
is believed. Knows counts only; who uses which device is the agent's business.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/"), load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> int:
    """GPUs that a rank started from here would see, 0 where there are none."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and visible(listed, None) == 0:
        return 0
    present = _nvml(load) or _proc(root) or _device_files(root)
    return present if listed is None else visible(listed, present or None)


def visible(listed: str, present: int | None) -> int:
    """Devices that CUDA_VISIBLE_DEVICES=`listed` leaves of `present` (None: unknown how many there are).

    CUDA's rule: the list counts up to its first entry that names no device, and a list that names one twice names none. Entries that
    are no numbers (GPU-..., MIG-...) are believed.
    """
    seen: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        number = int(entry) if entry.isascii() and entry.lstrip("-").isdigit() else None
        if not entry or (number is not None and (number < 0 or (present is not None and number >= present))):
            break
        seen.append(entry if number is None else str(number))
    return len(seen) if len(set(seen)) == len(seen) else 0


def _nvml(load: Callable[[str], ctypes.CDLL]) -> int | None:
    """NVML's count, None where there is no NVML or it does not answer. NVML is shut down again, which closes its device files."""
    try:
        library = load("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            found = ctypes.c_uint(0)
            return found.value if library.nvmlDeviceGetCount_v2(ctypes.byref(found)) == 0 else None
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _proc(root: Path) -> int:
    try:
        return sum(1 for _ in (root / "proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return 0


def _device_files(root: Path) -> int:
    try:
        return sum(1 for path in (root / "dev").iterdir() if path.name.startswith("nvidia") and path.name[6:].isdigit())
    except OSError:
        return 0
