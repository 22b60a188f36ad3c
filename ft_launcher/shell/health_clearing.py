"""What lies between "nothing of the cycle lives any more" and the node's acknowledgement: only what somebody asked for.

With a health check, with GPUs, or with a progress file there is something to wait for, each bounded; without them the acknowledgement goes out in the same moment. It also holds back the
node's first readiness until the first checks have passed. It adds what was found to the event and hands that on; it decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ft_launcher.core.events import RanksReaped
from ft_launcher.shell.health import Gate
from ft_launcher.shell.progress_file import ProgressFile

FRESH_S = 1.0
"""How long the last word of a progress file is waited for."""


class Clearing:
    """One agent's. Without a gate and a file it only passes things on."""

    def __init__(self, gate: Gate | None = None, file: ProgressFile | None = None) -> None:
        self._gate = gate
        self._file = file
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def iteration(self) -> int | None:
        """What the progress file says, for ranks that say nothing."""
        return self._file.iteration if self._file is not None else None

    async def begin(self, unfit: Callable[[str], None], next_cycle: Callable[[], int | None]) -> None:
        """The first checks, and those of a node that waits (see Gate.begin)."""
        if self._gate is not None:
            await self._gate.begin(unfit, next_cycle)

    def when_open(self, ready: Callable[[], None]) -> None:
        """Call `ready` when the first checks have passed."""
        if self._gate is None:
            ready()
        else:
            self._gate.when_open(ready)

    def started(self) -> None:
        """A cycle begins."""
        if self._file is not None:
            self._file.forget()

    def overrule(self) -> None:
        """See Gate.overrule."""
        if self._gate is not None:
            self._gate.overrule()

    def after(self, reaped: RanksReaped, over: bool, feed: Callable[[RanksReaped], None]) -> None:
        """Feed the event when the node could take ranks again. `over`: no further cycle will start, so nothing is waited for."""
        if over or ((self._gate is None or self._gate.nothing_to_do) and self._file is None):
            feed(reaped)
            return
        task = asyncio.create_task(self._clear(reaped, feed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _clear(self, reaped: RanksReaped, feed: Callable[[RanksReaped], None]) -> None:
        unfit, took_s = None, 0.0
        try:
            _, (unfit, took_s) = await asyncio.gather(self._last_word(), self._checks(reaped.cycle))
        except asyncio.CancelledError:
            if self._closed:
                raise
        progress = self._file.fill(reaped.progress) if self._file is not None else reaped.progress
        feed(replace(reaped, progress=progress, unfit=unfit, seconds=reaped.seconds + took_s))

    async def _last_word(self) -> None:
        if self._file is not None:
            await self._file.fresh(FRESH_S)

    async def _checks(self, cycle: int) -> tuple[str | None, float]:
        return await self._gate.after(cycle) if self._gate is not None else (None, 0.0)

    def cut(self) -> None:
        """The job is to end: what is waited for now does not matter any more."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """End everything of this room."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._gate is not None:
            self._gate.close()
        if self._file is not None:
            self._file.close()
