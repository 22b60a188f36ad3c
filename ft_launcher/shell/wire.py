"""Framed JSON messages with descriptors, over a unix stream socket, without ever blocking.

The agent and its zygote speak through this. A frame is eight bytes (length of the JSON, number of descriptors) and the JSON; its descriptors travel with its
first byte (SCM_RIGHTS; the kernel never merges two such deliveries, so their order is the frames'). Not pickle: neither end may make the other run code. Not
a packet socket: a fork message for many ranks may outgrow the packet limit. What the peer does not take at once waits in a queue here, so a stopped peer
costs memory, never time. It knows bytes and descriptors; what a message means is `process_events`' business.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_FDS = 253  # the kernel's limit for one delivery (SCM_MAX_FD)
MAX_BYTES = 64 << 20
_HEADER = struct.Struct("!II")
_SPACE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class WireError(Exception):
    """The peer sent what is no frame: the two ends are not the same version, or memory is damaged."""


@dataclass(frozen=True, slots=True)
class Message:
    """One frame as received: its JSON object and its descriptors, close-on-exec, now the receiver's to close."""

    body: dict[str, Any]
    fds: tuple[int, ...]


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    fds: tuple[int, ...]


class Channel:
    """One end of the conversation. `eof` is set once the peer has closed, after all its messages were received."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._in_fds: deque[int] = deque()
        self._out: deque[_Outgoing] = deque()
        self.eof = False

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed or abandoned."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """True while messages wait for the peer to read: call `flush` when the socket is writable."""
        return bool(self._out)

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Queues a message and writes what fits. The descriptors are duplicated: the caller may close its own at once.

        Raises ValueError for more than 253 descriptors. A peer that is gone is no error here: `receive` says so.
        """
        if len(fds) > MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors in one message; the kernel takes {MAX_FDS}")
        data = json.dumps(body, separators=(",", ":")).encode()
        frame = memoryview(_HEADER.pack(len(data), len(fds)) + data)
        self._out.append(_Outgoing(frame, tuple(os.dup(fd) for fd in fds)))
        self.flush()

    def flush(self) -> bool:
        """Writes what the peer takes now; True when nothing is left waiting."""
        while self._out:
            item = self._out[0]
            try:
                sent = self._sock.sendmsg([item.data], _rights(item.fds))
            except BlockingIOError:
                return False
            except OSError:  # the peer is gone; reading says so
                self._drop_queue()
                return True
            _close_all(item.fds)
            item.fds = ()
            item.data = item.data[sent:]
            if not item.data:
                self._out.popleft()
        return True

    def receive(self) -> list[Message]:
        """All complete messages that have arrived, without waiting. Sets `eof` when the peer has closed. Raises WireError."""
        while not self.eof and self._fill():
            pass
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Closes the socket and every descriptor that is still queued or unclaimed."""
        self._drop_queue()
        _close_all(tuple(self._in_fds))
        self._in_fds.clear()
        self._sock.close()

    def abandon(self) -> None:
        """For a forked child: forgets the descriptor without touching it, so that this object can never close a number that is somebody else's by then."""
        self._out.clear()
        self._in_fds.clear()
        if self._sock.fileno() >= 0:
            self._sock.detach()

    def _fill(self) -> bool:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:  # reset: the peer died with messages of ours unread
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._in_fds.extend(_descriptors(payload))
        self._in += data
        self.eof = not data
        return True

    def _take(self) -> Message | None:
        if len(self._in) < _HEADER.size:
            return None
        size, count = _HEADER.unpack_from(self._in)
        if size > MAX_BYTES or count > MAX_FDS:
            raise WireError(f"a frame of {size} bytes and {count} descriptors")
        end = _HEADER.size + size
        if len(self._in) < end or len(self._in_fds) < count:
            return None
        body = json.loads(self._in[_HEADER.size : end])
        del self._in[:end]
        return Message(body, tuple(self._in_fds.popleft() for _ in range(count)))

    def _drop_queue(self) -> None:
        for item in self._out:
            _close_all(item.fds)
        self._out.clear()


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []


def _descriptors(payload: bytes) -> array.array[int]:
    out = array.array("i")
    out.frombytes(payload[: len(payload) - len(payload) % out.itemsize])
    return out


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
