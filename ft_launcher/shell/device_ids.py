"""Which device stands behind each slot, by a name that stays the same whatever is plugged, renumbered or restarted.

Slot i computes on the i-th device that the rank can see, which is what LOCAL_RANK means to training scripts. Said by FT_DEVICES, else by NVML (GPU UUIDs, seen through
CUDA_VISIBLE_DEVICES), else nothing is known, and the hardware ledger keeps slots instead. The driver is asked once, at the start, by a helper process that can be killed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.errors import ConfigError
from ft_launcher.shell.device_nvml import LIBRARY

ASK_S = 20.0
"""A driver without persistence mode takes seconds to wake its devices; one that takes longer is broken, and then nothing is known of them."""
VARIABLE = "FT_DEVICES"
_INSIDE_A_RANK = "FT_SLOT"
"""Set for every rank: in a launcher that a rank starts, the names are those of the outer run."""


@dataclass(frozen=True, slots=True)
class Devices:
    """`names`: one for each slot, or none. `watched`: the GPUs that ranks here can see, whose memory NVML can tell."""

    names: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


def device_ids(nproc: int, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The device of each of `nproc` slots, in slot order; empty where that is not known, or where there are fewer devices than slots. Raises ConfigError for a wrong FT_DEVICES."""
    return find_devices(nproc, environ).names


def find_devices(nproc: int, environ: Mapping[str, str] = os.environ) -> Devices:
    """See `device_ids`. Blocks, for at most ASK_S; costs nothing where the driver's library is not installed."""
    given = environ.get(VARIABLE, "").strip() if _INSIDE_A_RANK not in environ else ""
    names = _given(given, nproc) if given else None
    seen = visible(_ask(environ), environ.get("CUDA_VISIBLE_DEVICES")) if _has_nvml() else ()
    if names is None:
        names = seen[:nproc] if len(seen) >= nproc else ()
    return Devices(names, seen)


def _given(text: str, nproc: int) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if len(names) != nproc or not all(names) or len(set(names)) != len(names):
        raise ConfigError(
            f"{VARIABLE}={text[:80]!r}: give one name for each of the {nproc} ranks of this node, separated by commas, none twice"
        )
    return names


def visible(present: Sequence[str], listed: str | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES=`listed` leaves of the `present` UUIDs, in its order.

    CUDA's rules: numbers count devices, texts name one by its UUID or the beginning of it, the list ends at the first entry that names none, and one that names a device twice
    names none. Numbers follow the PCI bus here; CUDA's own order differs only on a machine with unlike GPUs and without CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if listed is None:
        return tuple(present)
    seen: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        found = _named(entry, present)
        if found is None:
            break
        seen.append(found)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


def _named(entry: str, present: Sequence[str]) -> str | None:
    """The device that one entry names. A MIG device is not among the GPUs: its full name is believed."""
    if entry.isascii() and entry.isdigit():
        return present[int(entry)] if int(entry) < len(present) else None
    if entry.startswith("MIG-"):
        return entry
    found = [uuid for uuid in present if entry and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _has_nvml() -> bool:
    """Loading the library asks the driver nothing."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def helper_command(*arguments: str) -> list[str]:
    """How a device helper is started: this interpreter, nothing of the user's, 20 ms."""
    root = str(Path(__file__).resolve().parents[2])
    boot = "import sys; sys.path.append(sys.argv.pop(1)); from ft_launcher.shell.device_helper import main; main(sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", boot, root, *arguments]


def _ask(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The UUIDs of all GPUs; none where the driver does not tell."""
    try:
        helper = subprocess.Popen(
            helper_command("names"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return ()
    try:
        said, _ = helper.communicate(timeout=ASK_S)
    except subprocess.TimeoutExpired:
        helper.kill()  # and not waited for: it may hang in the kernel
        return ()
    return tuple(said.split()) if helper.returncode == 0 else ()
