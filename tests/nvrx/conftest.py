"""Fixture: a launcher over ranks that use the real client."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import Launch

WORKER = Path(__file__).with_name("worker.py")
PRELOAD = "torch,nvidia_resiliency_ext.fault_tolerance"


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where the ranks leave marks."""
    path = tmp_path / "marks"
    path.mkdir()
    return path


@pytest.fixture
def nvrx(tmp_path: Path, marks: Path) -> Iterator[Callable[..., Launch]]:
    """`nvrx(*options, style=, steps=, plan=[...], env=)` starts 2 ranks."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        pytest.skip("nvidia_resiliency_ext is not installed")
    started: list[Launch] = []

    def start(*options: str, env: dict[str, str] | None = None, **conf: Any) -> Launch:
        told = {"marks": str(marks), "steps": 10, "style": "sections", **conf}
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        defaults = ["--nproc-per-node", "2", "--preload", PRELOAD, "--tee", "none"]
        job = Launch(folder, *defaults, *options, script=[str(WORKER), json.dumps(told)], env={"CUDA_VISIBLE_DEVICES": "", **(env or {})})
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
