"""What a rank's process tells of its own end: an exception's first line at once, and its Python stacks on request.

Both are for the agent's benefit and chained behind the user's: the previous excepthook is always called, a signal that anyone handles is left alone. The launcher
installs them in every rank, so that a script without a client has them too.

Must never change what a person sees: no output, no other exit code, and nothing at all in a process that has no section page of its own.
"""

from __future__ import annotations

import os
import signal
import sys

from monitors import layout
from monitors.rank_page import RankPage, own_page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

STACKS_SIGNAL = int(signal.SIGRTMIN) + 5
"""The reserved signal on which a rank writes the Python stacks of all its threads; only to be sent when the page says that the handler is there."""


def install_hooks() -> bool:
    """Installs both hooks in a rank's process, once; False (and nothing done) where there is no section page of this process. Never raises."""
    page = own_page()
    if page is None:
        return False
    if not page.hooked:
        page.hooked = True
        try:
            _chain_excepthook(page)
            _register_stacks(page)
        except Exception:  # noqa: BLE001  without stacks, but training
            page.words[layout.MISUSE + layout.MISUSES.index("internal")] += 1
    return True


def _chain_excepthook(page: RankPage) -> None:
    previous = sys.excepthook

    def stamp_and_go_on(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        page.stamp_exception(kind, error)
        previous(kind, error, trace)

    sys.excepthook = stamp_and_go_on


def _register_stacks(page: RankPage) -> None:
    if _is_taken(STACKS_SIGNAL):
        return
    import faulthandler

    faulthandler.register(STACKS_SIGNAL, file=_stacks_fd(), all_threads=True, chain=False)
    page.words[layout.STACKS_SIGNAL] = STACKS_SIGNAL


def _is_taken(number: int) -> bool:
    """Whether anything in this process, Python or not, catches or ignores the signal."""
    with open("/proc/self/status", "rb") as status:  # as bytes: text would import a codec in every rank
        masks = [int(line.split()[1], 16) for line in status if line.startswith((b"SigIgn:", b"SigCgt:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _stacks_fd() -> int:
    try:
        fd = int(os.environ[layout.ENV_STACKS_FD])
        os.fstat(fd)
    except (KeyError, ValueError, OSError, OverflowError):
        return 2
    return fd
