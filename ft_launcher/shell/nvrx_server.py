"""The ranks' sockets for NVRx's client, one a rank and cycle, and what is known through them.

To the watchman it is a second pair of eyes (`sample`, `limits`); to the agent, two variables for each rank's environment and a few lines to say. Without a place for
sockets there are none, which is said once: nothing else depends on them. It never imports torch or NVRx, judges nothing and ends nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ft_launcher.errors import PlatformError
from ft_launcher.shell.nvrx_endpoint import Ears, Endpoint
from ft_launcher.shell.private_folder import PrivateFolder
from monitors.detect import Limits
from monitors.nvrx_session import RankSession
from monitors.nvrx_wire import UpdateConfigMsg, WorkloadControlRequest
from monitors.page import PageSample

ENV_MONITOR, ENV_LAUNCHER = "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET"


@dataclass(frozen=True, slots=True)
class Told:
    """Where things go: `warn(text)`, `request(rank, request)`, `timeouts(rank, timeouts)` when a client's own have changed."""

    warn: Callable[[str], None]
    request: Callable[[int, WorkloadControlRequest], None]
    timeouts: Callable[[int, UpdateConfigMsg], None]


class NvrxServer:
    """One agent's. Use in one event loop; `close()` whatever happens. `places`: folders to try for the sockets, instead of the usual ones."""

    def __init__(self, limits: Limits, told: Told, places: Iterable[str] | None = None) -> None:
        self._limits = limits
        self._told = told
        self._places = places
        self._folder: PrivateFolder | None = None
        self._without = False
        self._endpoints: dict[int, Endpoint] = {}
        self._timeouts: dict[int, UpdateConfigMsg] = {}

    def open(self, cycle: int, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """Sockets for the ranks of a cycle; returns rank -> variables for its environment (none where there is no socket)."""
        self.close_cycle()
        variables: dict[int, dict[str, str]] = {}
        for rank in ranks:
            path = self._open(cycle, rank)
            variables[rank] = {} if path is None else {ENV_MONITOR: path, ENV_LAUNCHER: path}
        return variables

    def _open(self, cycle: int, rank: int) -> str | None:
        if self._without:
            return None
        ears = Ears(lambda r, text: self._told.warn(f"rank {r}: NVRx's socket: {text}"), self._told.request, self._on_timeouts)
        try:
            if self._folder is None:
                self._folder = PrivateFolder(self._places)
            path = os.path.join(self._folder.path, f"c{cycle}r{rank}")
            self._endpoints[rank] = Endpoint(path, RankSession(rank, self._limits), ears)
        except (PlatformError, OSError) as error:
            self._without = True
            self._told.warn(f"NVRx's clients cannot be served: {error}")
            return None
        return path

    def started(self, rank: int, pid: int) -> None:
        """The rank's process is `pid`."""
        if rank in self._endpoints:
            self._endpoints[rank].begin(pid)

    def ended(self, rank: int) -> None:
        """The rank's process is gone; what it had said stays known until the cycle is closed."""
        if rank in self._endpoints:
            self._endpoints[rank].close()

    def close_cycle(self) -> None:
        """Nothing of the cycle is left."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()
        self._timeouts.clear()

    def close(self) -> None:
        """Give everything back, the folder included."""
        self.close_cycle()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # -- what the watchman asks -------------------------------------------------------------------------------------------------------------------

    def sample(self, rank: int, page: PageSample) -> PageSample:
        """The rank as its page and its NVRx client together show it."""
        endpoint = self._endpoints.get(rank)
        return page if endpoint is None else endpoint.session.sample(page)

    def limits(self, rank: int, base: Limits) -> Limits:
        """What the rank is judged by, when the launch's limits are `base`."""
        endpoint = self._endpoints.get(rank)
        return base if endpoint is None else endpoint.session.limits(base)

    def occurrences(self, rank: int, name: str, after_index: int = -1) -> list[tuple[int, int]]:
        """Of a section seen through NVRx's client: as `SectionPage.occurrences`."""
        endpoint = self._endpoints.get(rank)
        return [] if endpoint is None else endpoint.session.occurrences(name, after_index)

    def _on_timeouts(self, rank: int, session: RankSession) -> None:
        if self._timeouts.get(rank) != session.timeouts:
            self._timeouts[rank] = session.timeouts
            self._told.timeouts(rank, session.timeouts)
