"""The fake controller's shell: the production job machine, fed and obeyed as `shell/controller.py` does it.

One queue; a commit takes its time and everything behind it waits: the later actions of the same decision, and the events that came meanwhile. It
keeps the journal of what the machine was given, so that it can be replayed. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ft_launcher.core.actions import Commit, JobAction, SetTimer
from ft_launcher.core.events import JobEvent, Timer, TimerFired
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Phase
from ft_launcher.sim.clock import Clock, Ticket


class Desk(Protocol):
    """What a controller touches of the world."""

    clock: Clock

    def judged(self, before: JobState, event: JobEvent, actions: Sequence[JobAction]) -> None:
        """The job machine has answered."""

    def commit_s(self) -> float:
        """How long this transaction takes."""

    def committed(self, job: JobState) -> None:
        """The job state is durable."""

    def performed(self, action: JobAction) -> None:
        """Something to say or to record."""


class Controller:
    """Serves until the job is done."""

    def __init__(self, desk: Desk, machine: JobMachine) -> None:
        self.machine = machine
        self.first = machine.state
        self.journal: list[tuple[float, JobEvent]] = []
        self.commits: list[JobState] = []
        self.began_at = 0.0
        self._desk = desk
        self._queue: deque[JobEvent] = deque()
        self._timers: dict[Timer, Ticket] = {}
        self._busy = False
        self._stalled_until = 0.0

    @property
    def done(self) -> bool:
        """The verdict stands."""
        return self.machine.state.phase is Phase.DONE

    def begin(self) -> None:
        """Write the first state, arm the first deadlines."""
        self.began_at = self._desk.clock.now
        self._carry_out([Commit(self.machine.state), *self.machine.begin(self.began_at)])

    def offer(self, event: JobEvent) -> None:
        """Queue an event."""
        self._queue.append(event)
        self._pump()

    def stall(self, seconds: float) -> None:
        """Handle nothing for a while."""
        clock = self._desk.clock
        self._stalled_until = max(self._stalled_until, clock.now + seconds)
        clock.at(self._stalled_until, self._pump)

    def _pump(self) -> None:
        clock = self._desk.clock
        while self._queue and not self._busy and not self.done and clock.now >= self._stalled_until and not clock.halted:
            event = self._queue.popleft()
            before = self.machine.state
            self.journal.append((clock.now, event))
            actions = self.machine.handle(clock.now, event)
            self._desk.judged(before, event, actions)
            self._carry_out(actions)

    def _carry_out(self, actions: Sequence[JobAction]) -> None:
        """In order; a commit makes the rest wait for it."""
        for position, action in enumerate(actions):
            if isinstance(action, Commit):
                self._busy = True
                self._desk.clock.after(self._desk.commit_s(), self._on_committed, action.job, actions[position + 1 :])
                return
            if isinstance(action, SetTimer):
                self._set_timer(action)
            else:
                self._desk.performed(action)

    def _on_committed(self, job: JobState, rest: Sequence[JobAction]) -> None:
        self.commits.append(job)
        self._desk.committed(job)
        self._busy = False
        self._carry_out(rest)
        self._pump()

    def _set_timer(self, action: SetTimer) -> None:
        pending = self._timers.pop(action.timer, None)
        if pending is not None:
            pending.cancel()
        fired = TimerFired(action.timer, action.cycle)
        self._timers[action.timer] = self._desk.clock.after(action.delay_s, self.offer, fired)
