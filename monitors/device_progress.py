"""Progress as the device sees it: Python runs ahead of a stuck kernel, so an iteration counts when an event recorded behind its work has completed.

`mark` records an event on the current stream and remembers what it stands for; `poll` asks the oldest ones, without waiting, and publishes what has completed.
Nothing is asked while the stream is being captured into a graph (a query would break the capture), nor from any other thread than the one that recorded
(which may be capturing). When the device cannot be asked at all, the caller publishes as without a device: too early is better than "no progress" for ever.

Must never synchronize, import torch, or raise.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Event(Protocol):
        """What of torch.cuda.Event is used."""

        def record(self) -> None:
            """Puts the event behind the current stream's work."""

        def query(self) -> bool:
            """Whether that work has completed; does not wait."""


MOST_PENDING = 256


class DeviceProgress:
    """`publish(iteration, step_ended, began_ns)` is called in the order of marks, once each, when the device got there; `new_event()` makes an event and
    `capturing()` tells whether none may be recorded or asked now."""

    def __init__(self, publish: Callable[[int, bool, int], None], new_event: Callable[[], Event], capturing: Callable[[], bool]) -> None:
        self._publish = publish
        self._new_event = new_event
        self._capturing = capturing
        self._pending: deque[tuple[Event, int, bool, int]] = deque()
        self._unrecorded: list[tuple[int, bool, int]] = []
        self._thread = 0
        self._highest = -1
        self._broken = False

    def mark(self, iteration: int, step: bool, began_ns: int) -> bool:
        """Remembers that this much is under way. False when the device cannot be asked: the caller publishes itself."""
        if self._broken:
            return False
        if not step and iteration <= self._highest:
            return True
        self._highest = max(self._highest, iteration)
        self._unrecorded.append((iteration, step, began_ns))
        try:
            self._record()
        except Exception:  # noqa: BLE001  a device in error answers everything with an exception
            self._give_up()
        else:
            self.poll()
        return True

    def poll(self) -> None:
        """Publishes what has completed since the last call."""
        if not self._pending or self._broken or get_ident() != self._thread:
            return
        try:
            if self._capturing():
                return
            while self._pending and self._pending[0][0].query():
                self._publish(*self._pending.popleft()[1:])
        except Exception:  # noqa: BLE001
            self._give_up()

    def _record(self) -> None:
        """One event stands for all marks that have none yet: while a graph was captured, or too many were pending, they wait for the next."""
        if len(self._pending) >= MOST_PENDING or self._capturing():
            del self._unrecorded[:-MOST_PENDING]
            return
        event = self._new_event()
        event.record()
        self._thread = get_ident()
        for mark in self._unrecorded:
            self._pending.append((event, *mark))
        self._unrecorded.clear()

    def _give_up(self) -> None:
        self._broken = True
        for iteration, step, began_ns in [pending[1:] for pending in self._pending] + self._unrecorded:
            self._publish(iteration, step, began_ns)
        self._pending.clear()
        self._unrecorded.clear()


def cuda_progress(publish: Callable[[int, bool, int], None]) -> DeviceProgress | None:
    """DeviceProgress on CUDA's current streams, or None while torch has not initialised CUDA in this process."""
    cuda = sys.modules["torch"].cuda
    return DeviceProgress(publish, cuda.Event, cuda.is_current_stream_capturing) if cuda.is_initialized() else None
