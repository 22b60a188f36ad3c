"""A call to the etcd cluster that comes back with an answer: deadlines, failover, backoff, login.

Each attempt has a short deadline and goes to one endpoint; whatever fails there, the next attempt goes to the next one, and after a round of all of
them it waits a little longer each time. An endpoint that answers is kept. Where a whole round timed out the store is slow rather than gone: the
deadline grows until it is met, and shrinks again with quick answers. All calls that come through here can be repeated without harm (writes by what
`etcd_register` adds to them), so that a retry needs no thought; `Answer.sent` says whether an earlier attempt may have arrived too.

It knows gRPC's status codes and etcd's words in them. It must never know what a request means, and never gives up before `timeout_s`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode, aio

from ft_launcher.config import StoreOptions
from ft_launcher.errors import BugError, ConfigError, PlatformError
from ft_launcher.shell.etcd_endpoint import Endpoint, Line, Method, we_are_cancelled
from ft_launcher.shell.etcd_proto import pb
from ft_launcher.shell.store import LeaseGoneError, boottime_s
from ft_launcher.shell.store_health import Health

DEADLINE_S = 0.5
SLOWEST_S = 5.0
"""The first deadline of a call, and what it may grow to."""
LOGIN_S = 10.0
"""A server spends 0.1 s of one core on each password (bcrypt), and all agents of a job come at once."""
BACKOFF_S = (0.1, 1.0)
"""After a round of all endpoints: the first pause and the longest."""
UNREACHABLE = 69
LEADER = ("hasleader", "true")
"""A member that has lost its leader shall refuse rather than wait; its watches end."""

Pick = Callable[[Line], Method]


@dataclass(frozen=True, slots=True)
class Answer:
    """`asked_s`: CLOCK_BOOTTIME just before the attempt that was answered. `sent`: attempts that may have reached a server, this one included."""

    response: Any
    asked_s: float
    sent: int


class AuthDisabledError(Exception):
    """A login where the cluster asks for none."""


class LeaseExistsError(Exception):
    """A lease that shall be made is there already."""


class ClosedError(PlatformError):
    """The store was closed while this was under way."""


@dataclass(slots=True)
class _Trouble:
    """What one call has met so far."""

    began_s: float
    asked_s: float = 0.0
    sent: int = 0
    logins: int = 0
    pause_s: float = BACKOFF_S[0]
    slow: bool = False
    tried: set[str] = field(default_factory=set)


class Calls:
    """Calls to whichever endpoint answers. Belongs to one process and one event loop."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._endpoints = [Endpoint(host, port, options) for host, port in options.endpoints]
        self._current = random.randrange(len(self._endpoints))  # many agents spread over the members
        self._patience_s = DEADLINE_S
        self._token: str | None = None
        self._login_lock = asyncio.Lock()
        self._cluster = 0
        self._pid = os.getpid()
        self.closing = asyncio.Event()
        self.health = Health(boottime_s())

    @property
    def endpoint(self) -> Endpoint:
        """Where the next attempt goes."""
        return self._endpoints[self._current]

    @property
    def patience_s(self) -> float:
        """How long an answer may take at present."""
        return self._patience_s

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each request. Logs in where that was not done yet."""
        if self._options.user is not None and self._token is None:
            await self.login(None)
        return (LEADER, ("token", self._token)) if self._token else (LEADER,)

    async def call(self, pick: Pick, request: Any) -> Answer:
        """The answer to a request. Raises PlatformError (69) after `timeout_s` without one, ConfigError where the user may not, LeaseGoneError."""
        trouble = _Trouble(boottime_s())
        while True:
            self.check()
            metadata = await self.metadata()
            token, endpoint, asked_s = self._token, self.endpoint, boottime_s()
            trouble.asked_s = asked_s
            try:
                response = await self._attempt(endpoint, pick, request, DEADLINE_S, metadata)
            except aio.AioRpcError as error:
                if _wants_login(error) and trouble.logins < 3:
                    trouble.logins += 1
                    await self.login(token)
                else:
                    await self._after(error, endpoint, trouble)
                continue
            self._on_answer(endpoint, response, asked_s)
            return Answer(response, asked_s, trouble.sent + 1)

    async def login(self, stale: str | None) -> None:
        """Get a token, unless somebody else has replaced the stale one meanwhile."""
        if self._options.user is None:
            raise ConfigError(f"store {self.name}: etcd asks for a user: give --store-user U, and the password in FT_STORE_PASSWORD")
        async with self._login_lock:
            if self._token is not None and self._token != stale:
                return
            request = pb.AuthenticateRequest(name=self._options.user, password=self._options.password or "")
            try:
                self._token = await self._authenticate(request)
            except AuthDisabledError:
                self._token = ""

    async def _authenticate(self, request: Any) -> str:
        trouble = _Trouble(boottime_s())
        while True:
            self.check()
            endpoint, asked_s = self.endpoint, boottime_s()
            trouble.asked_s = asked_s
            try:
                response = await self._attempt(endpoint, _authenticate, request, LOGIN_S, (LEADER,))
            except aio.AioRpcError as error:
                await self._after(error, endpoint, trouble)
                continue
            self._on_answer(endpoint, response, asked_s)
            return str(response.token)

    async def _attempt(self, endpoint: Endpoint, pick: Pick, request: Any, least_s: float, metadata: tuple[tuple[str, str], ...]) -> Any:
        try:
            return await pick(endpoint.line)(request, timeout=max(least_s, self._patience_s), metadata=metadata)
        except asyncio.CancelledError:
            if we_are_cancelled():
                raise
            raise self._closed() from None

    async def _after(self, error: aio.AioRpcError, endpoint: Endpoint, trouble: _Trouble) -> None:
        """Returns when another attempt shall be made; raises where none can help or time is up."""
        refused = refusal(error, self.name)
        if refused is not None:
            raise refused
        trouble.sent += 1
        trouble.slow |= error.code() is StatusCode.DEADLINE_EXCEEDED
        trouble.tried.add(endpoint.name)
        self.failed(endpoint, trouble.asked_s, timed_out=error.code() is StatusCode.DEADLINE_EXCEEDED)
        waited_s = boottime_s() - trouble.began_s
        if waited_s >= self._options.timeout_s:
            raise self.unreachable(endpoint, error)
        if len(trouble.tried) == len(self._endpoints):
            await self._end_round(trouble, self._options.timeout_s - waited_s)

    async def _end_round(self, trouble: _Trouble, left_s: float) -> None:
        if trouble.slow:
            self._patience_s = min(SLOWEST_S, 2 * self._patience_s)
        trouble.tried.clear()
        trouble.slow = False
        await self.pause(min(left_s, trouble.pause_s))
        trouble.pause_s = min(BACKOFF_S[1], 2 * trouble.pause_s)

    def failed(self, endpoint: Endpoint, asked_s: float, *, timed_out: bool) -> None:
        """A call (made at `asked_s`) or a stream failed there: whoever uses that endpoint moves to the next one."""
        endpoint.failed(asked_s, boottime_s(), timed_out)
        if endpoint is self.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
        self.health.failed(boottime_s())

    def _on_answer(self, endpoint: Endpoint, response: Any, asked_s: float) -> None:
        endpoint.answered()
        took_s = boottime_s() - asked_s
        self._patience_s = min(self._patience_s, max(DEADLINE_S, 4 * took_s))
        self.health.answered(asked_s)
        cluster = response.header.cluster_id
        if len(self._endpoints) > 1 and self._cluster and cluster != self._cluster:
            raise ConfigError(f"store {self.name}: {endpoint.name} is of another etcd cluster than the others; name the members of one")
        self._cluster = self._cluster or cluster

    async def pause(self, seconds: float) -> None:
        """Wait, with some jitter so that many agents don't come back as one; cut short by `close`."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.0)):
                await self.closing.wait()
        except TimeoutError:
            return

    def check(self) -> None:
        """Raises where the store is closed or this is a forked child: a gRPC channel does not survive a fork."""
        if os.getpid() != self._pid:
            raise BugError(f"the etcd store of process {self._pid} was used in its fork {os.getpid()}")
        if self.closing.is_set():
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"store {self.name}: closed", UNREACHABLE)

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return f"etcd://{','.join(endpoint.name for endpoint in self._endpoints)}"

    def unreachable(self, endpoint: Endpoint, error: aio.AioRpcError | None) -> PlatformError:
        """One line for who has to find out why."""
        why = f"; last from {endpoint.name}: {reason(error)}" if error is not None else ""
        return PlatformError(
            f"store {self.name}: no answer for {self._options.timeout_s:g} s (--store-timeout){why}; is etcd running, and reachable from here?",
            UNREACHABLE,
        )

    async def close(self) -> None:
        """End all calls, streams and connections."""
        self.closing.set()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))


def _authenticate(line: Line) -> Method:
    return line.authenticate


def reason(error: aio.AioRpcError) -> str:
    """gRPC's status in one line."""
    text = " ".join((error.details() or "").split())
    if error.code() is StatusCode.DEADLINE_EXCEEDED:
        return "no answer within the deadline (frozen, overloaded, or packets are dropped)"
    return f"{text or 'no details'} ({error.code().name.lower()})"


def _wants_login(error: aio.AioRpcError) -> bool:
    """The token has expired, was lost with a restart, or is older than the last change of users and roles; or none was sent."""
    text = error.details() or ""
    return error.code() is StatusCode.UNAUTHENTICATED or "revision of auth store is old" in text or "user name is empty" in text


def refusal(error: aio.AioRpcError, store: str) -> Exception | None:
    """What to raise where another attempt would get the same answer; None: try again."""
    code, text = error.code(), error.details() or ""
    if code is StatusCode.NOT_FOUND and "lease not found" in text:
        return LeaseGoneError("the lease is gone")
    if "lease already exists" in text:
        return LeaseExistsError()
    if "authentication is not enabled" in text:
        return AuthDisabledError()
    if code is StatusCode.PERMISSION_DENIED:
        return ConfigError(f"store {store}: this user may not read and write here ({text}); grant it readwrite on the prefix /ft/v1/")
    if "authentication failed" in text:
        return ConfigError(f"store {store}: wrong user or password: check --store-user and FT_STORE_PASSWORD")
    if code is StatusCode.INVALID_ARGUMENT or "message larger than max" in text:
        return PlatformError(f"store {store}: etcd refuses the request: {text}")
    return None
