"""An agent's reports on their way into the store: the newest one, and never over those of another agent.

A report key belongs to whoever joined last under its node id. An agent that was frozen while a successor took its id must not overwrite what that one says, so each write compares
the key with what this agent wrote last. It knows one key; what a report says is none of its business.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from ft_launcher.core.evidence import NodeReport
from ft_launcher.errors import PlatformError, ReplacedError
from ft_launcher.shell.store import Modified, Put, Store


class Reporter:
    """Writes the reports of one agent. Joining has cleared the key. `forgotten()`: the error where the store has lost the run."""

    def __init__(self, store: Store, key: str, forgotten: Callable[[], Awaitable[PlatformError | None]] | None = None) -> None:
        self._store = store
        self._key = key
        self._forgotten = forgotten
        self._revision = 0

    async def send(self, report: NodeReport) -> None:
        """Put it there. Raises PlatformError when the store is out of reach or has lost the run (69), or when the node id is another agent's by now."""
        put = Put(self._key, json.dumps(report.to_json(), separators=(",", ":")))
        while True:
            outcome = await self._store.transact([Modified(self._key, self._revision)], [put])
            if outcome.succeeded:
                self._revision = outcome.revision
                return
            self._revision = await self._own_revision(report)

    async def _own_revision(self, report: NodeReport) -> int:
        """A write of ours that was given up may have arrived late: then the key is still ours."""
        entry = await self._store.get(self._key)
        if entry is None or json.loads(entry.value)["incarnation"] != report.incarnation:
            lost = await self._forgotten() if self._forgotten is not None else None
            raise lost or ReplacedError(f"node id {report.node_id} was taken over by another agent while this one was away")
        return entry.modified
