"""The two process attributes that Python does not offer: the signal at the parent's death, and adopting orphans.

Both belong to the calling process (strictly: the death signal follows the *thread* that forked it, so fork from the main thread). It knows prctl(2) and
nothing of ranks. `import ctypes` happens here, once, so that a freshly forked rank has it loaded already.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_LIBC.prctl.restype = ctypes.c_int


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(sig: signal.Signals, parent: int) -> bool:
    """Asks the kernel for `sig` when the parent's forking thread ends. False when `parent` is gone already: the request then came too late.

    The setting survives exec and is not inherited by children. Raises OSError when the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))
    return os.getppid() == parent


def become_subreaper() -> None:
    """Orphans below this process become its own children instead of init's. Survives exec, is not inherited. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def clear_c_environment() -> None:
    """Empties the C library's environment, also of what a C library put there behind Python's back."""
    _LIBC.clearenv()
