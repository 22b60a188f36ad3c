"""Standard output that may be a full disk or a reader that has gone: one line and exit 1, or silence and exit 1, instead of a traceback.
And a last line on standard error that a stuck terminal does not keep from being the last.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ft_launcher.errors import FTError

LAST_LINE_S = 5.0


class OutputError(FTError):
    """What was to be printed could not be. `silent`: whoever read it has gone, as `head` does, and need not be told."""

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


def out(text: str) -> None:
    """Prints one text and a newline; nothing where standard output is closed. Raises OutputError."""
    with printing():
        if sys.stdout is not None:
            sys.stdout.write(text + "\n")


@contextmanager
def printing() -> Iterator[None]:
    """Around what does nothing but print: its OSError is one of standard output. Raises OutputError."""
    try:
        yield
        if sys.stdout is not None:  # it was closed when we started
            sys.stdout.flush()
    except OSError as error:
        _drop_the_rest()
        message = f"standard output cannot be written: {error.strerror or error}"
        raise OutputError(message, silent=isinstance(error, BrokenPipeError)) from None


def last_line(text: str) -> None:
    """One line on standard error from a process that is about to end: it waits a little for whoever reads there, and not for ever. Never raises."""
    if sys.stderr is None:  # it was closed when we started
        return
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        data = (text + "\n").encode(errors="backslashreplace")
        try:
            fd = sys.stderr.fileno()
        except OSError:  # somebody has put a stream of their own there
            sys.stderr.write(text + "\n")
            return
        while data and select.select([], [fd], [], LAST_LINE_S)[1]:
            data = data[os.write(fd, data[: select.PIPE_BUF]) :]


def _drop_the_rest() -> None:
    """What is still in the buffer would be tried again when the interpreter ends, and be one more complaint."""
    with suppress(OSError, ValueError):  # a stdout without a descriptor has nothing to try again
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
