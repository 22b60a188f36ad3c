"""What a process got at exec, and how a forked rank gets it back: signals, limits, umask, folder, descriptors, environment.

The zygote takes a `Baseline` in its first moments, before anything of its own. A rank restores it, so that it starts like a program started by the agent and
not like a part of the zygote. What *preloaded modules* changed stays where a fresh interpreter's import would have changed it as well: signal handlers,
environment variables, regular files. It knows process attributes; what a rank is, it does not know.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ft_launcher.shell.linux import clear_c_environment

_LIMITS = tuple(value for name, value in sorted(vars(resource).items()) if name.startswith("RLIMIT_"))
_FIRST_OWN_FD = 200  # high, so that the numbers a script meets first (3, 4, ...) are those of a fresh interpreter


@dataclass(frozen=True, slots=True)
class Baseline:
    """Process attributes at a moment; `take` reads them, `restore` writes back those that differ."""

    env: Mapping[str, str]
    umask: int
    limits: Mapping[int, tuple[int, int]]
    mask: frozenset[int]
    handlers: Mapping[int, Any]
    cwd: str

    def restore(self) -> None:
        """Signal handlers, limits, umask and working folder; then the signal mask, so that a signal sent meanwhile finds the right disposition.

        Raises OSError when the folder is gone.
        """
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for limit, pair in self.limits.items():
            if resource.getrlimit(limit) != pair:
                resource.setrlimit(limit, pair)
        os.umask(self.umask)
        os.chdir(self.cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def take() -> Baseline:
    """The attributes of this process now."""
    umask = os.umask(0o077)
    os.umask(umask)
    return Baseline(
        env=dict(os.environ),
        umask=umask,
        limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
        mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        handlers=python_handlers(),
        cwd=os.getcwd(),  # noqa: PTH109  pathlib costs every rank its import
    )


def python_handlers() -> dict[int, Any]:
    """Signal -> its disposition, for those that Python can set again (not SIGKILL and SIGSTOP, not those that a C library handles)."""
    fixed = (signal.SIGKILL, signal.SIGSTOP)
    known = ((int(number), signal.getsignal(number)) for number in signal.valid_signals() if number not in fixed)
    return {number: handler for number, handler in known if handler is not None}


def default_signals() -> None:
    """For a process about to exec: what Python ignores for itself is not ignored for others."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def replace_environment(env: Mapping[str, str]) -> None:
    """Makes `env` the whole environment, of Python (the same os.environ object) and of C."""
    os.environ.clear()
    clear_c_environment()
    os.environ.update(env)


def merged(base: Mapping[str, str], overrides: Mapping[str, str | None]) -> dict[str, str]:
    """`base` with the overrides applied; None unsets."""
    out = {**base, **{name: value for name, value in overrides.items() if value is not None}}
    for name in (name for name, value in overrides.items() if value is None):
        out.pop(name, None)
    return out


def open_fds() -> set[int]:
    """The descriptors open in this process."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in found if _is_open(fd)}  # the listing's own is in the list, and closed by now


def move_high(fd: int) -> int:
    """A duplicate of `fd` with a high number, inheritable: it survives an exec of the rank, by us or by the script. Closes `fd`."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = _FIRST_OWN_FD if soft == resource.RLIM_INFINITY else min(_FIRST_OWN_FD, soft - 16)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD, max(3, first))
    os.close(fd)
    return moved


def keep_only(keep: Collection[int], imported: Collection[int]) -> None:
    """Closes every descriptor above 2 that is neither in `keep` nor in `imported` (opened by preloaded modules).

    Of the latter, regular files and devices stay, as their owner in this very process believes; a socket, pipe or epoll would be shared with the zygote and its
    other ranks, so its number is kept but leads nowhere: closing it would give the number to the script, and the owner would then write into the script's file.
    """
    nowhere = -1
    for fd in open_fds() - {0, 1, 2} - set(keep):
        if fd not in imported:
            os.close(fd)
        elif not _harmless(fd):
            nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) if nowhere < 0 else nowhere
            os.dup2(nowhere, fd, inheritable=False)
    if nowhere >= 0:
        os.close(nowhere)


def _harmless(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISDIR(mode)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
