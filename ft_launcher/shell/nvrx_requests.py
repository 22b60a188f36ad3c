"""What a rank asks of the launcher through NVRx's client (`send_workload_control_request`), and what becomes of it.

*Shut down* is a request to stop the job, as if this node's agent had been sent SIGTERM: once, however many ranks ask. *Exclude this node* makes the node unfit where another
registered node could take its place, so that it is replaced; without one it is only said, for stopping the job was not what was asked. *Continue* is only noted. Everything is
in the journal. The rank's wish is passed on; whether the job ends, and which spare it gets, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from ft_launcher.core.events import NodeEvent, NodeUnfit, SignalArrived
from ft_launcher.core.state import JobState
from ft_launcher.errors import FTError
from ft_launcher.shell.journal import Journal
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.nvrx_server import Told
from ft_launcher.shell.store import Store
from monitors.nvrx_session import fields
from monitors.nvrx_wire import UpdateConfigMsg, WorkloadAction, WorkloadControlRequest


class Node(Protocol):
    """What is asked of the node machine."""

    cycle: int
    job: JobState | None


class NvrxRequests:
    """One agent's. `feed` takes events for the node machine, `warn` a line for people."""

    def __init__(self, node: Node, feed: Callable[[NodeEvent], None], warn: Callable[[str], None], journal: Journal) -> None:
        self._node = node
        self._feed = feed
        self._warn = warn
        self._journal = journal
        self._store: tuple[Store, Keys] | None = None
        self._done: set[tuple[int, WorkloadAction]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, store: Store, keys: Keys) -> Told:
        """What the server is given; spares are looked up in `store`."""
        self._store = (store, keys)
        return Told(self._warn, self._on_request, self._on_timeouts)

    def _on_timeouts(self, rank: int, timeouts: UpdateConfigMsg) -> None:
        self._journal.record("nvrx-timeouts", self._node.cycle, rank=rank, **fields(timeouts))

    def _on_request(self, rank: int, request: WorkloadControlRequest) -> None:
        cycle = self._node.cycle
        self._journal.record("nvrx-request", cycle, rank=rank, action=request.action.name, description=request.description)
        done = (-1 if request.action is WorkloadAction.ShutdownWorkload else cycle, request.action)
        if done in self._done or request.action is WorkloadAction.Continue:
            return
        self._done.add(done)
        said = f" ({request.description})" if request.description else ""
        if request.action is WorkloadAction.ShutdownWorkload:
            self._warn(f"rank {rank} asks to shut the workload down{said}: treated as SIGTERM to this node's agent")
            self._feed(SignalArrived(signal.SIGTERM))
            return
        task = asyncio.get_running_loop().create_task(self._exclude(cycle, f"rank {rank} asked to exclude this node{said}"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exclude(self, cycle: int, reason: str) -> None:
        """With a spare the node is given up; its ranks are placed on the spare by whoever decides."""
        try:
            spares = await self._spares()
        except FTError as error:
            self._warn(f"{reason}; whether there is a spare cannot be told ({error}): the job goes on here")
            return
        if spares:
            self._warn(f"{reason}: it counts as unfit")
            self._feed(NodeUnfit(cycle, reason))
        else:
            self._warn(f"{reason}; there is no spare: the job goes on here")

    async def _spares(self) -> list[str]:
        """Registered nodes that hold no ranks and were not given up."""
        job = self._node.job
        if self._store is None or job is None or job.placement is None:
            return []
        store, keys = self._store
        nodes = [entry.key.removeprefix(keys.nodes) for entry in (await store.list(keys.nodes)).entries]
        return [node for node in nodes if node not in job.placement.nodes and node not in job.lost and node not in job.ruled_out]
