"""One rank's unix socket for NVRx's client: accepts who may talk, cuts frames, answers, and drops who does not keep to the protocol.

The rank may be broken or hostile; all it can harm is what is known about itself. Who connects must be the rank's process or one below it, under this process's user (the
kernel says so). Nothing waits: reading is bounded, an answer that the peer does not take ends the connection, few connections are kept (an idle one gives way to
a new one), and a rank whose messages take more than a share of the loop's time is read no further until the next window. Each kind of trouble is said once.
It decides nothing about what is said: that is the session's (`monitors.nvrx_session`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ft_launcher.shell.strays import read_process
from monitors import nvrx_wire as wire
from monitors.nvrx_session import RankSession

MAX_CONNECTIONS = 4
READ_BYTES = 16384
ACCEPTS = 8
WINDOW_S, BUSY_S = 0.05, 0.025
"""In a window of this length a rank gets so much of the loop's processor time: an honest client that waits for every answer stays below it."""
FLOOD_WINDOWS = 40
GOODBYE_S = 2.0
"""A lost connection is said only when its rank's process has not ended within this time: those of ended ranks are no news."""
MAX_ANCESTORS = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Ears:
    """Who is told: `trouble(rank, text)` once per kind, `request(rank, request)`, `timeouts(rank, session)` when the client has set its own."""

    trouble: Callable[[int, str], None]
    request: Callable[[int, wire.WorkloadControlRequest], None]
    timeouts: Callable[[int, RankSession], None]


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    number: int
    frames: wire.FrameBuffer = field(default_factory=wire.FrameBuffer)


class Endpoint:
    """The socket at `path`, from `open` on; it is served once the rank's pid is known (`begin`). Use in one event loop. Raises OSError when it cannot be bound."""

    def __init__(self, path: str, session: RankSession, ears: Ears) -> None:
        self.path, self.session = path, session
        self._ears = ears
        self._loop = asyncio.get_running_loop()
        self._pid = 0
        self._connections: dict[int, _Connection] = {}
        self._numbers = 0
        self._told: set[str] = set()
        self._window_s = self._spent_s = 0.0
        self._floods = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(path)
            self._listener.listen(ACCEPTS)
        except OSError:
            self._listener.close()
            raise

    def begin(self, pid: int) -> None:
        """The rank's process is `pid`: who waits is let in."""
        if self._listener.fileno() >= 0 and not self._pid:
            self._pid = pid
            self._loop.add_reader(self._listener, self._on_connect)

    def close(self) -> None:
        """The rank has ended: hear what it had still said, then give everything back. A second call does nothing."""
        if self._listener.fileno() < 0:
            return
        for timer in self._timers.values():
            timer.cancel()
        self._listen(False)
        self._listener.close()
        with suppress(OSError):
            Path(self.path).unlink()
        for connection in list(self._connections.values()):
            self._read(connection)
            self._end(connection)

    # -- connections ----------------------------------------------------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        began_s = time.thread_time()
        for _ in range(ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # no descriptor left, or the peer is gone already
                self._say("accept", f"a connection could not be accepted: {error.strerror}")
                self._charge(BUSY_S)
                break
            self._admit(sock)
        self._charge(time.thread_time() - began_s)

    def _admit(self, sock: socket.socket) -> None:
        stranger = self._stranger(sock)
        if stranger is not None:
            self._say("stranger", f"a connection was refused: {stranger}")
            sock.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._say("many", f"more than {MAX_CONNECTIONS} connections at once: the oldest idle one gives way")
            self._end(next(c for c in self._connections.values() if c.number != self.session.connection))
        sock.setblocking(False)
        self._numbers += 1
        connection = _Connection(sock, self._numbers)
        self._connections[connection.number] = connection
        if self._pid and "pause" not in self._timers:
            self._loop.add_reader(sock, self._on_readable, connection)

    def _stranger(self, sock: socket.socket) -> str | None:
        """Why this peer may not talk for the rank; None when it may."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            return f"process {pid} belongs to user {uid}"
        return None if _is_below(pid, self._pid) else f"process {pid} is neither the rank's ({self._pid}) nor below it"

    def _end(self, connection: _Connection) -> None:
        """Forget a connection. What it leaves open is said later, if the rank is alive then."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._loop.remove_reader(connection.sock)
        connection.sock.close()
        left = self.session.closed(time.monotonic_ns(), connection.number)
        if left and self._listener.fileno() >= 0:
            names = ", ".join(wire.printable(name) for name in left)
            text = (
                f"its client's connection was closed with sections open ({names}): hangs of this rank are not found until it connects again"
            )
            self._timers["left"] = self._loop.call_later(GOODBYE_S, self._say, "left", text)

    # -- messages -------------------------------------------------------------------------------------------------------------------------------

    def _on_readable(self, connection: _Connection) -> None:
        began_s = time.thread_time()
        if not self._read(connection):
            self._end(connection)
        self._charge(time.thread_time() - began_s)

    def _read(self, connection: _Connection) -> bool:
        """Take what there is, up to `READ_BYTES`; False when the connection is over."""
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            if connection.frames.pending:
                self._say("cut", f"its client's connection ended within a message ({connection.frames.pending} bytes of it had come)")
            return False
        try:
            return all(self._answer(connection, wire.decode(pickled)) for pickled in connection.frames.feed(data))
        except wire.RefusedError as error:
            lost = (
                "; hangs of this rank are not found until its client connects again" if connection.number == self.session.connection else ""
            )
            self._say("refused", f"its client's connection was closed, for it sent {error}{lost}")
        except Exception as error:  # noqa: BLE001 - the loop's boundary: what a client makes us do wrong costs that client alone
            self._say("bug", f"its client's connection was closed after a fault of the launcher's own: {error!r:.200}")
        return False

    def _answer(self, connection: _Connection, message: wire.Message) -> bool:
        former = self.session.connection
        answer = self.session.receive(time.monotonic_ns(), connection.number, message)
        if answer.note is not None:
            self._say(*answer.note)
        if isinstance(message, wire.UpdateConfigMsg):
            self._ears.timeouts(self.session.rank, self.session)
        if former != self.session.connection and former in self._connections:
            self._end(self._connections[former])
        sent = answer.reply is None or self._send(connection, answer.reply)
        if answer.request is not None:
            self._ears.request(self.session.rank, answer.request)
        return sent and not answer.close

    def _send(self, connection: _Connection, reply: bytes) -> bool:
        """All of it now, or never: a client waits for each answer, so there is room unless it is broken."""
        try:
            if connection.sock.send(reply) == len(reply):
                return True
        except BlockingIOError:
            pass
        except OSError:
            return False
        self._say("deaf", "its client's connection was closed, for it does not read its answers")
        return False

    # -- bounds -----------------------------------------------------------------------------------------------------------------------------------

    def _charge(self, seconds: float) -> None:
        """Count the loop's time; when the window's share is used up, stop reading until the next."""
        now_s = time.monotonic()
        if now_s - self._window_s > WINDOW_S:
            self._window_s, self._spent_s = now_s, 0.0
        self._spent_s += seconds
        if self._spent_s >= BUSY_S and "pause" not in self._timers and self._listener.fileno() >= 0:
            self._listen(False)
            self._timers["pause"] = self._loop.call_later(max(0.0, self._window_s + WINDOW_S - now_s), self._resume)
            self._floods += 1
            if self._floods == FLOOD_WINDOWS:
                self._say("flood", "its client sends more than can be followed: it is slowed down")

    def _resume(self) -> None:
        del self._timers["pause"]
        self._window_s, self._spent_s = time.monotonic(), 0.0
        self._listen(True)

    def _listen(self, on: bool) -> None:
        """Everything at once: the listener and all connections."""
        if not self._pid:
            return
        if not on:
            for sock in (self._listener, *(c.sock for c in self._connections.values())):
                self._loop.remove_reader(sock)
            return
        self._loop.add_reader(self._listener, self._on_connect)
        for connection in self._connections.values():
            self._loop.add_reader(connection.sock, self._on_readable, connection)

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._ears.trouble(self.session.rank, text)


def _is_below(pid: int, root: int) -> bool:
    """Whether `pid` is `root` or descends from it, or is in its session (a rank leads one; what left its parent behind is still in it)."""
    with suppress(OSError):
        if pid > 0 and os.getsid(pid) == root:
            return True
    for _ in range(MAX_ANCESTORS):
        if pid == root:
            return True
        process = read_process(pid) if pid > 1 else None
        if process is None:
            return False
        pid = process.ppid
    return False
