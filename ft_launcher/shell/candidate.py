"""Standing for controller: whoever gets the `leader` key first, spares by preference; again whenever the office is vacant.

An office is vacant when the key is gone: its lease ended, or somebody saw that the leader's process is gone and removed the key (comparing its create revision, so never a
successor's). It knows one key and one address; what a controller does is none of its business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from ft_launcher.core.membership import Reply
from ft_launcher.errors import PlatformError
from ft_launcher.shell.channel import Identity, Peer, reach
from ft_launcher.shell.controller import Controller, DeposedError
from ft_launcher.shell.follow import UNREACHABLE, follow
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.lease import Registration
from ft_launcher.shell.store import Created, Delete, LeaseGoneError, Store

HESITATE_S = 0.2
"""Nodes that hold ranks let spares go first: a controller on a spare dies with no rank beside it."""


@dataclass(frozen=True, slots=True)
class Office:
    """What is stood for, and by whom."""

    store: Store
    keys: Keys
    identity: Identity


class Candidate:
    """One agent's candidacy. `make()` builds a fresh controller; `busy()` says whether this node holds ranks, `patient()` whether a store that stays away is waited for."""

    def __init__(self, office: Office, make: Callable[[], Controller], busy: Callable[[], bool], patient: Callable[[], bool]) -> None:
        self._store, self._keys, self._identity = office.store, office.keys, office.identity
        self._make = make
        self._busy = busy
        self._patient = patient
        self.controller: Controller | None = None

    async def run(self, registration: Registration) -> None:
        """Stand until the job is done under our control (others end by being cancelled). Raises PlatformError when the store stays away."""
        while True:
            try:
                await self._until_vacant()
                if await self._may_go_first():
                    await self._govern(registration)
                    return
            except (DeposedError, LeaseGoneError):
                await asyncio.sleep(HESITATE_S)
            except PlatformError as error:
                if error.exit_code != UNREACHABLE or not self._patient():
                    raise

    async def _may_go_first(self) -> bool:
        if self._busy():
            await asyncio.sleep(HESITATE_S)
        return not self._busy() or await self._store.get(self._keys.leader) is None

    async def _govern(self, registration: Registration) -> None:
        controller = self._make()
        self.controller = controller
        try:
            await controller.run(registration.lease)
        finally:
            self.controller = None
            await controller.close()

    async def _until_vacant(self) -> None:
        """Until there is no leader key. The keys' order tells: what a batch says last holds, and a reset that lists none says that it is gone."""
        async with aclosing(follow(self._store, self._keys.leader, self._patient)) as found:
            async for batch in found:
                if not batch.changes or batch.changes[-1].entry is None:
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
            if await reach(Peer(said["node"], said["address"], said["incarnation"]), self._identity) is Reply.REFUSED:
                await self._store.transact([Created(self._keys.leader, leader.created)], [Delete(self._keys.leader)])
