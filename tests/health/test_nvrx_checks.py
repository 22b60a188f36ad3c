"""nvidia-resiliency-ext's checks, asked in a process of their own: a stand-in for the package, and the package itself where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ft_launcher.shell.device_ids import Devices
from ft_launcher.shell.health import Gate, Outlook, _nvrx_helper
from ft_launcher.shell.health_helper import Helper

pytestmark = pytest.mark.serial

STAND_IN = """
import logging, os
log = logging.getLogger(__name__)
print("noise on standard output")
class GPUHealthCheck:
    def __call__(self):
        said = open(os.environ["FT_FAKE_GPU"]).read()
        if said == "raise":
            raise RuntimeError("no idea")
        if said:
            log.warning(said)
        return not said
class NicHealthCheck:
    def __init__(self):
        self.nic_name = None
    def set_nic_device(self, local_rank):
        self.nic_name = "mlx5_0" if local_rank == 0 else None
    def __call__(self):
        down = os.path.exists(os.environ["FT_FAKE_GPU"] + ".nic")
        if down:
            log.warning("GPU 0 NIC/IB mlx5_0 link down counter has been incremented: 3 -> 4")
        return not down
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name, and the file that says what its GPU check finds."""
    folder = tmp_path / "lib" / "nvidia_resiliency_ext" / "shared_utils"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "health_check.py").write_text(STAND_IN)
    told = tmp_path / "gpu"
    told.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setenv("FT_FAKE_GPU", str(told))
    return told


def helper() -> Helper:
    command = f"import sys; sys.path.append({str(Path.cwd())!r}); from ft_launcher.shell.health_nvrx import main; main(['2'])"
    return Helper([sys.executable, "-P", "-c", command])


def test_what_the_package_says_is_passed_on(package: Path) -> None:
    async def main() -> None:
        asked = helper()
        answers = []
        for said in ("", "GPU 3: Requires a reset to recover.", "raise", ""):
            package.write_text(said)
            answers.append((await asked.ask(60))["failed"])
        package.with_suffix(".nic").touch()
        answers.append((await asked.ask(60))["failed"])
        asked.close()
        assert answers == [
            None,
            "GPU check: GPU 3: Requires a reset to recover.",
            None,  # a check that cannot check says nothing about the node
            None,
            "network card of GPU 0: GPU 0 NIC/IB mlx5_0 link down counter has been incremented: 3 -> 4",
        ]

    asyncio.run(main())


def test_the_gate_closes_on_it(package: Path) -> None:
    async def main() -> str | None:
        gate = Gate(Outlook("a", {}, lambda *_: None, lambda *_, **__: None), Devices((), ()), None)
        gate._nvrx = helper()
        package.write_text("GPU 0: Requires a node reboot to recover. Reboot the system.")
        try:
            return await gate._all("restart", 1)
        finally:
            gate.close()

    assert asyncio.run(main()) == "GPU check: GPU 0: Requires a node reboot to recover. Reboot the system."


def test_a_package_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "nvidia_resiliency_ext.py").write_text("raise ImportError('broken')")
    command = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({str(Path.cwd())!r}); from ft_launcher.shell.health_nvrx import main; main(['1'])"
    done = subprocess.run([sys.executable, "-P", "-c", command], input="\n\n", capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"failed": None}] * 2


@pytest.mark.skipif(importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="needs nvidia-resiliency-ext")
def test_the_package_itself_finds_nothing_where_there_is_no_gpu() -> None:
    async def main() -> object:
        real = _nvrx_helper(0)
        assert real is not None
        try:
            return await real.ask(120)
        finally:
            real.close()

    assert asyncio.run(main()) == {"failed": None}
