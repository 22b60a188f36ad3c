"""The zygote at work: one thread, one poll, no asyncio (an epoll object shared with a forked child breaks the parent's).

It hears the agent's wishes, forks ranks, hands every ended process to the agent the moment the kernel gives it, and kills what is left below. Wishes are
carried out in the order in which they came; while a reaping or a look at the sources is under way the later ones wait, except those that touch no rank (ping,
standby). Nothing here waits for anything but the poll: an agent that has stopped, a file system that has stalled, a rank that will not die, each costs a
bounded time or none.

`serve` returns twice, as fork does: a `RankSpec` in each child, so that the user's code runs on an empty stack, and None in the zygote when all is over. It
must never compute, import or log to a shared file system.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

from ft_launcher.shell import process_events as say
from ft_launcher.shell.process_events import START_FAILED, RankSpec
from ft_launcher.shell.sources import SourceGate
from ft_launcher.shell.standby import Rack
from ft_launcher.shell.strays import Sweep
from ft_launcher.shell.wire import Channel, Message, WireError

_SWEEP_MS = 5
_HEAR_MS = 50
_UNORDERED = frozenset({"ping", "standby", "release"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Rank:
    cycle: int
    rank: int


@dataclasses.dataclass(slots=True)
class _Reaping:
    sweep: Sweep
    cycle: int
    began: float
    ranks: frozenset[int]


@dataclasses.dataclass(slots=True)
class _Waiting:
    message: Message
    asked: float


_NOT_FOR_US = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Loop:
    """State of a serving zygote. `gate` is None where nothing is preloaded; `reap_s` bounds a reaping, in seconds."""

    def __init__(self, channel: Channel, rack: Rack, gate: SourceGate | None, reap_s: float) -> None:
        self._channel = channel
        self._rack = rack
        self._gate = gate
        self._reap_s = reap_s
        self._ranks: dict[int, _Rank] = {}
        self._todo: deque[_Waiting] = deque()
        self._reaping: _Reaping | None = None
        self._over = False
        self._agent = os.getppid()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def listen(self) -> None:
        """Takes over SIGCHLD (a child ended) and SIGTERM (the agent is dead). Whoever signals all processes of a job at once, as schedulers do, means the ranks: they
        have their grace, and so the zygote stays until the agent, which got the signal too, says otherwise."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *_NOT_FOR_US):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)

    def abandon(self) -> None:
        """In a forked child: forgets every descriptor of the zygote without closing it twice."""
        signal.set_wakeup_fd(-1)
        self._channel.abandon()
        self._wake.detach()
        self._waker.detach()

    def send(self, event: say.ProcessEvent) -> None:
        """Tells the agent."""
        self._channel.send(say.encode(event))

    def serve(self) -> RankSpec | None:
        """Works until the agent closes or is gone; then nothing is left below. In a forked child: returns the rank that it is to become."""
        while not self._over:
            self._poll()
            self._listen_all()
            self._reap_step()
            born = self._work()
            if born is not None:
                return born
        self._end_all()
        return None

    def _on_term(self, *_: object) -> None:
        """The death signal of the agent, unless the agent lives."""
        self._over = self._over or os.getppid() != self._agent

    def _poll(self) -> None:
        poll = select.poll()
        fds = [self._wake.fileno(), *self._rack.fds]
        if self._gate is not None and self._gate.fd is not None:
            fds.append(self._gate.fd)
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0))
        poll.poll(self._timeout_ms())

    def _timeout_ms(self) -> float | None:
        if self._reaping is not None:
            return _SWEEP_MS
        if self._todo:
            return _HEAR_MS
        deadline = self._rack.next_deadline()
        return None if deadline is None else max(1.0, (deadline - time.monotonic()) * 1000 + 1)

    def _listen_all(self) -> None:
        _drain(self._wake)
        self._channel.flush()
        try:
            messages = self._channel.receive()
        except (WireError, ValueError) as error:
            sys.stderr.write(f"ft-launch: the zygote does not understand the agent: {error}\n")
            messages, self._over = [], True
        for message in messages:
            if message.body["op"] in _UNORDERED:
                self._serve_now(message.body)
            else:
                self._todo.append(_Waiting(message, time.monotonic()))
        self._over = self._over or self._channel.eof
        for event in self._rack.collect():
            self.send(event)
        if self._gate is not None and self._gate.fd is not None and select.select([self._gate.fd], [], [], 0)[0]:
            self._gate.hear()
        self._collect_children()

    def _collect_children(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self.send(_ended(rank, pid, status))
                if status != 0 and self._gate is not None:
                    self._gate.look()  # the next cycle will want to know; its ranks need not wait for the answer
                continue
            failed = self._rack.ended(pid, status)
            if failed is not None:
                self.send(failed)

    def _serve_now(self, body: dict[str, Any]) -> None:
        if body["op"] == "ping":
            self.send(say.Pong())
        elif body["op"] == "release":
            self._rack.release(body["token"])
        else:
            try:
                told = self._rack.prepare(body["token"], body["host"])
            except OSError as error:
                told = say.StandbyFailed(body["token"], f"no process or port for the standby store: {error}")
            if told is not None:
                self.send(told)

    def _work(self) -> RankSpec | None:
        """Carries out the waiting wishes, as far as the ones before them are done."""
        while self._todo and self._reaping is None and not self._over:
            wish = self._todo[0]
            body = wish.message.body
            if body["op"] == "fork":
                changed = () if self._gate is None else self._gate.verdict(wish.asked)
                if changed is None:
                    return None
                self._todo.popleft()
                born = self._fork(wish.message, changed)
                if born is not None:
                    return born
                continue
            self._todo.popleft()
            self._carry_out(body)
        return None

    def _carry_out(self, body: dict[str, Any]) -> None:
        if body["op"] == "kill":
            wanted = body["ranks"]
            pids = [pid for pid, rank in self._ranks.items() if rank.cycle == body["cycle"] and (wanted is None or rank.rank in wanted)]
            for pid in pids:
                _signal(pid, body["sig"], body["group"])
        elif body["op"] == "reap":
            self._reaping = _Reaping(Sweep(os.getpid(), self._spared()), body["cycle"], time.monotonic(), frozenset(self._ranks))
            self._reap_step()
            if self._gate is not None:
                self._gate.look()
        else:
            self._over = True

    def _spared(self) -> frozenset[int]:
        return self._rack.pids | (self._gate.pids if self._gate is not None else frozenset())

    def _reap_step(self) -> None:
        reaping = self._reaping
        if reaping is None:
            return
        reaping.sweep.spare(self._spared())
        empty = reaping.sweep.step()
        seconds = time.monotonic() - reaping.began
        if not empty and seconds < self._reap_s:
            return
        strays = sum(pid not in reaping.ranks for pid in reaping.sweep.killed)
        left = () if empty else reaping.sweep.left()
        self._reaping = None
        self.send(say.Reaped(reaping.cycle, strays, left, seconds))

    def _fork(self, message: Message, changed: tuple[str, ...]) -> RankSpec | None:
        body, fds = message.body, message.fds
        specs = [_spec(item, fds) for item in body["specs"]]
        if changed:
            self.send(say.SourcesChanged(body["cycle"], changed))
        else:
            _flush_output()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            events: list[say.ProcessEvent] = []
            for spec in specs:
                pid = _try_fork()
                if pid == 0:
                    return spec  # all signals stay blocked until `become_rank` has put the handlers right
                events.append(self._forked(body["cycle"], spec.rank, pid))
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for event in events:
                self.send(event)
        for fd in fds:
            os.close(fd)
        return None

    def _forked(self, cycle: int, rank: int, pid: int | None) -> say.ProcessEvent:
        now = time.monotonic_ns()
        if pid is None:
            return say.RankEnded(cycle, rank, 0, START_FAILED, None, now, False)
        self._ranks[pid] = _Rank(cycle, rank)
        return say.RankStarted(cycle, rank, pid, now)

    def _end_all(self) -> None:
        sweep = Sweep(os.getpid())
        end = time.monotonic() + self._reap_s
        while not sweep.step() and time.monotonic() < end:
            select.select([self._wake], [], [], _SWEEP_MS / 1000)
            _drain(self._wake)
            self._collect_children()
        self._channel.flush()


def _spec(item: dict[str, Any], fds: tuple[int, ...]) -> RankSpec:
    at = item.pop("page")
    return RankSpec(**item, page_fd=None if at is None else fds[at])


def _try_fork() -> int | None:
    try:
        return os.fork()
    except OSError as error:
        sys.stderr.write(f"ft-launch: a rank could not be forked: {error}\n")
        return None


def _signal(pid: int, number: int, group: bool) -> None:
    """To the whole process group of a rank, or to the rank alone. A rank that is in the table has not been collected: its pid cannot be another's."""
    if group:
        try:
            os.killpg(pid, number)
            return
        except ProcessLookupError:
            pass  # forked a moment ago: it has no group of its own yet
    os.kill(pid, number)


def _ended(rank: _Rank, pid: int, status: int) -> say.RankEnded:
    code = os.waitstatus_to_exitcode(status)
    by_signal = -code if code < 0 else None
    return say.RankEnded(rank.cycle, rank.rank, pid, None if code < 0 else code, by_signal, time.monotonic_ns(), os.WCOREDUMP(status))


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        return


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
