"""Keeps this node registered: renews the lease, and registers again when it was lost.

Losing the lease stops commits, not ranks: the deadline goes into the ranks' pages, and everything else is the controller's to weigh. A store that is away is waited for without
end: training goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from ft_launcher.core.evidence import NodeInfo
from ft_launcher.errors import FTError
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Created, LeaseGoneError, Put, Store

RENEWALS = 4
"""Keep-alives for each lease time, so that three may be lost."""


class Registration:
    """One node's presence in the store. `on_deadline(s)`: until when the lease is known to hold (CLOCK_BOOTTIME); `on_lease(id)`: there is a new one."""

    def __init__(self, store: Store, keys: Keys, info: NodeInfo, ttl_s: float) -> None:
        self._store = store
        self._key = keys.node(info.node_id)
        self._info = info
        self._ttl_s = ttl_s
        self.lease = 0
        self.on_deadline: Callable[[float], None] = lambda _: None
        self.on_usurped: Callable[[str], None] = lambda _: None

    async def keep(self, lease: int) -> None:
        """Renew until cancelled."""
        self.lease = lease
        while True:
            try:
                deadline_s = await self._store.keep_alive(self.lease)
                if deadline_s is None:
                    await self._again()
                else:
                    self.on_deadline(deadline_s)
            except FTError:
                pass  # the store is away: its health listeners have said so
            await asyncio.sleep(self._ttl_s / RENEWALS)

    async def _again(self) -> None:
        """The lease has ended (a long outage, or this process was frozen): register anew, unless somebody else holds the id by now."""
        lease = await self._store.grant(self._ttl_s)
        try:
            outcome = await self._store.transact([Created(self._key, 0)], [Put(self._key, json.dumps(self._info.to_json()), lease)])
        except LeaseGoneError:
            return
        if outcome.succeeded:
            self.lease = lease
            return
        holder = await self._store.get(self._key)
        if holder is not None and json.loads(holder.value).get("incarnation") != self._info.incarnation:
            self.on_usurped(f"node id {self._info.node_id} was taken over by another agent while this one had no lease")

    async def end(self) -> bool:
        """Give the lease back: the registration vanishes at once. False where the store does not answer: then it ends by itself."""
        try:
            await asyncio.wait_for(self._store.revoke(self.lease), 1.0)
        except (FTError, TimeoutError):
            return False
        return True
