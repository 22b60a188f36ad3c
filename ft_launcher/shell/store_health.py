"""Whether the store answers, as judged by our own calls.

A watch that says nothing is no sign: a frozen server keeps its connections open, and so does a cable that was pulled. Only a call that was
answered shows that the store is there, and that it was there when the call was *made*. This room keeps that moment and tells whoever asked when
the store went away and when it came back, so that an agent can hold: training goes on through an outage of the store.

It knows moments of CLOCK_BOOTTIME. It must never make a call, nor decide what an outage means for the job.
"""

from __future__ import annotations

from collections.abc import Callable

AWAY_S = 1.0
"""Calls have failed for so long, and none was answered: the store is away. One lost call or a change of leader on the local net is less."""

Listener = Callable[[bool], None]


class Health:
    """`contact_s`: when the newest answered call was made. `since_s`: since when the store has been there without a gap, None while it is away."""

    def __init__(self, now_s: float) -> None:
        self.contact_s = now_s
        self.since_s: float | None = None
        self._away = False
        self._listeners: list[Listener] = []

    @property
    def away(self) -> bool:
        """The store does not answer, or has never answered yet."""
        return self.since_s is None

    def listen(self, listener: Listener) -> None:
        """Call `listener(False)` once when the store goes away, `listener(True)` once when it answers again; in the event loop, never late."""
        self._listeners.append(listener)

    def answered(self, asked_s: float) -> None:
        """A call that was made at this moment has been answered."""
        self.contact_s = max(self.contact_s, asked_s)
        if self.since_s is None:
            self.since_s = asked_s
        if self._away:
            self._away = False
            self._tell(True)

    def failed(self, now_s: float) -> None:
        """A call has failed. Away once that has gone on for AWAY_S since the last answer (or since the beginning)."""
        if not self._away and now_s - self.contact_s > AWAY_S:
            self._away, self.since_s = True, None
            self._tell(False)

    def _tell(self, there: bool) -> None:
        for listener in self._listeners:
            listener(there)
