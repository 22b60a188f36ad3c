"""What the launcher says to people: one line at a time on standard error, never waiting for whoever reads it.

Lines go through a thread of their own kind (the writer), so a stuck terminal stalls nobody; a closed one is ignored. Nothing is decided here.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from ft_launcher.shell.writer import Keep, Writer

LANE = "console"


class Console:
    """Prints `ft-launch: ...` lines. `fd` is duplicated at start: a script that plays with descriptors cannot change where we speak."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = os.dup(fd)
        self._writer = Writer(self._print)

    def start(self) -> None:
        """Start the thread; lines said before wait for it."""
        self._writer.start()

    def say(self, text: str, level: str = "info") -> None:
        """One line; never blocks, never raises."""
        mark = "" if level == "info" else f"{level}: "
        line = "\n".join(f"ft-launch: {mark}{part}" for part in text.splitlines())
        self._writer.submit(LANE, lambda: self._print_raw(line), Keep.LINE)

    def raw(self, text: str) -> None:
        """Text as it is (the banner)."""
        self._writer.submit(LANE, lambda: self._print_raw(text), Keep.LINE)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, at most for `timeout_s`."""
        self._writer.close(timeout_s)

    def _print(self, text: str) -> None:
        """What the thread's own trouble is; said by whoever closes it, too, who must not wait for a console that takes nothing."""
        if select.select([], [self._fd], [], 0)[1]:
            self._print_raw(f"ft-launch: {text}"[: select.PIPE_BUF - 1])

    def _print_raw(self, text: str) -> None:
        data = (text + "\n").encode(errors="replace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]
