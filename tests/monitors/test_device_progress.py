"""With a device, an iteration counts when the device has done it. A fake device: events complete when the test says so."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import pytest

from monitors.client import Monitor
from monitors.device_progress import MOST_PENDING
from monitors.page import SectionPage


class FakeDevice:
    """Stands for torch.cuda: `finish(n)` lets the device complete the first n recorded events."""

    def __init__(self) -> None:
        self.events: list[FakeDevice.Made] = []
        self.finished = 0
        self.capturing = False
        self.error: Exception | None = None
        self.asked = 0

    class Made:
        def __init__(self, device: FakeDevice) -> None:
            self.device = device
            self.place = -1

        def record(self) -> None:
            assert not self.device.capturing
            self.device.events.append(self)
            self.place = len(self.device.events)

        def query(self) -> bool:
            assert not self.device.capturing
            self.device.asked += 1
            if self.device.error:
                raise self.device.error
            return self.place <= self.device.finished

        def synchronize(self) -> None:
            raise AssertionError("waited for the device")

    def Event(self) -> FakeDevice.Made:
        return self.Made(self)

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=made))
    yield made


def step(monitor: Monitor, iteration: int) -> None:
    with monitor.section("step", iteration=iteration):
        pass


def test_python_running_ahead_of_a_stuck_kernel_is_no_progress(page: SectionPage, monitor: Monitor, device: FakeDevice) -> None:
    monitor.set_iteration(0)
    device.finished = len(device.events)
    for i in range(1, 6):
        step(monitor, i)
    stuck = page.sample()
    assert (stuck.iteration, stuck.steps) == (0, 0) and stuck.sections["step"].count == 5
    device.finished += 3
    with monitor.section("evaluation"):
        pass
    assert (page.sample().iteration, page.sample().steps) == (3, 3)
    device.finished += 2
    step(monitor, 6)
    assert (page.sample().iteration, page.sample().steps) == (5, 5)


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(page: SectionPage, monitor: Monitor, device: FakeDevice) -> None:
    monitor.set_iteration(0)
    asked, device.capturing = device.asked, True
    step(monitor, 1)
    with monitor.section("evaluation"):
        pass
    step(monitor, 2)
    assert (len(device.events), device.asked, page.sample().steps) == (1, asked, 0)
    device.capturing, device.finished = False, 99
    step(monitor, 3)
    assert (page.sample().iteration, page.sample().steps) == (3, 3)


def test_a_device_in_error_never_reaches_the_script_and_progress_is_published_as_without(
    page: SectionPage, monitor: Monitor, device: FakeDevice
) -> None:
    step(monitor, 1)
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    step(monitor, 2)
    asked = device.asked
    step(monitor, 3)
    assert (page.sample().iteration, page.sample().steps) == (3, 3) and device.asked == asked


def test_another_thread_does_not_ask_the_device(page: SectionPage, monitor: Monitor, device: FakeDevice) -> None:
    step(monitor, 1)
    asked, device.finished = device.asked, 9

    def other() -> None:
        with monitor.section("data"):
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert device.asked == asked
    step(monitor, 2)
    assert page.sample().steps == 2


def test_what_waits_for_the_device_is_bounded(page: SectionPage, monitor: Monitor, device: FakeDevice) -> None:
    for i in range(5 * MOST_PENDING):
        step(monitor, i)
    assert len(device.events) <= MOST_PENDING + 1
    device.finished = 10**9
    step(monitor, 10**6)
    step(monitor, 10**6 + 1)
    assert page.sample().iteration == 10**6 + 1


def test_the_same_iteration_is_recorded_once(monitor: Monitor, device: FakeDevice) -> None:
    for _ in range(10):
        monitor.set_iteration(5)
        with monitor.section("forward", iteration=5):
            pass
    assert len(device.events) == 1


@pytest.mark.parametrize(
    "torch", [types.SimpleNamespace(), types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: False)), None]
)
def test_without_an_initialised_device_nothing_is_recorded(
    page: SectionPage, monitor: Monitor, torch: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    step(monitor, 4)
    assert (page.sample().iteration, page.sample().steps) == (4, 1)
