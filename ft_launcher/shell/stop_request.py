"""A stop signal that nobody hears of must not be lost: somebody asked this machine to end, and may kill it soon.

As a rule the signal travels in the node's report and the job decides (core/drain.py). Where the report does not arrive, or the store is known to be away, the node is told so again and
again until it has left: what it does then is the node machine's. It knows when a report was delivered and whether the store answers; it sends nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ft_launcher.core.events import StopUnheard

UNHEARD_S = 1.2
"""A report takes milliseconds, and a store that has not answered for a second is called away."""
AGAIN_S = 0.5


class StopRequest:
    """One agent's. `away()` tells whether the store is; `feed` is the node machine's ear; `grace_s`: how long ranks may take to leave."""

    def __init__(self, away: Callable[[], bool], feed: Callable[[StopUnheard], None], grace_s: float) -> None:
        self._away = away
        self._feed = feed
        self._grace_s = grace_s
        self._delivered = False
        self.arrived = asyncio.Event()

    def delivered(self, signals: tuple[int, ...]) -> None:
        """A report is in the store that names these signals."""
        self._delivered = bool(signals)

    async def insist(self) -> None:
        """From the first stop signal on, as long as nobody hears of it."""
        await self.arrived.wait()
        await asyncio.sleep(UNHEARD_S)
        loop, since_s = asyncio.get_running_loop(), None
        while True:
            if not self._delivered or self._away():
                since_s = loop.time() if since_s is None else since_s
                self._feed(StopUnheard(overdue=loop.time() - since_s >= self._grace_s))
            await asyncio.sleep(AGAIN_S)
