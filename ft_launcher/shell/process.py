"""The agent's side of the zygote: start it, tell it what to do, hear what happened.

One `Zygote` is one zygote process. Every wish returns at once (it is written to a socket that never blocks) and every result is an event, in order, in the
agent's event loop. The last event of a zygote that was not closed on purpose is `ZygoteLost`; what then is left of its ranks' children has become the
agent's, which is a subreaper (`strays`).

It must never import torch, wait for the zygote in a call, or decide anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft_launcher.core.command import Command
from ft_launcher.shell import process_events, strays
from ft_launcher.shell.process_events import (
    START_FAILED,
    Importing,
    Pong,
    ProcessEvent,
    RankEnded,
    RankSpec,
    RankStarted,
    Reaped,
    SourcesChanged,
    StandbyFailed,
    StandbyReady,
    StartMethod,
    ZygoteLost,
    ZygoteReady,
)
from ft_launcher.shell.wire import Channel, Message, WireError

__all__ = [
    "START_FAILED", "Command", "Importing", "Pong", "ProcessEvent", "RankEnded", "RankSpec", "RankStarted", "Reaped", "SourcesChanged",
    "StandbyFailed", "StandbyReady", "StartMethod", "Zygote", "ZygoteLost", "ZygoteOptions", "ZygoteReady",
]  # fmt: skip

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100
# The working folder may hold anything, so it must not be importable; what a fresh interpreter has at this point is handed on before the launcher adds itself.
_BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); fresh = sys.path[:], frozenset(sys.modules); sys.path.append(sys.argv[1]); "
    "from ft_launcher.shell.zygote import main; main(*fresh)()"
)
_EXIT_S = 1.0  # a process whose socket has closed is gone a moment later


@dataclass(frozen=True, slots=True)
class ZygoteOptions:
    """What a zygote is started with. `env` is the whole environment of zygote and ranks.

    `log_path` takes the zygote's own output (None: the agent's standard error).

    `flags` are Python's own (`-O`, `-X dev`), for zygote and ranks. `reap_s` bounds a reaping. `early_standby` (spawn only): import torch for a store at once.
    """

    command: Command
    cwd: str
    env: Mapping[str, str]
    preload: tuple[str, ...] = ()
    start_method: StartMethod = "fork"
    flags: tuple[str, ...] = ()
    log_path: str | None = None
    reap_s: float = 5.0
    early_standby: bool = True


class Zygote:
    """A zygote process, from `start` to `close`. `on_event` is called in the event loop that `start` ran in."""

    def __init__(self, options: ZygoteOptions, on_event: Callable[[ProcessEvent], None]) -> None:
        self._options = options
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._pidfd = -1
        self._importing: str | None = None
        self._closing = False
        self._ready = False
        self._writing = False
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The zygote's pid, None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def importing(self) -> str | None:
        """The module of the preload list that is being imported now, None otherwise."""
        return self._importing

    async def start(self) -> None:
        """Execs the zygote from the calling thread, which must be the main thread: its end would kill the zygote. `ZygoteReady` follows.

        Raises OSError when the process cannot be started (no such folder, no memory, log not writable).
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(ours.close)
            setup_fd = os.memfd_create("ft-zygote-setup")
            stack.callback(os.close, setup_fd)
            os.write(setup_fd, self._setup())
            log_fd = _open_log(self._options.log_path)
            stack.callback(os.close, log_fd)
            self._process = self._exec(theirs.fileno(), setup_fd, log_fd)
            undo.pop_all()
        self._channel = Channel(ours)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        loop.add_reader(ours.fileno(), self._on_readable)

    def fork_ranks(self, cycle: int, specs: Sequence[RankSpec]) -> None:
        """Starts the ranks of a cycle: RankStarted for each, or SourcesChanged and none. The page descriptors may be closed when this returns.

        A rank that the system cannot even fork is a RankEnded with pid 0 and code START_FAILED.
        """
        fds = [spec.page_fd for spec in specs if spec.page_fd is not None]
        self._send({"op": "fork", "cycle": cycle, "specs": _spec_bodies(specs)}, fds)

    def kill(self, cycle: int, ranks: Sequence[int] | None, sig: int, *, group: bool) -> None:
        """Signals the cycle's ranks (None: all that live), each alone or with its whole process group. Ranks that have ended are left out silently."""
        self._send({"op": "kill", "cycle": cycle, "ranks": None if ranks is None else list(ranks), "sig": int(sig), "group": group})

    def reap(self, cycle: int) -> None:
        """Kills and collects everything that belongs to ranks, of whatever cycle: RankEnded for each rank, then Reaped, within `reap_s`."""
        self._send({"op": "reap", "cycle": cycle})

    def prepare_standby(self, token: int, host: str) -> None:
        """Starts a TCPStore listening on `host` ("" for all interfaces): StandbyReady or StandbyFailed follows; StandbyFailed also when it ends unasked later."""
        self._send({"op": "standby", "token": token, "host": host})

    def release_standby(self, token: int) -> None:
        """Ends that store."""
        self._send({"op": "release", "token": token})

    def ping(self) -> None:
        """Pong follows if the zygote's loop turns. Not answered before ZygoteReady: imports take what they take."""
        self._send({"op": "ping"})

    async def close(self, grace_s: float, spare: Collection[int] = ()) -> tuple[int, ...]:
        """Ends the zygote and everything below it; returns the pids that would not die. No event comes after this.

        A zygote that still imports is killed; one that takes longer than `grace_s` too. Such a one, or one that was lost, leaves its ranks' children to this
        process: then everything below this process is killed, except `spare` (the agent's other children) and what hangs below those.
        """
        self._closing = True
        if self._process is None:
            return ()
        self._send({"op": "close"})
        if not self._ready or not await self._wait(grace_s):
            self._kill_now()
            await self._wait(_EXIT_S)
        clean = self._process.poll() == 0
        self._release()
        if clean:
            return ()
        return (await asyncio.to_thread(strays.kill_all_below, os.getpid(), spare, self._options.reap_s)).left

    def _exec(self, sock_fd: int, setup_fd: int, log_fd: int) -> subprocess.Popen[bytes]:
        options = self._options
        numbers = (str(os.getpid()), str(sock_fd), str(setup_fd))
        return subprocess.Popen(
            [sys.executable, *options.flags, "-c", _BOOT, _ROOT, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(sock_fd, setup_fd),
            cwd=options.cwd,
            env={"PYTHONUNBUFFERED": "1", **options.env},
            start_new_session=True,
        )

    def _setup(self) -> bytes:
        options = self._options
        names = ("preload", "start_method", "flags", "reap_s", "early_standby")
        return json.dumps({"command": asdict(options.command), **{name: getattr(options, name) for name in names}}).encode()

    def _send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self._channel is None or self._gone.is_set():
            return  # ZygoteLost has said it, or close was asked for
        self._channel.send(body, fds)
        self._watch_writing()

    def _watch_writing(self) -> None:
        channel = self._channel
        if channel is None or channel.wants_write == self._writing:
            return
        loop = asyncio.get_running_loop()
        self._writing = channel.wants_write
        if self._writing:
            loop.add_writer(channel.fileno(), self._on_writable)
        else:
            loop.remove_writer(channel.fileno())

    def _on_writable(self) -> None:
        if self._channel is not None:
            self._channel.flush()
            self._watch_writing()

    def _on_readable(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            messages = channel.receive()
        except (WireError, ValueError):
            messages, channel.eof = [], True
        for message in messages:
            self._hear(message)
        if channel.eof:  # it ends, or has lost its senses: its own end (the pidfd) tells how
            loop = asyncio.get_running_loop()
            loop.remove_reader(channel.fileno())
            loop.call_later(_EXIT_S, self._kill_now)

    def _hear(self, message: Message) -> None:
        event = process_events.decode(message.body)
        if isinstance(event, Importing):
            self._importing = event.module
            return
        if isinstance(event, ZygoteReady):
            self._importing, self._ready = None, True
        if not self._closing:
            self._on_event(event)

    def _on_exit(self) -> None:
        if self._gone.is_set() or self._process is None:
            return
        if self._channel is not None and not self._channel.eof:
            self._on_readable()
        code = self._process.wait()
        self._gone.set()
        self._stop_watching()
        if not self._closing:
            self._on_event(ZygoteLost(_reason(code, self._importing)))

    def _kill_now(self) -> None:
        if self._process is not None and not self._gone.is_set():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _wait(self, limit_s: float) -> bool:
        try:
            await asyncio.wait_for(self._gone.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    def _stop_watching(self) -> None:
        loop = asyncio.get_running_loop()
        if self._channel is not None:
            loop.remove_reader(self._channel.fileno())
            loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _release(self) -> None:
        self._stop_watching()
        self._gone.set()


def _spec_bodies(specs: Sequence[RankSpec]) -> list[dict[str, Any]]:
    bodies, at = [], 0
    for spec in specs:
        body = asdict(spec)
        body["page"] = None if body.pop("page_fd") is None else at
        at += spec.page_fd is not None
        bodies.append(body)
    return bodies


def _open_log(path: str | None) -> int:
    if path is None:
        return os.dup(2)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _reason(code: int, importing: str | None) -> str:
    how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
    return f"the zygote {how}" + (f" while it imported {importing!r} (--preload)" if importing else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time"
