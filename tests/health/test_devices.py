"""Stable names of devices, and the wait for their memory, against a driver that does what a test says."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from ft_launcher.errors import ConfigError
from ft_launcher.shell import device_ids as module
from ft_launcher.shell.device_ids import Devices, device_ids, find_devices, helper_command, visible
from ft_launcher.shell.device_watch import DeviceWatch
from tests.health.conftest import GIB, Driver, Gpu

pytestmark = pytest.mark.serial
PRESENT = ("GPU-a1", "GPU-a2", "GPU-b")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, PRESENT),
        ("", ()),
        ("1", ("GPU-a2",)),
        ("2,0", ("GPU-b", "GPU-a1")),
        (" 2 , 0 ", ("GPU-b", "GPU-a1")),
        ("GPU-b,GPU-a1", ("GPU-b", "GPU-a1")),
        ("GPU-b,0", ("GPU-b", "GPU-a1")),
        ("GPU-a", ()),  # ambiguous: names none
        ("0,7,1", ("GPU-a1",)),  # ends at the first that is not there
        ("0,-1,1", ("GPU-a1",)),
        ("0,0", ()),  # twice: none at all
        ("0,GPU-a1", ()),
        ("MIG-x,MIG-y", ("MIG-x", "MIG-y")),
    ],
)
def test_what_cuda_visible_devices_leaves(listed: str | None, expected: tuple[str, ...]) -> None:
    assert visible(PRESENT, listed) == expected


def test_names_that_are_given() -> None:
    assert device_ids(2, {"FT_DEVICES": "hpu0, hpu1"}) == ("hpu0", "hpu1")


def test_a_launcher_inside_a_rank_does_not_take_the_outer_runs_devices() -> None:
    assert device_ids(1, {"FT_DEVICES": "hpu0,hpu1", "FT_SLOT": "0"}) == ()


@pytest.mark.parametrize("given", ["a", "a,b,c", "a,a", "a,,b", ","])
def test_wrong_names_are_one_clear_line(given: str) -> None:
    with pytest.raises(ConfigError, match=r"FT_DEVICES=.*one name for each of the 2 ranks"):
        device_ids(2, {"FT_DEVICES": given})


def test_without_the_library_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_nvml", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert find_devices(2, {}) == Devices()


def test_names_by_the_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_nvml", lambda: True)
    env = dict(os.environ)
    assert find_devices(2, env) == Devices(("GPU-a", "GPU-b"), ("GPU-a", "GPU-b"))
    assert find_devices(1, {**env, "CUDA_VISIBLE_DEVICES": "1"}) == Devices(("GPU-b",), ("GPU-b",))
    assert find_devices(4, env) == Devices((), ("GPU-a", "GPU-b"))  # several ranks on a GPU: slots have no device of their own
    assert find_devices(2, {**env, "FT_DEVICES": "x,y"}) == Devices(("x", "y"), ("GPU-a", "GPU-b"))


def test_a_driver_that_hangs_or_fails_costs_the_names_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_has_nvml", lambda: True)
    monkeypatch.setattr(module, "ASK_S", 0.2)
    monkeypatch.setattr(module, "helper_command", lambda *_: ["sleep", "1000"])
    assert find_devices(2, dict(os.environ)) == Devices()
    monkeypatch.setattr(module, "helper_command", lambda *_: ["false"])
    assert find_devices(2, dict(os.environ)) == Devices()
    monkeypatch.setattr(module, "helper_command", lambda *_: [str(tmp_path / "none")])
    assert find_devices(2, dict(os.environ)) == Devices()


def test_a_helper_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_FAKE_NVML", "/nowhere")
    done = subprocess.run(helper_command("names"), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


class Watched:
    """A DeviceWatch, what it said, and which processes it believes to live."""

    def __init__(self, driver: Driver, living: set[int] | None = None) -> None:
        self.driver = driver
        self.said: list[str] = []
        self.watch = DeviceWatch(("GPU-a", "GPU-b"), self.said.append, lambda pid: pid in (living or set()))

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.watch._helper.pid is None, "a helper was left"


def test_memory_that_falls_is_waited_for(driver: Driver) -> None:
    async def main(watched: Watched) -> None:
        driver.set(Gpu("GPU-a", used=1 * GIB), Gpu("GPU-b"))  # 1 GiB before the first rank is nobody's business
        assert await watched.watch.begin() is None
        driver.set(Gpu("GPU-a", used=60 * GIB), Gpu("GPU-b"))
        waiting = asyncio.create_task(watched.watch.free(60))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        driver.set(Gpu("GPU-a", used=1 * GIB + (100 << 20)), Gpu("GPU-b"))
        assert await waiting is None
        watched.watch.close()

    with Watched(driver) as watched:
        asyncio.run(main(watched))
    assert watched.said == []


def test_memory_that_does_not_fall_makes_the_node_unfit(driver: Driver) -> None:
    async def main(watched: Watched) -> str | None:
        await watched.watch.begin()
        driver.set(Gpu("GPU-a"), Gpu("GPU-b", used=7 * GIB))
        try:
            return await watched.watch.free(0.3)
        finally:
            watched.watch.close()

    with Watched(driver) as watched:
        why = asyncio.run(main(watched))
    assert why == "GPU GPU-b still has 7.0 GiB more in use than before the first cycle 0.3 s after the last rank had gone"


def test_what_others_hold_is_said_once_and_not_waited_for(driver: Driver) -> None:
    async def main(watched: Watched) -> None:
        await watched.watch.begin()
        driver.set(Gpu("GPU-a", used=7 * GIB, users={4711: 7 * GIB}), Gpu("GPU-b"))
        assert await watched.watch.free(60) is None
        assert await watched.watch.free(60) is None
        watched.watch.close()

    with Watched(driver, living={4711}) as watched:
        asyncio.run(main(watched))
    assert len(watched.said) == 1
    assert "process 4711, which is not this job's" in watched.said[0]


def test_a_process_that_is_dying_is_not_somebody_else(driver: Driver) -> None:
    async def main(watched: Watched) -> str | None:
        await watched.watch.begin()
        driver.set(Gpu("GPU-a", used=7 * GIB, users={4711: 7 * GIB}), Gpu("GPU-b"))
        try:
            return await watched.watch.free(0.2)
        finally:
            watched.watch.close()

    with Watched(driver, living=set()) as watched:
        assert "still has 7.0 GiB" in (asyncio.run(main(watched)) or "")


def test_a_lost_device_is_named_in_the_drivers_words(driver: Driver) -> None:
    async def main(watched: Watched) -> str | None:
        await watched.watch.begin()
        driver.set(Gpu("GPU-a"), Gpu("GPU-b", error=15))
        try:
            return await watched.watch.free(60)
        finally:
            watched.watch.close()

    with Watched(driver) as watched:
        assert asyncio.run(main(watched)) == "GPU GPU-b: nvmlDeviceGetMemoryInfo: GPU is lost (error 15)"


def test_a_missing_device_closes_the_gate_before_the_first_cycle(driver: Driver) -> None:
    async def main(watched: Watched) -> str | None:
        driver.set(Gpu("GPU-a"))
        try:
            return await watched.watch.begin()
        finally:
            watched.watch.close()

    with Watched(driver) as watched:
        assert (asyncio.run(main(watched)) or "").startswith("GPU GPU-b: nvmlDeviceGetHandleByUUID:")


def test_a_device_that_cannot_tell_its_memory_is_left_alone(driver: Driver) -> None:
    async def main(watched: Watched) -> None:
        driver.set(Gpu("GPU-a", error=3), Gpu("GPU-b"))
        assert await watched.watch.begin() is None
        assert await watched.watch.free(60) is None
        watched.watch.close()

    with Watched(driver) as watched:
        asyncio.run(main(watched))


def test_a_driver_that_hangs_is_an_answer(driver: Driver) -> None:
    async def main(watched: Watched) -> str | None:
        await watched.watch.begin()
        driver.set(Gpu("GPU-a", hang=True), Gpu("GPU-b"))
        loop_turned = asyncio.create_task(asyncio.sleep(0.05))
        why = await watched.watch.free(0.3)
        assert loop_turned.done()
        return why

    with Watched(driver) as watched:
        assert (asyncio.run(main(watched)) or "").startswith("the GPU driver does not answer")


def test_a_helper_that_was_killed_is_started_again(driver: Driver) -> None:
    async def main(watched: Watched) -> None:
        await watched.watch.begin()
        pid = watched.watch._helper.pid
        assert pid is not None
        os.kill(pid, 9)
        assert await watched.watch.free(60) is None
        assert watched.watch._helper.pid not in (None, pid)
        watched.watch.close()

    with Watched(driver) as watched:
        asyncio.run(main(watched))
