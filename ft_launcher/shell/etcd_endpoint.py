"""One address of the etcd cluster: its connection, its TLS, and the watch streams that run over it.

Each endpoint has a channel of its own instead of all sharing one balanced target: host names and certificates are then checked per server, and it
is known which server a watch hangs on, so that a server whose *calls* fail loses its watches at once (a frozen one would keep them silently for
ever). A connection on which calls keep timing out is replaced by a fresh one: after a cut of the network TCP may wait a minute before it tries
again, a new connection does not.

It knows sockets and credentials. It must never retry, choose between endpoints, or read an answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from ft_launcher.config import StoreOptions
from ft_launcher.errors import ConfigError
from ft_launcher.shell.etcd_proto import pb, stubs

STRIKES = 2
"""So many timeouts in a row, with no answer between: the connection itself is suspected."""
LINGER_S = 6.0
"""How long a replaced connection may finish calls that are still under way."""
CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # the least time given to one attempt to connect
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),  # a fresh channel is a fresh connection
    ("grpc.enable_http_proxy", 0),  # a proxy for the web is no way to an etcd of the cluster
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Line:
    """An open connection and etcd's services on it (`etcd3`'s stubs, which take an asyncio channel as well as a blocking one)."""

    channel: aio.Channel
    kv: Any
    lease: Any
    watch: Any
    authenticate: Method

    @staticmethod
    def over(channel: aio.Channel) -> Line:
        """The services on a channel. Authentication apart: the package's stub for it would want twenty messages more."""
        authenticate = channel.unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=pb.AuthenticateRequest.SerializeToString,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        return Line(channel, stubs.KVStub(channel), stubs.LeaseStub(channel), stubs.WatchStub(channel), authenticate)

    async def refresh(self, request: Any, timeout: float, metadata: tuple[tuple[str, str], ...]) -> Any:
        """LeaseKeepAlive as one question and one answer: a stream that is opened, used once and closed costs what any call costs."""
        answers = [answer async for answer in self.lease.LeaseKeepAlive([request], timeout=timeout, metadata=metadata)]
        return answers[0] if answers else pb.LeaseKeepAliveResponse()


class Endpoint:
    """An address, and the line to it: opened at first use, opened anew when it is suspected."""

    def __init__(self, host: str, port: int, options: StoreOptions) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._target = f"{_scheme(host)}{self.name}"
        self._options = options
        self._line: Line | None = None
        self._strikes = 0
        self._struck_s = 0.0
        self._streams: set[Any] = set()
        self._lingering: dict[asyncio.Task[None], aio.Channel] = {}

    @property
    def line(self) -> Line:
        """The connection. Inside a running event loop only."""
        if self._line is None:
            self._line = Line.over(self._channel())
        return self._line

    def _channel(self) -> aio.Channel:
        credentials = _credentials(self._options)
        if credentials is None:
            return aio.insecure_channel(self._target, options=CHANNEL)
        return aio.secure_channel(self._target, credentials, options=CHANNEL)

    def stream(self, metadata: tuple[tuple[str, str], ...]) -> Any:
        """A new watch stream, which ends with this endpoint's first failed call. Give it back with `release`."""
        call = self.line.watch.Watch(metadata=metadata)
        self._streams.add(call)
        return call

    def release(self, call: Any) -> None:
        """The stream is not used any more."""
        call.cancel()
        self._streams.discard(call)

    def answered(self) -> None:
        """A call was answered: the connection is good."""
        self._strikes = 0

    def failed(self, asked_s: float, now_s: float, timed_out: bool) -> None:
        """A call made at `asked_s` failed: no watch may rely on this endpoint, and after STRIKES timeouts the next call gets a new connection.

        Calls that were under way together and time out together are one strike.
        """
        for call in self._streams:
            call.cancel()
        self._streams.clear()
        if not timed_out:
            self._strikes = 0
        elif asked_s >= self._struck_s:
            self._strikes, self._struck_s = self._strikes + 1, now_s
        if self._strikes >= STRIKES:
            self._strikes = 0
            self._replace()

    def _replace(self) -> None:
        """Hang up, once what is under way has had its time."""
        if self._line is not None:
            task = asyncio.create_task(self._line.channel.close(LINGER_S))
            self._lingering[task] = self._line.channel
            task.add_done_callback(lambda done: self._lingering.pop(done, None))
            self._line = None

    async def close(self) -> None:
        """End everything that runs over this endpoint."""
        for call in self._streams:
            call.cancel()
        channels = [*self._lingering.values(), *([self._line.channel] if self._line else [])]
        lingering = list(self._lingering)
        for task in lingering:
            task.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        self._line = None


def we_are_cancelled() -> bool:
    """Whether a CancelledError is meant for this task. Otherwise gRPC raised it: the call was cancelled beneath us, or its channel closed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _scheme(host: str) -> str:
    """A literal address needs no resolver."""
    try:
        return f"ipv{ipaddress.ip_address(host).version}:"
    except ValueError:
        return "dns:///"


def _credentials(options: StoreOptions) -> grpc.ChannelCredentials | None:
    """TLS where any of its files is named. Read anew for each connection, so that a renewed certificate is taken up."""
    if options.ca is None and options.cert is None:
        return None
    ca, cert, key = (_read(name, path) for name, path in (("ca", options.ca), ("cert", options.cert), ("key", options.key)))
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--store-{name} {path}: cannot be read: {error.strerror}") from None
