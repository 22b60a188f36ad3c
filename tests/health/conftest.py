"""A driver library for tests, built from C: what is tested is the real way through ctypes and the helper process."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 1 << 30


@dataclass
class Gpu:
    """One line of the fake driver's file."""

    uuid: str
    used: int = 0
    error: int = 0
    hang: bool = False
    users: dict[int, int] = field(default_factory=dict)


class Driver:
    """The fake driver: `set(...)` says what it tells from now on; `env` makes a process find it."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.env = {"LD_LIBRARY_PATH": str(folder), "FT_FAKE_NVML": str(state)}
        self._state = state

    def set(self, *gpus: Gpu) -> None:
        lines = [f"{g.uuid} {g.used} {g.error} {int(g.hang)} {' '.join(f'{p}:{b}' for p, b in g.users.items())}\n" for g in gpus]
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.rename(self._state)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True, timeout=60)
    return folder


@pytest.fixture
def driver(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver with two idle GPUs, found by every helper that a test starts."""
    made = Driver(fake_library, tmp_path / "gpus")
    made.set(Gpu("GPU-a"), Gpu("GPU-b"))
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made
