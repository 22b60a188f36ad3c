"""Fixtures: a launcher over the plan-driven worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import WORKER, Launch

Launcher = Callable[..., Launch]


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where the workers leave marks."""
    path = tmp_path / "marks"
    path.mkdir()
    return path


@pytest.fixture
def launch(tmp_path: Path, marks: Path) -> Iterator[Launcher]:
    """`launch(*options, plan=[...], steps=, **conf)` starts 4 ranks of the worker; `script=` something else."""
    started: list[Launch] = []

    def start(*options: str, script: list[str] | None = None, env: dict[str, str] | None = None, **conf: Any) -> Launch:
        told = {"steps": 20, "marks": str(marks), **conf}
        folder = tmp_path / f"run{len(started)}" if started else tmp_path / "run"
        folder.mkdir(exist_ok=True)
        defaults = [] if any(o.startswith("--nproc") for o in options) else ["--nproc-per-node", "4", "--tp", "2"]
        defaults += [] if "--preload" in options or "--start-method" in options else ["--preload", "json"]
        job = Launch(folder, *defaults, *options, script=script or [str(WORKER), json.dumps(told)], env=env)
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
