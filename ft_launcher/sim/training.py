"""The training that goes on inside the ranks: one body in lock-step, and the checkpoints it leaves.

Collectives keep all ranks at the same step, so one object stands for all of them. Where it is follows from when it began, by arithmetic: an
undisturbed hour costs two events, however many ranks and steps it has. It stands still as soon as one rank is missing or stands still. It knows steps
and seconds, never nodes' machines or decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ft_launcher.sim.clock import Clock, Ticket
from ft_launcher.sim.setting import Script


@dataclass(slots=True)
class Storage:
    """What a restart begins from. `saved`: steps in the newest complete checkpoint; `reached`: the furthest step any cycle completed."""

    saved: int = 0
    reached: int = 0


@dataclass(frozen=True, slots=True)
class Calls:
    """Who is told: of the first step of all ranks, and that the training is complete."""

    first_step: Callable[[], None]
    complete: Callable[[], None]


class LockStep:
    """The ranks of one cycle on `nodes` many nodes."""

    def __init__(self, clock: Clock, script: Script, storage: Storage, nodes: int) -> None:
        self.base = 0
        self.began_at: float | None = None
        self.frozen_at: float | None = None
        self.complete = False
        self._clock = clock
        self._script = script
        self._storage = storage
        self._missing = nodes
        self._calls: Calls | None = None
        self._tickets: list[Ticket] = []

    @property
    def met(self) -> bool:
        """Every rank has found the others."""
        return self._missing == 0

    @property
    def stepping(self) -> bool:
        """Steps are being completed at this moment."""
        return self.began_at is not None and self.frozen_at is None and not self.complete and self._clock.now >= self.began_at

    def node_started(self, calls: Calls) -> None:
        """The ranks of one more node run; with the last one they load the newest checkpoint and begin."""
        self._missing -= 1
        if self._missing or self.frozen_at is not None:
            return
        script, self.base = self._script, self._storage.saved
        self.began_at = self._clock.now + script.load_s
        left = script.steps - self.base
        self._calls = calls
        self._tickets = [
            self._clock.at(self.began_at + script.step_s, calls.first_step),
            self._clock.at(self.began_at + self._seconds_for(left), self._finish),
        ]

    def _seconds_for(self, steps: int) -> float:
        """How long that many steps take, the saves between them and at the end included."""
        return steps * self._script.step_s + (-(-steps // self._script.save_every)) * self._script.save_s

    def _finish(self) -> None:
        self.complete = True
        self._storage.saved = self._storage.reached = self._script.steps
        if self._calls is not None:
            self._calls.complete()

    def freeze(self) -> int:
        """A rank is gone or stands still: nothing moves from now on. Returns the steps that are lost (0 when it stood still already)."""
        if self.frozen_at is not None or self.complete:
            return 0
        self.frozen_at = self._clock.now
        for ticket in self._tickets:
            ticket.cancel()
        if self.began_at is None:
            return 0
        done, saved = self.base + self.steps(), self.saved()
        self._storage.reached = max(self._storage.reached, done)
        self._storage.saved = max(self._storage.saved, saved)
        return done - saved

    def _periods(self) -> tuple[int, float]:
        """Whole rounds of `save_every` steps and a save, and the seconds into the present one."""
        if self.began_at is None:
            return 0, 0.0
        script = self._script
        elapsed = (self._clock.now if self.frozen_at is None else self.frozen_at) - self.began_at
        round_s = script.save_every * script.step_s + script.save_s
        return (0, 0.0) if elapsed <= 0 else (int(elapsed // round_s), elapsed % round_s)

    def steps(self) -> int:
        """Steps completed in this cycle."""
        if self.complete:
            return self._script.steps - self.base
        rounds, rest_s = self._periods()
        script = self._script
        return min(rounds * script.save_every + min(script.save_every, int(rest_s / script.step_s)), script.steps - self.base)

    def saved(self) -> int:
        """The step of the newest complete checkpoint."""
        return self._script.steps if self.complete else self.base + self._periods()[0] * self._script.save_every

    def standing_s(self) -> float:
        """Seconds since it stands still."""
        return self._clock.now - (self._clock.now if self.frozen_at is None else self.frozen_at)
