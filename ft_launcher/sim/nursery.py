"""The fake zygote of one node and the rank processes below it: what `shell/nursery.py` and the zygote do, without processes.

Wishes are carried out in the order in which they came, each taking its time, a reaping holding up those behind it; a zygote's death ends its ranks
and its standby stores at once, and is told when what was below has been cleared. It knows the fate of processes; it never decides anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ft_launcher.sim.clock import Clock, Life, Ticket
from ft_launcher.sim.host import Host
from ft_launcher.sim.setting import Platform

SIGKILL = 9
GIVE_UP_S = 5.0
"""Clearing after a dead zygote waits this long for what does not die."""
TOO_SLOW_S = 15.0
"""A node that needs longer to clear may be given up by the policy: the checks must not count on it any more."""
LOOK_S = 0.05
"""How often the pages of the ranks are looked at."""


@dataclass(slots=True)
class Proc:
    """A rank's process. `free_at`: a kill has no effect before (it is deep in the kernel). `stamp`: an exception nobody has read yet."""

    cycle: int
    rank: int
    started_at: float = 0.0
    hung: bool = False
    leaving: Ticket | None = None
    free_at: float = 0.0
    stamp: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: exactly one of the two is set."""

    code: int | None = None
    signal: int | None = None


class Listener(Protocol):
    """Who is told: the agent."""

    def on_ready(self) -> None: ...
    def on_standby(self, token: int, port: int | None) -> None: ...
    def on_forked(self, cycle: int, ranks: Sequence[int]) -> None: ...
    def on_stamp(self, proc: Proc, at_ns: int, text: str) -> None: ...
    def on_ended(self, proc: Proc, how: Exit, told: bool) -> None: ...
    def on_reaped(self, cycle: int, left: tuple[int, ...], seconds: float) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class Nursery:
    """`procs`: what runs, by rank. `remains`: what could not be killed. `ready`: a zygote can fork. `life`: the time of all these processes, which a frozen machine has none of."""

    def __init__(self, clock: Clock, noise: random.Random, host: Host, platform: Platform) -> None:
        self.procs: dict[int, Proc] = {}
        self.remains: list[Proc] = []
        self.ready = False
        self.closed = False
        self.too_slow = False
        self.life = Life(clock)
        self._clock = self.life
        self._noise = noise
        self._host = host
        self._platform = platform
        self._told: Listener | None = None
        self._epoch = 0
        self._running = self._clearing = False
        self._free_at = 0.0
        self._reaping: tuple[int, float] | None = None
        self._left: tuple[int, ...] = ()

    def listen(self, listener: Listener) -> None:
        """Set who is told, before `start`."""
        self._told = listener

    @property
    def told(self) -> Listener:
        """Who listens."""
        if self._told is None:
            raise RuntimeError("nobody listens to the nursery")
        return self._told

    @property
    def usable(self) -> bool:
        """The truth about this machine: it can start ranks, now and (as far as it has shown) after the next cycle."""
        return self.ready and not self.remains and not self.too_slow

    @property
    def busy(self) -> bool:
        """Something of a cycle is still to be cleared."""
        return bool(self.procs) or self._reaping is not None

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC of this machine."""
        return int(self._clock.now * 1e9) + self._host.clock_ns

    def _later(self, low_s: float, high_s: float, act: Callable[..., None], *args: Any) -> Ticket:
        return self._clock.after(self._noise.uniform(low_s, high_s), act, *args)

    # -- the zygote's life --------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a zygote; `on_ready` follows, or `on_lost`."""
        self._epoch += 1
        self._running, self.ready = True, False
        self._free_at = self._clock.now
        luck, usual = self._host.luck, self._platform.zygote_s * self._noise.uniform(0.8, 1.3)
        if luck.zygote_fails:
            luck.zygote_fails -= 1
            self._clock.after(usual / 2, self._of(self._epoch, self.die), "it ended while it imported")
        else:
            self._clock.after(usual + luck.take("zygote_slow_s"), self._of(self._epoch, self._become_ready))

    def _of(self, epoch: int, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, unless the zygote is another one by then."""

        def only(*args: Any) -> None:
            if epoch == self._epoch and not self.closed:
                act(*args)

        return only

    def _become_ready(self) -> None:
        self.ready = True
        self.told.on_ready()

    def die(self, reason: str) -> None:
        """The zygote is gone, its ranks and stores with it; who is deep in the kernel goes later."""
        if not self._running or self.closed:
            return
        self._epoch += 1
        self._running, self.ready, self._clearing = False, False, True
        now = self._clock.now
        stuck = [proc for proc in self.procs.values() if proc.free_at > now]
        for proc in [proc for proc in self.procs.values() if proc.free_at <= now]:
            self._vanish(proc, Exit(signal=SIGKILL), told=False)
        wait_s = max((proc.free_at - now for proc in stuck), default=0.0)
        clear_s = self._noise.uniform(0.005, 0.1) + min(wait_s, GIVE_UP_S)
        self._clock.after(clear_s, self._of(self._epoch, self._cleared), reason)

    def _cleared(self, reason: str) -> None:
        for proc in list(self.procs.values()):
            if proc.free_at > self._clock.now:
                self.remains.append(proc)
                self._clock.at(proc.free_at, self._gone_at_last, proc)
            self._vanish(proc, Exit(signal=SIGKILL), told=False)
        self._left = tuple(1000 + proc.rank for proc in self.remains)
        self._clearing = False
        self.told.on_lost(reason)
        self._reaped(self._left)

    def _gone_at_last(self, proc: Proc) -> None:
        if proc in self.remains:
            self.remains.remove(proc)

    def close(self) -> None:
        """Everything below the agent ends: it left, or its machine did."""
        for proc in list(self.procs.values()):
            self._vanish(proc, Exit(signal=SIGKILL), told=False)
        self.closed = True
        self._running = self.ready = False
        self._epoch += 1

    # -- wishes -------------------------------------------------------------------------------------------------------------------------

    def _wish(self, takes_s: float, act: Callable[..., None], *args: Any) -> None:
        """Carry out after the ones before it."""
        self._free_at = max(self._clock.now, self._free_at) + takes_s
        self._clock.at(self._free_at, self._of(self._epoch, act), *args)

    def fork(self, cycle: int, ranks: Sequence[int]) -> None:
        """Start ranks. Without a zygote nothing happens: its death will be told."""
        self._left = ()
        if self.ready:
            self._wish(self._platform.fork_s * len(ranks) * self._noise.uniform(0.8, 1.5), self._fork, cycle, ranks)

    def _fork(self, cycle: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.procs[rank] = Proc(cycle, rank, self._clock.now)
        self.told.on_forked(cycle, ranks)

    def kill(self, cycle: int, ranks: Sequence[int]) -> None:
        """SIGKILL these ranks."""
        if self.ready:
            self._wish(0.0005, self._kill, cycle, ranks)

    def _kill(self, cycle: int, ranks: Sequence[int]) -> None:
        doomed = [p for r in ranks if (p := self.procs.get(r)) is not None and p.cycle == cycle]
        slow_s = self._host.luck.take("kill_slow_s") if doomed else 0.0
        if slow_s:
            self.too_slow = self.too_slow or slow_s > GIVE_UP_S
            doomed[0].free_at = self._clock.now + slow_s
        for proc in doomed:
            if proc.leaving is not None:
                proc.leaving.cancel()
        half = max(1, len(doomed) // 2)
        for batch in (doomed[:half], doomed[half:]):
            if batch:
                self._later(0.001, 0.02, self._of(self._epoch, self._killed), batch)

    def _killed(self, procs: Sequence[Proc]) -> None:
        for proc in procs:
            if proc.free_at > self._clock.now:
                self._clock.at(proc.free_at, self._of(self._epoch, self._killed), [proc])
            else:
                self.end(proc, Exit(signal=SIGKILL))

    def signal(self, cycle: int, ranks: Iterable[int], number: int) -> None:
        """A stop signal to each rank: most leave within seconds, with 0 or by the signal, some not at all."""
        if self.ready:
            self._wish(0.0005, self._signalled, cycle, list(ranks), number)

    def _signalled(self, cycle: int, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            proc = self.procs.get(rank)
            if proc is not None and proc.cycle == cycle and proc.leaving is None and self._noise.random() < 0.9:
                how = Exit(code=0) if self._noise.random() < 0.3 else Exit(signal=number)
                self.leave(proc, self._noise.uniform(0.01, 4.0), how)

    def reap(self, cycle: int) -> None:
        """Clear the cycle; `on_reaped` follows, at once where there is no zygote, or when what was below it has been cleared."""
        self._reaping = (cycle, self._clock.now)
        if not self.ready:
            if not self._clearing:
                self._reaped(self._left)
            return
        luck = self._host.luck
        takes_s = self._noise.uniform(0.002, 0.03) + luck.take("reap_slow_s")
        self.too_slow = self.too_slow or takes_s > TOO_SLOW_S
        if luck.leaves_unkillable or self.procs:
            takes_s += GIVE_UP_S
        if luck.leaves_unkillable:
            luck.leaves_unkillable = False
            self.remains.append(Proc(cycle, -1))
        self._wish(takes_s, self._give_up)

    def _give_up(self) -> None:
        """What is still alive now cannot be killed."""
        for proc in list(self.procs.values()):
            self.remains.append(proc)
            self._clock.at(max(proc.free_at, self._clock.now), self._gone_at_last, proc)
            self._vanish(proc, Exit(signal=SIGKILL), told=False)
        self._reaped(tuple(1000 + proc.rank for proc in self.remains))

    def _reaped(self, left: tuple[int, ...]) -> None:
        if self._reaping is None:
            return
        cycle, asked_at = self._reaping
        self._reaping = None
        self.told.on_reaped(cycle, left, self._clock.now - asked_at)

    def prepare_standby(self, token: int) -> None:
        """Have a store listen; not held up by other wishes."""
        luck = self._host.luck
        takes_s = self._platform.standby_s * self._noise.uniform(0.5, 2.0) + luck.take("standby_slow_s")
        port = None if luck.take("standby_fails") else 20_000 + token
        self._clock.after(takes_s, self._of(self._epoch, self.told.on_standby), token, port)

    # -- how ranks end ------------------------------------------------------------------------------------------------------------------

    def leave(self, proc: Proc, linger_s: float, how: Exit, stamp: str | None = None) -> None:
        """A process is on its way out, `linger_s` from now; `stamp` is its uncaught exception."""
        if proc.leaving is not None or proc.hung or self.procs.get(proc.rank) is not proc:
            return
        if stamp is not None:
            proc.stamp = (self.now_ns(), stamp)
            self._later(0.0, LOOK_S, self._look, proc)
        proc.leaving = self._clock.after(linger_s, self._of(self._epoch, self.end), proc, how)

    def _look(self, proc: Proc) -> None:
        if proc.stamp is not None and not self.closed and self.procs.get(proc.rank) is proc:
            (at_ns, text), proc.stamp = proc.stamp, None
            self.told.on_stamp(proc, at_ns, text)

    def end(self, proc: Proc, how: Exit) -> None:
        """The process is gone: what it had stamped is read first, then its end is told."""
        if self.procs.get(proc.rank) is proc and not self.closed:
            self._look(proc)
            self._vanish(proc, how, told=True)

    def _vanish(self, proc: Proc, how: Exit, told: bool) -> None:
        del self.procs[proc.rank]
        if proc.leaving is not None:
            proc.leaving.cancel()
        self.told.on_ended(proc, how, told)
