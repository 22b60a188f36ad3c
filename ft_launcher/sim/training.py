"""The training that goes on inside the ranks: one body in lock-step, and the checkpoints it leaves.

Collectives keep all ranks at the same step, so one object stands for all of them, and the slowest rank sets its pace. Where it is follows from when it began and how its pace has
changed, by arithmetic: an undisturbed hour costs two events, however many ranks and steps it has. While a machine is frozen or cut off it stands still and goes on after; once a rank is
missing or hangs it stands still for ever. It knows steps and seconds, never nodes or decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_launcher.sim.clock import Clock, Ticket
from ft_launcher.sim.setting import Script
from ft_launcher.sim.storage import Storage

SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class Calls:
    """Who is told: of the first step of all ranks, that the training is complete, and that the pace has changed."""

    first_step: Callable[[], None]
    complete: Callable[[], None]
    pace: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Page:
    """What every rank's section page shows now; world seconds. `section` None before the first step; `ended` section -> when it last ended."""

    steps: int
    saves: int
    section: str | None
    since: float
    progress_at: float | None
    ended: dict[str, float]


class LockStep:
    """The ranks of one cycle on `nodes` many nodes. `owner`: (generation, cycle)."""

    def __init__(self, clock: Clock, script: Script, storage: Storage, nodes: int, owner: tuple[int, int]) -> None:
        self.base = 0
        self.began_at: float | None = None
        self.frozen_at: float | None = None
        self.complete = False
        self.owner = owner
        self._clock = clock
        self._script = script
        self._storage = storage
        self._number = 0
        self._missing = nodes
        self._calls: Calls | None = None
        self._tickets: list[Ticket] = []
        self._first_told = False
        self._slow: dict[str, float] = {}
        self._held: set[str] = set()
        self._segments: list[tuple[float, float, float]] = []
        self._saving_at: float | None = None
        self._fault_saved = 0

    @property
    def met(self) -> bool:
        """Every rank has found the others."""
        return self._missing == 0

    @property
    def stepping(self) -> bool:
        """Steps are being completed at this moment."""
        return self.began_at is not None and self._pace() > 0 and not self.complete and self.nominal() >= 0

    @property
    def steady(self) -> bool:
        """It moves, and as fast as ever."""
        return self._pace() == 1.0 or self.complete

    @property
    def factor(self) -> float:
        """How many times as long everything takes."""
        return max(self._slow.values(), default=1.0)

    @property
    def held(self) -> bool:
        """It stands still for a while."""
        return bool(self._held)

    # -- its course -----------------------------------------------------------------------------------------------------------------------

    def node_started(self, calls: Calls) -> None:
        """The ranks of one more node run; with the last one they load the newest checkpoint and begin."""
        self._missing -= 1
        self._calls = calls
        if self._missing or self.frozen_at is not None:
            return
        self._number = self._storage.claim(self.owner)
        self.base = self._storage.saved
        self.began_at = self._clock.now
        self._segments = [(self._clock.now, -self._script.load_s, self._pace())]
        self._plan()

    def _pace(self) -> float:
        """Nominal seconds a second."""
        if self.frozen_at is not None or self._held:
            return 0.0
        return 1.0 / self.factor

    def nominal(self) -> float:
        """Seconds of undisturbed training since the first step began; negative while loading."""
        if not self._segments:
            return -self._script.load_s
        at, done, pace = self._segments[-1]
        return done + (self._clock.now - at) * pace

    def _reached_at(self, nominal: float) -> float:
        """When it was there, in world seconds."""
        for at, done, pace in reversed(self._segments):
            if nominal >= done or at == self._segments[0][0]:
                return at + max(0.0, nominal - done) / pace if pace else at
        return self._clock.now

    def _turn(self) -> None:
        """The pace may have changed."""
        if not self._segments or self.complete:
            return
        pace = self._pace()
        if pace != self._segments[-1][2]:
            self._segments = [*self._segments[-SEGMENTS:], (self._clock.now, self.nominal(), pace)]
            self._plan()

    def _plan(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
        pace, now = self._pace(), self.nominal()
        self._tickets = []
        if pace == 0.0:
            return
        goals = [(self._seconds_for(self._script.steps - self.base), self._finish)]
        if not self._first_told:
            goals.append((self._script.step_s, self._first))
        self._tickets = [self._clock.after(max(0.0, goal - now) / pace, act) for goal, act in goals]

    def _seconds_for(self, steps: int) -> float:
        """How long that many steps take, the saves between them and at the end included."""
        return steps * self._script.step_s + (-(-steps // self._script.save_every)) * self._script.save_s

    def _first(self) -> None:
        self._first_told = True
        if self._calls is not None:
            self._calls.first_step()

    def _finish(self) -> None:
        self.complete = True
        if self._storage.commit(self._number, self._script.steps):
            self._storage.reached = self._script.steps
        if self._calls is not None:
            self._calls.complete()

    # -- what disturbs it -----------------------------------------------------------------------------------------------------------------

    def hold(self, why: str) -> None:
        """A machine does not answer: everybody waits for it."""
        self._held.add(why)
        self._turn()

    def release(self, why: str) -> None:
        """It answers again."""
        self._held.discard(why)
        self._turn()

    def slow(self, why: str, factor: float) -> None:
        """A rank takes so many times as long for everything; 1: it does not any more."""
        self._slow.pop(why, None)
        if factor != 1.0:
            self._slow[why] = factor
        self._turn()

    def freeze(self) -> int:
        """A rank is gone or stands still: nothing moves from now on. Returns the steps that are lost (0 when it stood still already)."""
        if self.frozen_at is not None or self.complete:
            return 0
        self.sync()
        done, saved = self.base + self.steps(), self.saved()
        self._turn_off()
        if self.began_at is None:
            return 0
        self._storage.reached = max(self._storage.reached, done)
        return done - saved

    def save_the_fault(self) -> None:
        """A checkpoint of the moment before the disputed step is being written; nothing else moves."""
        self._saving_at = self._clock.now
        self.hold("fault checkpoint")

    def commit_fault(self, question: Any) -> None:
        """It is complete."""
        self.sync()
        self._fault_saved = self.base + self.steps()
        self._storage.commit(self._number, self._fault_saved, question)

    def _turn_off(self) -> None:
        nominal = self.nominal()
        self.frozen_at = self._clock.now
        for ticket in self._tickets:
            ticket.cancel()
        if self._segments:
            self._segments.append((self._clock.now, nominal, 0.0))

    def sync(self) -> None:
        """Its saves so far reach the storage; they did when they were made."""
        if self._number:
            self._storage.commit(self._number, self.saved())

    # -- where it is ----------------------------------------------------------------------------------------------------------------------

    def _periods(self) -> tuple[int, float]:
        """Whole rounds of `save_every` steps and a save, and the nominal seconds into the present one."""
        elapsed = self.nominal()
        script = self._script
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
        return self._script.steps if self.complete else max(self._fault_saved, self.base + self._periods()[0] * self._script.save_every)

    def standing_s(self) -> float:
        """Seconds since it stands still."""
        at, _, pace = self._segments[-1] if self._segments else (self._clock.now, 0.0, 1.0)
        return self._clock.now - at if pace == 0.0 else 0.0

    def began_ago_s(self) -> float:
        """How long ago the newest completed step was begun; inf before the first."""
        return self._clock.now - self._reached_at(self._end_of(self.steps()) - self._script.step_s) if self.steps() else float("inf")

    def _end_of(self, steps: int) -> float:
        """Nominal seconds at which that many steps were complete, before the save that may follow."""
        return steps * self._script.step_s + ((steps - 1) // self._script.save_every) * self._script.save_s if steps else 0.0

    def page(self) -> Page:
        """See Page."""
        steps, (rounds, rest_s) = self.steps(), self._periods()
        script = self._script
        if self.began_at is None or self.nominal() < 0:
            return Page(0, 0, None, 0.0, None, {})
        saving = rest_s >= script.save_every * script.step_s
        round_s = script.save_every * script.step_s + script.save_s
        saved_at = self._reached_at(rounds * round_s)
        stepped_at = self._reached_at(self._end_of(steps))
        ended = ({"step": stepped_at} if steps else {}) | ({"checkpointing": saved_at} if rounds else {})
        since = stepped_at if saving else max(stepped_at, saved_at)
        if self._saving_at is not None:
            return Page(steps, rounds, "checkpointing", self._saving_at, stepped_at if steps else None, ended)
        return Page(steps, rounds, "checkpointing" if saving else "step", since, stepped_at if steps else None, ended)
