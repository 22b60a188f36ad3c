"""OpenBLAS starts its threads when numpy is imported, and a process with threads is no zygote. So it is told "one thread" there, and the real number in each
rank.

The number a fresh interpreter would use is OPENBLAS_NUM_THREADS, else OMP_NUM_THREADS, else one thread for each core it may run on. Raising it starts the
threads in the rank, where a fresh import would have started them. Knows OpenBLAS' entry points as numpy's and scipy's wheels name them; nothing else.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable

VARIABLE = "OPENBLAS_NUM_THREADS"
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_NO_LOAD = getattr(os, "RTLD_NOLOAD", 4)


def thread_setter() -> Callable[[], None] | None:
    """For the zygote, after its imports: what each rank calls to have the threads that a fresh interpreter has. None without OpenBLAS."""
    setters = [setter for path in _mapped() if (setter := _setter(path)) is not None]
    if not setters:
        return None

    def restore() -> None:
        count = wanted_threads()
        if count > 1:
            for setter in setters:
                setter(count)

    return restore


def wanted_threads() -> int:
    """The number of threads OpenBLAS would choose in a fresh process with this process's environment."""
    for name in (VARIABLE, "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))


def _mapped() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps if "openblas" in line}
    return sorted("/" + path for path in paths if re.search(r"openblas[^/]*\.so", path))


def _setter(path: str) -> Callable[[int], object] | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | _NO_LOAD)
    except OSError:
        return None
    found = next((name for name in _SETTERS if hasattr(library, name)), None)
    if found is None:
        return None
    setter: Callable[[int], object] = getattr(library, found)
    return setter
