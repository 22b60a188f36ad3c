"""Virtual time: one heap of things to come. Nothing in the simulated world has another clock.

Two things due at the same moment happen in the order in which they were planned, so a run depends on its seed alone: never on the speed of the
machine, on hash order or on real time. It knows times and callables; it must never know what they mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Ticket:
    """One planned call. `cancel` makes it never happen."""

    __slots__ = ("act", "args")

    def __init__(self, act: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        self.act = act
        self.args = args

    def cancel(self) -> None:
        """Take it back; harmless once it has happened."""
        self.act, self.args = None, ()


class Clock:
    """`now` is in seconds since the world began; `steps` counts what has happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.halted = False
        self._heap: list[tuple[float, int, Ticket]] = []
        self._planned = 0

    def at(self, when: float, act: Callable[..., None], *args: Any) -> Ticket:
        """Plan a call at a moment; one in the past happens now."""
        ticket = Ticket(act, args)
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, ticket))
        return ticket

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> Ticket:
        """Plan a call `delay_s` seconds from now."""
        return self.at(self.now + delay_s, act, *args)

    def halt(self) -> None:
        """Let nothing happen any more."""
        self.halted = True

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`; `now` is then `until`, unless somebody has halted the clock."""
        heap = self._heap
        while heap and not self.halted and heap[0][0] <= until:
            when, _, ticket = heapq.heappop(heap)
            if ticket.act is not None:
                self.now = when
                self.steps += 1
                ticket.act(*ticket.args)
        if not self.halted:
            self.now = max(self.now, until)


class Life:
    """The time of one process (or of all processes of a machine): what is due while it is frozen happens when it wakes up, what is due after its end never.

    `frozen_at`: since when it is frozen, the last time when it is awake.
    """

    def __init__(self, clock: Clock) -> None:
        self.over = False
        self.until = 0.0
        self.frozen_at = -math.inf
        self._clock = clock

    @property
    def now(self) -> float:
        """The world's time."""
        return self._clock.now

    @property
    def awake(self) -> bool:
        """It is not frozen (and not over)."""
        return not self.over and self._clock.now >= self.until

    def freeze(self, seconds: float) -> None:
        """Nothing happens for so long."""
        if self.awake:
            self.frozen_at = self._clock.now
        self.until = max(self.until, self._clock.now + seconds)

    def end(self) -> None:
        """Nothing will happen any more."""
        self.over = True

    def at(self, when: float, act: Callable[..., None], *args: Any) -> Ticket:
        """Plan a call at a moment of this life."""
        ticket = Ticket(act, args)
        self._clock.at(when, self._due, ticket)
        return ticket

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> Ticket:
        """Plan a call `delay_s` seconds from now."""
        return self.at(self._clock.now + delay_s, act, *args)

    def soon(self, act: Callable[..., None], *args: Any) -> None:
        """At once, or as soon as it is awake, in order."""
        self.after(0.0, act, *args)

    def _due(self, ticket: Ticket) -> None:
        if self.over or ticket.act is None:
            return
        if self._clock.now < self.until:
            self._clock.at(self.until, self._due, ticket)
        else:
            ticket.act(*ticket.args)
