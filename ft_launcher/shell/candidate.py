"""Standing for controller: whoever gets the `leader` key first, spares by preference; again whenever the office is vacant.

An office is vacant when the key is gone: its lease ended, or somebody saw that the leader's process is gone and removed the key (comparing its create revision, so never a
successor's). It knows one key and one address; what a controller does is none of its business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from ft_launcher.core.membership import Reply
from ft_launcher.errors import PlatformError
from ft_launcher.shell.channel import Identity, reach
from ft_launcher.shell.controller import Controller, DeposedError
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.lease import Registration
from ft_launcher.shell.store import Created, Delete, Entry, LeaseGoneError, Store

HESITATE_S = 0.2
"""Nodes that hold ranks let spares go first: a controller on a spare dies with no rank beside it."""


class Candidate:
    """One agent's candidacy. `make()` builds a fresh controller; `busy()` says whether this node holds ranks."""

    def __init__(self, store: Store, keys: Keys, identity: Identity, make: Callable[[], Controller], busy: Callable[[], bool]) -> None:
        self._store = store
        self._keys = keys
        self._identity = identity
        self._make = make
        self._busy = busy
        self.controller: Controller | None = None

    async def run(self, registration: Registration) -> None:
        """Stand until the job is done under our control (others end by being cancelled). Raises PlatformError when the store stays away."""
        while True:
            leader = await self._store.get(self._keys.leader)
            if leader is not None:
                await self._until_vacant(leader)
                continue
            if self._busy():
                await asyncio.sleep(HESITATE_S)
                if await self._store.get(self._keys.leader) is not None:
                    continue
            with suppress(DeposedError, LeaseGoneError):
                await self._govern(registration)
                return
            await asyncio.sleep(HESITATE_S)

    async def _govern(self, registration: Registration) -> None:
        controller = self._make()
        self.controller = controller
        try:
            await controller.run(registration.lease)
        finally:
            self.controller = None
            await controller.close()

    async def _until_vacant(self, leader: Entry) -> None:
        async for batch in self._store.watch(self._keys.leader, leader.modified + 1):
            if any(change.entry is None or change.entry.created != leader.created for change in batch.changes) or batch.reset:
                return

    async def leader_disconnected(self) -> None:
        """The controller's connection to us was closed by its host. If nobody listens there any more, the office is vacant now, not a TTL later."""
        with suppress(PlatformError):
            leader = await self._store.get(self._keys.leader)
            if leader is None:
                return
            said = json.loads(leader.value)
            if said["node"] == self._identity.node_id or not said.get("address"):
                return
            if await reach(said["address"], said["node"], self._identity) is Reply.REFUSED:
                await self._store.transact([Created(self._keys.leader, leader.created)], [Delete(self._keys.leader)])
