"""May this node take ranks? Asked before its first cycle, after every cycle, and of a waiting spare every few minutes.

In this order: the devices' memory has fallen and the driver has given none up (`device_watch`), nvidia-resiliency-ext's checks pass (`health_nvrx`), the user's own command passes
(`health_command`). Each is done by a process that can be killed, and each has a deadline: one that does not answer has answered. Where none is set up the gate stands open and costs
nothing, so that a recovery waits only for what somebody asked for. It answers with a sentence or with nothing; that an unfit node is replaced is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ft_launcher.core.fitness import by_check, failed_check
from ft_launcher.shell import health_nvrx
from ft_launcher.shell.device_ids import Devices, helper_command
from ft_launcher.shell.device_watch import DeviceWatch
from ft_launcher.shell.health_command import Command
from ft_launcher.shell.health_helper import Helper

Reason = Literal["start", "restart"]
CHECK_S = 60.0
"""A check that has not ended by then has failed."""
FREE_S = 15.0
"""Device memory that has not fallen by then will not. With the reaping before and NVRx's checks after it this stays below the controller's own limit, so that the node can say why."""
NVRX_S = 5.0
"""Of a helper that has started; the first time it may take as long as any check."""
IDLE_EVERY_S = 300.0
"""How often a node without ranks is checked again."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the gate needs to know of its agent. `spare`: pids that no sweep may touch; `say` takes a line and a level; `record` a journal entry."""

    node_id: str
    environ: Mapping[str, str]
    say: Callable[[str, str], None]
    record: Callable[..., None]
    spare: set[int] = field(default_factory=set)


class Gate:
    """One node's. `command`: the user's check, None without one."""

    def __init__(self, outlook: Outlook, devices: Devices, command: str | None) -> None:
        self._outlook = outlook
        self._devices = devices
        self._command = command
        self._watch = DeviceWatch(devices.watched, lambda text: outlook.say(text, "warning")) if devices.watched else None
        self._nvrx = _nvrx_helper(len(devices.watched)) if devices.watched else None
        self._opened = self.nothing_to_do
        self._kept: Callable[[], None] = lambda: None
        self._closed_by: str | None = None
        self._overruled = False

    @property
    def nothing_to_do(self) -> bool:
        """No GPU to watch and no check to run."""
        return self._watch is None and self._command is None

    # -- before the first cycle -------------------------------------------------------------------------------------------------------------

    def when_open(self, ready: Callable[[], None]) -> None:
        """Call `ready` once the node has passed its first checks: now, later or never. Only the newest wish counts."""
        if self._opened:
            ready()
        else:
            self._kept = ready

    async def begin(self, unfit: Callable[[str], None], next_cycle: Callable[[], int | None]) -> None:
        """The first checks, while the zygote imports; then, for ever, those of a node that only waits. `unfit` takes the sentence that closes the gate; `next_cycle` tells
        which cycle a node without ranks waits for, None while it has some.
        """
        if self.nothing_to_do:
            return
        reason = self._closed_by = await self._first()
        if reason is None:
            self._open()
        while reason is None:
            await asyncio.sleep(IDLE_EVERY_S)
            cycle = next_cycle()
            reason = await self._all("start", cycle) if cycle is not None else None
        unfit(reason)

    def _open(self) -> None:
        self._opened = True
        self._kept()

    async def _first(self) -> str | None:
        """The devices are looked at before anything else touches them."""
        gone = await self._watch.begin() if self._watch is not None else None
        return gone or await self._all("start", 0)

    # -- between two cycles -----------------------------------------------------------------------------------------------------------------

    async def after(self, cycle: int) -> tuple[str | None, float]:
        """Wait until the node could take ranks again after `cycle`: why it cannot (None: it can), and the seconds that the devices took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        busy = await self._watch.free(FREE_S) if self._watch is not None else None
        took_s = loop.time() - began
        return busy or await self._all("restart", cycle + 1), took_s

    def overrule(self) -> None:
        """The command fails everywhere: it is not run any more, and what it said of this node does not count."""
        self._overruled = True
        if by_check(self._closed_by) and not self._opened:
            self._open()

    # -- the checks -------------------------------------------------------------------------------------------------------------------------

    async def _all(self, why: Reason, cycle: int) -> str | None:
        """NVRx's and the user's, side by side; the first in this order that fails."""
        checks: list[Awaitable[str | None]] = [self._ask_nvrx(CHECK_S if why == "start" else NVRX_S), self._run_command(why, cycle)]
        found = await asyncio.gather(*checks)
        return next((reason for reason in found if reason is not None), None)

    async def _ask_nvrx(self, limit_s: float) -> str | None:
        if self._nvrx is None:
            return None
        try:
            answer = await self._nvrx.ask(limit_s)
        except TimeoutError:
            return f"nvidia-resiliency-ext's checks did not answer within {limit_s:g} s"
        failed = answer.get("failed") if isinstance(answer, dict) else None
        return str(failed) if failed else None

    async def _run_command(self, why: Reason, cycle: int) -> str | None:
        if self._command is None or self._overruled:
            return None
        told = {"FT_NODE_ID": self._outlook.node_id, "FT_CYCLE": str(cycle), "FT_HEALTH_REASON": why}
        if self._devices.names:
            told["FT_DEVICES"] = ",".join(self._devices.names)
        checked = await Command(self._command, self._outlook.spare).run({**self._outlook.environ, **told}, CHECK_S)
        self._outlook.record("health-check", cycle, reason=checked.reason, seconds=round(checked.seconds, 4), why=why)
        return None if checked.reason is None else failed_check(f"{self._command!r}: {checked.reason}")

    def close(self) -> None:
        """End the helpers."""
        if self._watch is not None:
            self._watch.close()
        if self._nvrx is not None:
            self._nvrx.close()


def _nvrx_helper(gpus: int) -> Helper | None:
    """The package's checks, where it is installed. It lies among the user's packages, so the interpreter is a full one."""
    if not _installed(health_nvrx.PACKAGE):
        return None
    boot = "import sys; sys.path.append(sys.argv.pop(1)); from ft_launcher.shell.health_nvrx import main; main(sys.argv[1:])"
    command = helper_command(str(gpus))
    root = str(Path(__file__).resolve().parents[2])
    return Helper([command[0], "-P", "-c", boot, root, str(gpus)], dict(os.environ))


def _installed(package: str) -> bool:
    """Without importing it."""
    try:
        return importlib.util.find_spec(package.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
