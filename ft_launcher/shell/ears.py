"""The launcher's ears: which signals its process hears, and who is told of them, from its start until its last instruction.

asyncio's own way is not used, for two of its moments at the end would be ours: while the loop closes, each signal has its default action again (the code that was concluded becomes the
signal's own), and one that comes just before is sent through a socket that is closed already, of which Python complains on standard error (where nobody reads that, the launcher
waits for ever). Here the wake-up pipe outlives the loop, and a signal is never without a handler once it had one. Knows nothing of what a signal means.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress

_AT_ONCE = 4096


class Ears:
    """One process's; to be used in its main thread. What arrives while nobody listens for it in the event loop is kept, and told to the next who does."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._handled: set[int] = set()
        self._heard: set[int] = set()
        self._told: Callable[[int], None] | None = None
        self._kept: list[int] = []

    def overlook(self, numbers: Iterable[int]) -> None:
        """From now on these do nothing until somebody hears them. Not SIG_IGN, which children inherit."""
        for number in numbers:
            self._handled.add(number)
            signal.signal(number, _nothing)

    def hear(self, numbers: Iterable[int], told: Callable[[int], None]) -> None:
        """From now on `told` is called in the running event loop with each of these that arrives, in their order; and with those that came since `leave`."""
        self._heard = set(numbers)
        self.overlook(self._heard)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)  # full: so many are waiting that one more tells nothing
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)
        self._told, kept, self._kept = told, self._kept, []
        for number in kept:
            if number in self._heard:
                told(number)

    def leave(self) -> None:
        """Whoever heard does so no longer; what comes now is kept for the next."""
        self._told = None

    def close(self) -> None:
        """All is over: whatever was ever handled is ignored from now on, also when Python gives its handlers up at its end."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for number in os.read(self._read_fd, _AT_ONCE):
                if number not in self._heard:
                    continue
                if self._told is None:
                    self._kept.append(number)
                else:
                    self._told(number)


def _nothing(*_: object) -> None:
    """What is to be done is done in the event loop; a Python handler there must be, or nothing would be written to the pipe."""
