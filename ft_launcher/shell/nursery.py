"""Keeps one zygote at the agent's service, whatever happens to it.

It starts zygotes, notices when one is lost, stuck or out of date, and clears away what a lost one left behind. To the agent there is always "the zygote"; which process that
is, is known only here. It neither knows the job nor decides whether ranks should run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ft_launcher.core import events
from ft_launcher.shell import strays
from ft_launcher.shell.process import (
    Pong,
    ProcessEvent,
    RankEnded,
    RankSpec,
    RankStarted,
    Reaped,
    SourcesChanged,
    StandbyFailed,
    StandbyReady,
    Zygote,
    ZygoteLost,
    ZygoteOptions,
    ZygoteReady,
)

PING_EVERY_S = 0.5
STUCK_S = 1.0
"""A zygote that has not answered for this long *and* is stopped or dying is replaced."""
STARVED_S = 15.0
"""One that is merely not getting a processor has this long: replacing it would end healthy ranks."""
CLOSE_S = 3.0
ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""Signals that end a process which has not got as far as to catch them."""
IMPORT_SAID_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank to start: its variables, its log, the descriptor of its section page, the file for its stacks."""

    rank: int
    slot: int
    log: Path
    env: dict[str, str]
    page_fd: int
    stacks: Path | None = None


class Listener(Protocol):
    """Who is told. Called in the event loop."""

    def on_ready(self) -> None:
        """Ranks can be forked."""

    def on_standby(self, token: int, port: int | None, reason: str) -> None:
        """A standby store listens, or there will be none."""

    def on_rank_started(self, started: RankStarted) -> None:
        """A rank's process exists."""

    def on_rank_ended(self, event: events.RankEnded) -> None:
        """A rank's process has ended."""

    def on_reaped(self, cycle: int, left: tuple[int, ...], seconds: float) -> None:
        """Nothing of the cycle is left, but for `left`."""

    def on_lost(self, reason: str) -> None:
        """The zygote is gone; what was below it has been cleared."""

    def on_note(self, text: str) -> None:
        """Something people should read."""

    def fail(self, error: BaseException) -> None:
        """The nursery itself cannot go on."""


class Nursery:
    """One agent's zygote, now and later. Use in one event loop, from the main thread."""

    def __init__(self, options: ZygoteOptions) -> None:
        self._options = options
        self._listener: Listener | None = None
        self._zygote: Zygote | None = None
        self._ready = False
        self._retired: list[Zygote] = []
        self._forked: tuple[int, Sequence[RankPlan]] | None = None
        self._fork_again = False
        self._reaping: tuple[int, float] | None = None
        self._left: tuple[int, ...] = ()
        self._clearing = False
        self._answered_s = 0.0
        self._pinged_s = 0.0
        self._importing_since_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinger: asyncio.TimerHandle | None = None
        self._closing = False
        self.spared: set[int] = set()
        """Children of the agent that are none of ours: what is cleared away here leaves them alone."""

    def listen(self, listener: Listener) -> None:
        """Set who is told, before `start`."""
        self._listener = listener

    @property
    def ready(self) -> bool:
        """A zygote can fork ranks now."""
        return self._ready

    @property
    def _told(self) -> Listener:
        if self._listener is None:
            raise RuntimeError("nobody listens to the nursery")
        return self._listener

    # -- zygotes come and go --------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first zygote; `on_ready` follows."""
        self._spawn(self._start())
        self._ping()

    restart = start

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._told.fail(error)

    async def _start(self) -> None:
        zygote = Zygote(self._options, lambda event: self._hear(zygote, event))
        self._zygote, self._ready = zygote, False
        try:
            await zygote.start()
        except OSError as error:
            if self._zygote is zygote:
                self._zygote = None
                await asyncio.sleep(STUCK_S)
                self._told.on_lost(f"it cannot be started: {error}")

    async def close(self) -> None:
        """End everything below this process; returns when it is gone or known to be unkillable."""
        self._closing = True
        if self._pinger is not None:
            self._pinger.cancel()
        for task in self._tasks:
            task.cancel()
        zygotes = [z for z in (self._zygote, *self._retired) if z is not None]
        await asyncio.gather(*(z.close(CLOSE_S) for z in zygotes))
        await asyncio.to_thread(strays.kill_all_below, os.getpid())

    def _retire(self, zygote: Zygote) -> None:
        """Its standby store may still serve the running cycle, so it stays until that is reaped."""
        self._retired.append(zygote)
        self._zygote, self._ready = None, False

    async def _close_retired(self) -> None:
        retired, self._retired = self._retired, []
        spare = [z.pid for z in (self._zygote,) if z is not None and z.pid is not None] + list(self.spared)
        for zygote in retired:
            await zygote.close(CLOSE_S, spare)

    # -- is it alive? -----------------------------------------------------------------------------------------------------------------------

    def _ping(self) -> None:
        """Twice a second; a late ping of our own does not count against the zygote."""
        if self._closing:
            return
        if self._pinger is not None:
            self._pinger.cancel()
        now = time.monotonic()
        if now - self._pinged_s > 2 * PING_EVERY_S:
            self._answered_s = now
        self._pinged_s = now
        self._say_what_takes_so_long(now)
        if self._zygote is not None and self._ready and self._reaping is None:
            if now - self._answered_s > STUCK_S:
                self._replace_if_stuck(self._zygote, now - self._answered_s)
            self._zygote.ping()
        self._pinger = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    def _say_what_takes_so_long(self, now: float) -> None:
        """Imports take what they take, but not in silence."""
        zygote = self._zygote
        if zygote is None or self._ready:
            self._importing_since_s = now
        elif now - self._importing_since_s >= IMPORT_SAID_EVERY_S:
            self._importing_since_s = now
            self._told.on_note(f"still importing {zygote.importing or 'what ranks share'!r} before the first rank can start (--preload)")

    def _replace_if_stuck(self, zygote: Zygote, silent_s: float) -> None:
        """Stopped or dying is hard evidence; a process that only waits for its turn is given more time."""
        state = _state_of(zygote.pid)
        if state not in "TtZX" and silent_s < STARVED_S:
            return
        self._told.on_note(f"the zygote has not answered for {silent_s:.1f} s (process state {state}): replacing it")
        if zygote.pid is not None:
            with suppress(OSError):
                os.kill(zygote.pid, signal.SIGKILL)

    # -- wishes -------------------------------------------------------------------------------------------------------------------------------

    def fork(self, cycle: int, plans: Sequence[RankPlan]) -> None:
        """Start the ranks of a cycle: `on_rank_started` for each."""
        self._forked, self._left = (cycle, plans), ()
        if self._zygote is not None and self._ready:
            specs = [RankSpec(p.rank, p.slot, str(p.log), p.env, p.page_fd, str(p.stacks) if p.stacks else None) for p in plans]
            self._zygote.fork_ranks(cycle, specs)

    def kill(self, cycle: int, ranks: Sequence[int]) -> None:
        """SIGKILL the sessions of these ranks."""
        if self._fork_again:
            self._never_fork(cycle, signal.SIGKILL)
        elif self._zygote is not None:
            self._zygote.kill(cycle, ranks, signal.SIGKILL, group=True)

    def signal(self, cycle: int, ranks: Sequence[int] | None, number: int) -> None:
        """Send a signal to each rank's own process."""
        if self._fork_again:
            if number in ENDING:
                self._never_fork(cycle, number)
        elif self._zygote is not None:
            self._zygote.kill(cycle, ranks, number, group=False)

    def _never_fork(self, cycle: int, number: int) -> None:
        """These ranks wait for a zygote that still imports: to end them is not to start them."""
        self._fork_again = False
        forked, plans = self._forked or (cycle, ())
        for plan in plans if forked == cycle else ():
            self._told.on_rank_ended(events.RankEnded(cycle, plan.rank, None, number, time.monotonic_ns()))

    def reap(self, cycle: int) -> None:
        """Clear everything that is left of the cycle; `on_reaped` follows, also without a zygote: then it is clear already, or about to be."""
        self._reaping = (cycle, time.monotonic())
        if self._zygote is not None and self._ready:
            self._zygote.reap(cycle)
            asyncio.get_running_loop().call_later(self._options.reap_s + STARVED_S, self._reap_overdue, cycle)
        elif not self._clearing:  # else it will be answered by whoever clears
            self._reaped(self._left)

    def _reap_overdue(self, cycle: int) -> None:
        zygote = self._zygote
        if self._reaping is not None and self._reaping[0] == cycle and zygote is not None and zygote.pid is not None:
            self._told.on_note(f"the zygote has not cleared cycle {cycle}: replacing it")
            with suppress(OSError):
                os.kill(zygote.pid, signal.SIGKILL)

    def _reaped(self, left: tuple[int, ...]) -> None:
        if self._reaping is None:
            return
        cycle, asked_s = self._reaping
        self._reaping = None
        self._answered_s = time.monotonic()
        if self._retired:
            self._spawn(self._close_retired())
        self._told.on_reaped(cycle, left, time.monotonic() - asked_s)

    def prepare_standby(self, token: int, host: str) -> None:
        """Have a store listen on a port of the kernel's choice."""
        if self._zygote is not None:
            self._zygote.prepare_standby(token, host)

    def release_standby(self, token: int) -> None:
        """End that store."""
        if self._zygote is not None:
            self._zygote.release_standby(token)

    # -- what a zygote says -------------------------------------------------------------------------------------------------------------------

    def _hear(self, zygote: Zygote, event: ProcessEvent) -> None:
        if zygote is not self._zygote:
            return
        match event:
            case RankStarted():
                self._told.on_rank_started(event)
            case RankEnded():
                ended = events.RankEnded(event.cycle, event.rank, event.code, event.signal, event.at_ns, event.core_dumped)
                self._told.on_rank_ended(ended)
            case Reaped():
                self._reaped(event.left)
            case StandbyReady():
                self._told.on_standby(event.token, event.port, "")
            case StandbyFailed():
                self._told.on_standby(event.token, None, event.reason)
            case _:
                self._hear_of_itself(zygote, event)

    def _hear_of_itself(self, zygote: Zygote, event: ProcessEvent) -> None:
        match event:
            case Pong():
                self._answered_s = time.monotonic()
            case ZygoteReady():
                self._on_ready(event)
            case SourcesChanged():
                files = ", ".join(event.files[:3]) + (f" and {len(event.files) - 3} more" if len(event.files) > 3 else "")
                self._told.on_note(f"source files changed since they were imported ({files}): cycle {event.cycle} starts from a new zygote")
                self._fork_again = True
                self._retire(zygote)
                self.start()
            case ZygoteLost():
                self._on_zygote_lost(event.reason)
            case _:
                pass

    def _on_ready(self, event: ZygoteReady) -> None:
        self._ready = True
        self._answered_s = time.monotonic()
        if event.why is not None:
            self._told.on_note(f"ranks are started by {event.method}: {event.why}")
        for warning in event.warnings:
            self._told.on_note(warning)
        self._told.on_ready()
        if self._fork_again and self._forked is not None:
            self._fork_again = False
            self.fork(*self._forked)

    def _on_zygote_lost(self, reason: str) -> None:
        """One that never became ready died of what it imported: the next one imports nothing."""
        importing = not self._ready
        self._zygote, self._ready = None, False
        if importing and self._options.log_path is not None:
            reason = f"{reason}; its output is in {self._options.log_path}"
        if importing and self._options.start_method == "fork":
            self._options = replace(self._options, start_method="spawn")
            self._told.on_note(f"{reason}; from now on ranks are started by spawn, without preloading")
        self._clearing = True
        self._spawn(self._clear_after(reason))

    async def _clear_after(self, reason: str) -> None:
        """The ranks died with the zygote; their children have become ours."""
        spare = [z.pid for z in self._retired if z.pid is not None] + list(self.spared)
        swept = await asyncio.to_thread(strays.kill_all_below, os.getpid(), spare)
        self._left, self._clearing = swept.left, False
        self._told.on_lost(reason)
        self._reaped(swept.left)


def _state_of(pid: int | None) -> str:
    """The kernel's one-letter process state; X when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
