"""The channel between agents: what is bulky, and the fast sign of life. Decisions never travel here, only through the store.

Each agent listens; the controller keeps one connection to each and hears progress. A connection *closed* by the host means that the agent process is gone; silence means nothing
yet. Anybody who knows the job's secret (from the store) may ask "are you there?". JSON, one object a line; a peer that says anything else is dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ft_launcher.core.membership import Reply

HELLO_S = 1.0
LINE_BYTES = 1 << 20
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an agent is on the channel. `incarnation` tells an agent from its predecessor on the same node id."""

    node_id: str
    incarnation: str
    secret: str


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent to talk to. At the same address another node, or a later agent of this one, may answer: then this agent is gone."""

    node_id: str
    address: str
    incarnation: str

    def is_who(self, said: Body | None) -> bool:
        """Whether this is how that very agent introduces itself."""
        return said is not None and (said.get("node"), said.get("incarnation")) == (self.node_id, self.incarnation)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as its two parts. ValueError for anything else."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _encode(body: Body) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


async def _read(reader: asyncio.StreamReader) -> Body | None:
    """The next object, None at the end of the connection. ValueError for a peer that does not speak our language."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    body = json.loads(line)
    if not isinstance(body, dict):
        raise ValueError("not an object")
    return body


class ChannelServer:
    """An agent's end. `on_request(body)` answers what the controller asks, or None; `tell` sends to every controller that is connected."""

    def __init__(self, identity: Identity, on_request: Callable[[Body, Callable[[Body], None]], None]) -> None:
        self._identity = identity
        self._on_request = on_request
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.controller_gone: Callable[[], None] | None = None

    async def listen(self, port: int = 0) -> int:
        """Listen on all interfaces, IPv4 and IPv6, at one and the same port; returns it. OSError when it is taken."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=LINE_BYTES)
        return int(listener.getsockname()[1])

    @property
    def connected(self) -> bool:
        """A controller is there."""
        return bool(self._writers)

    def tell(self, body: Body) -> None:
        """Send to the controller, if one is connected; a peer that does not read loses the connection, never delays us."""
        data = _encode(body)
        for writer in list(self._writers):
            if writer.transport.get_write_buffer_size() > LINE_BYTES:
                writer.transport.abort()
            else:
                writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            hello = await asyncio.wait_for(_read(reader), HELLO_S)
            if hello is None or not hmac.compare_digest(str(hello.get("secret", "")), self._identity.secret):
                writer.close()
                return
            writer.write(_encode({"node": self._identity.node_id, "incarnation": self._identity.incarnation}))
            await writer.drain()
            if hello.get("role") == "controller":
                await self._serve_controller(reader, writer)
        writer.close()

    async def _serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (body := await _read(reader)) is not None:
                self._on_request(body, lambda reply: writer.write(_encode(reply)))
        finally:
            self._writers.discard(writer)
            if not self._writers and self.controller_gone is not None:
                self.controller_gone()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()


async def _connect(address: str, identity: Identity, role: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Body | None]:
    """Connect and shake hands; the third part is what the other said, None when it closed. OSError and TimeoutError as they come."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
    try:
        writer.write(_encode({"secret": identity.secret, "role": role, "from": identity.node_id}))
        return reader, writer, await _read(reader)
    except BaseException:
        writer.transport.abort()
        raise


async def reach(peer: Peer, identity: Identity, within_s: float = HELLO_S) -> Reply:
    """Is this agent there? Another one at its address means that it is not."""
    try:
        async with asyncio.timeout(within_s):
            _, writer, said = await _connect(peer.address, identity, "probe")
    except (ConnectionRefusedError, ConnectionResetError):
        return Reply.REFUSED
    except (OSError, TimeoutError, ValueError):
        return Reply.SILENT
    writer.transport.abort()
    return Reply.ANSWERED if peer.is_who(said) else Reply.REFUSED


class Line:
    """The controller's connection to one agent: kept up until `close`; every break is told, with what a new attempt gave. `tried`: at least one attempt is over."""

    def __init__(
        self, peer: Peer, identity: Identity, on_body: Callable[[str, Body], None], on_state: Callable[[str, Reply | None], None]
    ) -> None:
        self._peer = peer
        self.tried = False
        self._identity = identity
        self._on_body = on_body
        self._on_state = on_state
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run())

    def send(self, body: Body) -> bool:
        """Ask the agent something; False while there is no connection."""
        if self._writer is None:
            return False
        self._writer.write(_encode(body))
        return True

    async def _run(self) -> None:
        pause_s = 0.1
        while True:
            reply = await self._talk()
            self.tried = True
            self._on_state(self._peer.node_id, reply)
            pause_s = 0.1 if reply is None else min(2 * pause_s, 1.0)
            await asyncio.sleep(pause_s)

    async def _talk(self) -> Reply | None:
        """One connection from start to end. None: it stood and was then closed by the other side; else what the attempt gave."""
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer, said = await _connect(self._peer.address, self._identity, "controller")
        except (ConnectionRefusedError, ConnectionResetError):
            return Reply.REFUSED
        except (OSError, TimeoutError, ValueError):
            return Reply.SILENT
        try:
            if not self._peer.is_who(said):
                return Reply.REFUSED
            self._writer, self.tried = writer, True
            self._on_state(self._peer.node_id, Reply.ANSWERED)
            with suppress(OSError, ValueError, asyncio.LimitOverrunError):
                while (body := await _read(reader)) is not None:
                    self._on_body(self._peer.node_id, body)
            return None
        finally:
            self._writer = None
            writer.transport.abort()

    def hang_up(self) -> None:
        """End the connection, without waiting for its end."""
        self._task.cancel()

    async def close(self) -> None:
        """Hang up; nothing is left when this returns."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
