"""The gate before a node's first cycle and between two: when it opens, what it says, and that nobody waits for nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.core.events import RanksReaped
from ft_launcher.core.evidence import RankProgress
from ft_launcher.shell import health
from ft_launcher.shell.device_ids import Devices
from ft_launcher.shell.health import Gate, Outlook
from ft_launcher.shell.health_clearing import Clearing
from ft_launcher.shell.progress_file import ProgressFile
from tests.health.conftest import GIB, Driver, Gpu

pytestmark = pytest.mark.serial
REAPED = RanksReaped(0, (), 0.5, {0: RankProgress(None, 0, None, 1.0, False), 1: RankProgress(7, 3, None, 1.0, True)})


class Seen:
    """A gate with everything it told its agent."""

    def __init__(self, command: str | None = None, devices: Devices | None = None) -> None:
        self.said: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.unfit: list[str] = []
        self.ready: list[str] = []
        self.waits_for: int | None = 0
        outlook = Outlook("a", dict(os.environ), lambda text, _: self.said.append(text), lambda *_, **fields: self.records.append(fields))
        self.gate = Gate(outlook, devices or Devices(), command)

    def begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.gate.begin(self.unfit.append, lambda: self.waits_for))

    async def until(self, what: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not what():
                await asyncio.sleep(0.01)


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def test_without_checks_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        seen = Seen()
        seen.gate.when_open(lambda: seen.ready.append("now"))
        assert seen.ready == ["now"]
        fed: list[RanksReaped] = []
        Clearing(seen.gate).after(REAPED, False, fed.append)
        Clearing().after(REAPED, False, fed.append)
        assert fed == [REAPED, REAPED]  # in the same moment, without a turn of the loop
        await asyncio.wait_for(seen.begin(), 30)

    play(story)


def test_it_opens_when_the_first_check_has_passed(tmp_path: Path) -> None:
    async def story() -> None:
        go = tmp_path / "go"
        seen = Seen(f"until [ -e {go} ]; do sleep 0.02; done")
        task = seen.begin()
        seen.gate.when_open(lambda: seen.ready.append("first"))
        seen.gate.when_open(lambda: seen.ready.append("second"))  # a zygote that was replaced meanwhile
        await seen.until(lambda: seen.gate._outlook.spare)  # it runs, and no sweep may touch it
        assert seen.ready == []
        go.touch()
        await seen.until(lambda: seen.ready)
        assert seen.ready == ["second"]
        seen.gate.when_open(lambda: seen.ready.append("later"))
        assert seen.ready == ["second", "later"]
        task.cancel()

    play(story)


def test_a_node_that_fails_stays_closed_and_says_why() -> None:
    async def story() -> None:
        seen = Seen("echo no NIC; exit 2")
        seen.gate.when_open(lambda: seen.ready.append("never"))
        await asyncio.wait_for(seen.begin(), 30)
        assert seen.unfit == ["health check: 'echo no NIC; exit 2': exit 2: no NIC"]
        assert seen.ready == []
        assert seen.records[0]["reason"] == "exit 2: no NIC"
        seen.gate.overrule()
        assert seen.ready == ["never"]
        assert (await seen.gate.after(3))[0] is None  # not run any more
        assert len(seen.records) == 1

    play(story)


def test_between_cycles_it_is_asked_again(tmp_path: Path) -> None:
    async def story() -> None:
        log = tmp_path / "asked"
        seen = Seen(
            f"echo $FT_NODE_ID $FT_CYCLE $FT_HEALTH_REASON $FT_DEVICES >> {log}; [ $FT_HEALTH_REASON = start ]", Devices(("d0", "d1"))
        )
        task = seen.begin()
        seen.gate.when_open(lambda: seen.ready.append("go"))
        await seen.until(lambda: seen.ready)
        fed: list[RanksReaped] = []
        Clearing(seen.gate).after(REAPED, False, fed.append)
        assert fed == []
        await seen.until(lambda: fed)
        assert fed[0].unfit is not None and "exit 1" in fed[0].unfit
        assert log.read_text() == "a 0 start d0,d1\na 1 restart d0,d1\n"
        task.cancel()

    play(story)


def test_after_the_last_cycle_nothing_is_waited_for() -> None:
    async def story() -> None:
        seen = Seen("sleep 1000")
        fed: list[RanksReaped] = []
        Clearing(seen.gate).after(REAPED, True, fed.append)
        assert fed == [REAPED]

    play(story)


def test_a_job_that_is_to_end_does_not_wait_for_a_check() -> None:
    async def story() -> None:
        seen = Seen("sleep 1000")
        fed: list[RanksReaped] = []
        clearing = Clearing(seen.gate)
        clearing.after(REAPED, False, fed.append)
        await seen.until(lambda: seen.gate._outlook.spare)
        clearing.cut()
        await seen.until(lambda: fed)
        assert fed == [REAPED]

    play(story)


def test_closing_feeds_nobody() -> None:
    async def story() -> None:
        seen = Seen("sleep 1000")
        fed: list[RanksReaped] = []
        clearing = Clearing(seen.gate)
        clearing.after(REAPED, False, fed.append)
        await seen.until(lambda: seen.gate._outlook.spare)
        clearing.close()
        await seen.until(lambda: not clearing._tasks)
        assert fed == []

    play(story)


def test_a_waiting_node_is_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health, "IDLE_EVERY_S", 0.02)

    async def story() -> None:
        log = tmp_path / "asked"
        seen = Seen(f"echo $FT_CYCLE >> {log}; [ $FT_CYCLE != 4 ]")
        seen.waits_for = None  # it holds ranks: between cycles is another's business
        task = seen.begin()
        await seen.until(lambda: seen.gate._opened)
        await asyncio.sleep(0.2)
        assert log.read_text() == "0\n"
        seen.waits_for = 4
        await asyncio.wait_for(task, 30)
        assert "exit 1" in seen.unfit[0]

    play(story)


def test_devices_come_before_the_command_and_their_time_is_told(driver: Driver, tmp_path: Path) -> None:
    async def story() -> None:
        log = tmp_path / "asked"
        seen = Seen(f"echo $FT_HEALTH_REASON >> {log}", Devices((), ("GPU-a", "GPU-b")))
        seen.gate._nvrx = None
        task = seen.begin()
        await seen.until(lambda: seen.gate._opened)
        driver.set(Gpu("GPU-a", used=9 * GIB), Gpu("GPU-b"))
        fed: list[RanksReaped] = []
        clearing = Clearing(seen.gate)
        clearing.after(REAPED, False, fed.append)
        await asyncio.sleep(0.2)
        assert log.read_text() == "start\n"
        driver.set(Gpu("GPU-a"), Gpu("GPU-b"))
        await seen.until(lambda: fed)
        assert log.read_text() == "start\nrestart\n"
        assert fed[0].unfit is None
        assert fed[0].seconds >= REAPED.seconds + 0.2
        task.cancel()
        clearing.close()

    play(story)


def test_a_broken_device_makes_the_command_needless(driver: Driver, tmp_path: Path) -> None:
    async def story() -> None:
        log = tmp_path / "asked"
        seen = Seen(f"echo $FT_HEALTH_REASON >> {log}", Devices((), ("GPU-a", "GPU-b")))
        seen.gate._nvrx = None
        driver.set(Gpu("GPU-a", error=15), Gpu("GPU-b"))
        await asyncio.wait_for(seen.begin(), 30)
        assert seen.unfit == ["GPU GPU-a: nvmlDeviceGetMemoryInfo: GPU is lost (error 15)"]
        assert not log.exists()
        seen.gate.overrule()  # only a check can be overruled
        assert not seen.gate._opened
        seen.gate.close()

    play(story)


def test_the_progress_files_last_word_is_in_the_event(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "iteration"
        path.write_text("12")
        file = ProgressFile(path)
        clearing = Clearing(None, file)
        await file.fresh(30)
        clearing.started()
        assert clearing.iteration() is None
        path.write_text("40")  # half a second before the crash
        fed: list[RanksReaped] = []
        clearing.after(REAPED, False, fed.append)
        async with asyncio.timeout(30):
            while not fed:
                await asyncio.sleep(0.01)
        assert [p.iteration for p in fed[0].progress.values()] == [40, 7]
        clearing.close()

    play(story)
