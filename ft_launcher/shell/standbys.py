"""The stores that wait for coming cycles, as the agent sees them: tokens asked of the zygote, addresses that came back.

A store serves one cycle: it is released once that cycle's ranks are reaped. Where none can be made (no torch in the environment) an address with a free port is offered
instead and rank 0 hosts the store itself, as under plain torchrun.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ft_launcher.core.evidence import Address


def free_port(host: str) -> int:
    """A TCP port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Standbys:
    """`host` is advertised to ranks, `listen_on` ("" for all interfaces) bound. `opened(address)` is told when a store listens."""

    def __init__(self, host: str, listen_on: str, opened: Callable[[Address], None], say: Callable[[str], None]) -> None:
        self._host = host
        self._listen_on = listen_on
        self._opened = opened
        self._say = say
        self._prepare: Callable[[int, str], None] | None = None
        self._release: Callable[[int], None] | None = None
        self._token = 0
        self._wanted: int | None = None
        self._open: dict[Address, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.in_use: Address | None = None

    def use(self, prepare: Callable[[int, str], None] | None, release: Callable[[int], None] | None) -> None:
        """A new zygote serves from now on (None: there is none at the moment); what the old one had opened is gone."""
        self._prepare, self._release = prepare, release
        self._open.clear()
        self._wanted = None

    def request(self, delay_s: float) -> None:
        """Have a store opened, `delay_s` from now; an earlier request that is still waiting is moved forward."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.request, 0.0)
        elif self._prepare is not None and self._wanted is None:
            self._token += 1
            self._wanted = self._token
            self._prepare(self._token, self._listen_on)

    def ready(self, token: int, port: int) -> None:
        """The zygote's store of this token listens."""
        if token == self._wanted:
            self._wanted = None
            address = Address(self._host, port)
            self._open[address] = token
            self._opened(address)

    def failed(self, token: int, reason: str) -> None:
        """There will be no store for this token, or no longer: offer a free port. A store that is in use ends its cycle by itself."""
        known = next((address for address, opened in self._open.items() if opened == token), None)
        if known is not None:
            del self._open[known]
        if token == self._wanted or (known is not None and known != self.in_use):
            self._wanted = None if token == self._wanted else self._wanted
            self._say(f"no standby store ({reason}); rank 0 will host it")
            self._opened(Address(self._host, free_port(self._listen_on), serving=False))

    def release_used(self, delay_s: float = 0.0) -> None:
        """The cycle that met at `in_use` is over; its store is ended `delay_s` from now, out of the way of the next ranks' start."""
        used, self.in_use = self.in_use, None
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._release_at, used)
        else:
            self._release_at(used)

    def _release_at(self, used: Address | None) -> None:
        token = self._open.pop(used, None) if used is not None else None
        if token is not None and self._release is not None:
            self._release(token)
