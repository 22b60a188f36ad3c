"""Waits, between two cycles, until the memory of this node's GPUs has fallen again.

A process that is gone has given its devices back; the driver may need a moment longer, and ranks that start into that moment fail with "out of memory". What counts is how much is used
beyond what was used before the first rank, for containers see only some processes; what living processes of somebody else hold is not waited for. Without GPUs there is no watch and
no cost. It knows bytes and devices; that the node is unfit when it takes too long is what its caller makes of its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_launcher.shell.device_ids import helper_command
from ft_launcher.shell.health_helper import Helper

SLACK_BYTES = 512 << 20
"""What the driver itself may come to hold while a job runs."""
POLL_S = 0.05
BEGIN_S = 30.0
"""The first look wakes the devices, which takes seconds without persistence mode."""

Look = Mapping[str, Mapping[str, Any]]


class DeviceWatch:
    """The GPUs of one node. `say` takes one line for people; `lives(pid)`: whether this process exists here."""

    def __init__(self, devices: Sequence[str], say: Callable[[str], None], lives: Callable[[int], bool] | None = None) -> None:
        self._helper = Helper(helper_command("look", *devices))
        self._say = say
        self._lives = lives or (lambda pid: Path(f"/proc/{pid}").exists())
        self._before: dict[str, int] = {}
        self._told: set[str] = set()

    async def begin(self) -> str | None:
        """The first look: what is used before any rank. Returns why the node cannot take ranks, None when nothing speaks against it."""
        found = await self._look(BEGIN_S)
        return found if isinstance(found, str) else broken(found)

    async def free(self, limit_s: float) -> str | None:
        """Wait until nothing of the last cycle is on the devices, at most `limit_s` seconds. None when they are free, else one sentence."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while True:
            found = await self._look(max(POLL_S, end - loop.time()))
            if isinstance(found, str):
                return found
            if (gone := broken(found)) is not None:
                return gone
            busy = self._busy(found)
            if busy is None:
                return None
            if loop.time() >= end:
                return f"{busy} {limit_s:g} s after the last rank had gone"
            await asyncio.sleep(POLL_S)

    async def _look(self, limit_s: float) -> Look | str:
        """Every device now; a driver that does not answer is a sentence, a helper that cannot be had is nothing seen."""
        try:
            found: Look | None = await self._helper.ask(limit_s)
        except TimeoutError:
            return f"the GPU driver does not answer (asked for {limit_s:.1f} s)"
        if found is None:
            self._once("the GPUs' memory is not watched: their driver's library (NVML) gives no answer")
            return {}
        for uuid, used in ((u, d.get("used")) for u, d in found.items()):
            if used is not None:
                self._before[uuid] = min(used, self._before.get(uuid, used))
        return found

    def _busy(self, found: Look) -> str | None:
        for uuid, device in found.items():
            over = (device.get("used") or 0) - self._before.get(uuid, 0)
            foreign = {int(pid): used for pid, used in device.get("users", {}).items() if self._lives(int(pid))}
            if over <= SLACK_BYTES:
                continue
            if all(foreign.values()) and over - sum(foreign.values()) > SLACK_BYTES:
                return f"GPU {uuid} still has {over / (1 << 30):.1f} GiB more in use than before the first cycle"
            pids = ", ".join(str(pid) for pid in sorted(foreign))
            self._once(f"GPU {uuid}: {over / (1 << 30):.1f} GiB are held by process {pids}, which is not this job's; not waited for")
        return None

    def _once(self, text: str) -> None:
        if text[:60] not in self._told:
            self._told.add(text[:60])
            self._say(text)

    def close(self) -> None:
        """End the helper."""
        self._helper.close()


def broken(found: Look) -> str | None:
    """The first device that its driver has given up, in the driver's words."""
    return next((f"GPU {uuid}: {device['error']}" for uuid, device in found.items() if "error" in device), None)
