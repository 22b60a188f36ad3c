"""GPUs counted without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.slots import count_gpus, visible


class Nvml:
    """The three calls of NVML that are used, with their C convention."""

    def __init__(self, count: int, init: int = 0, status: int = 0) -> None:
        self.count, self.init, self.status, self.open = count, init, status, 0

    def nvmlInit_v2(self) -> int:
        self.open += self.init == 0
        return self.init

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = self.count
        return self.status

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0


def loader(nvml: object) -> Callable[[str], ctypes.CDLL]:
    def load(name: str) -> Any:
        if nvml is None:
            raise OSError(f"{name}: cannot open shared object file")
        return nvml

    return load


def host(root: Path, proc: int = 0, dev: int = 0) -> Path:
    for at in range(proc):
        (root / f"proc/driver/nvidia/gpus/0000:0{at}:00.0").mkdir(parents=True)
    (root / "dev").mkdir()
    for name in [f"nvidia{at}" for at in range(dev)] + ["nvidiactl", "nvidia-uvm", "nvidia-caps", "null"]:
        (root / "dev" / name).touch()
    return root


def test_nvml_first_and_closed_again(tmp_path: Path) -> None:
    nvml = Nvml(4)
    assert count_gpus({}, host(tmp_path, proc=8, dev=8), loader(nvml)) == 4
    assert nvml.open == 0


@pytest.mark.parametrize("nvml", [None, Nvml(4, init=9), Nvml(4, status=3), object()])
def test_without_nvml_the_drivers_folder_then_the_device_files(tmp_path: Path, nvml: object) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert count_gpus({}, host(tmp_path / "a", proc=3, dev=2), loader(nvml)) == 3
    assert count_gpus({}, host(tmp_path / "b", dev=2), loader(nvml)) == 2
    assert getattr(nvml, "open", 0) == 0


def test_no_gpu(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path, loader(None)) == 0
    assert count_gpus({}, host(tmp_path), loader(None)) == 0


@pytest.mark.parametrize(
    ("listed", "present", "left"),
    [
        ("", 8, 0), ("-1", 8, 0), ("0", 8, 1), ("0,1", 8, 2), ("3, 5", 8, 2), ("0,9,1", 8, 1), ("0,-1,1", 8, 1), ("0,0", 8, 0), ("00,0", 8, 0), ("0,,1", 8, 1),
        ("GPU-a,GPU-b", 8, 2), ("MIG-a", 8, 1), ("0,1", None, 2), ("9", 8, 0),
    ],
)  # fmt: skip
def test_what_cuda_visible_devices_leaves(listed: str, present: int | None, left: int) -> None:
    assert visible(listed, present) == left


def test_the_list_and_the_machine_together(tmp_path: Path) -> None:
    root = host(tmp_path, proc=4)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, root, loader(None)) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,7"}, root, loader(None)) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,7"}, tmp_path / "elsewhere", loader(None)) == 2


def test_an_empty_list_asks_nobody(tmp_path: Path) -> None:
    def never(name: str) -> Any:
        raise AssertionError(name)

    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, never) == 0


@pytest.mark.gpu
def test_a_real_gpu_is_counted_as_torch_counts_it() -> None:
    torch = pytest.importorskip("torch")
    assert count_gpus() == torch.cuda.device_count() > 0
