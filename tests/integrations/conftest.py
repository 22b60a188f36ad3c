"""Fixture: a Slurm of one machine, with the example's job script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).resolve().parent
JOB = HERE.parent.parent / "examples" / "slurm" / "job.sh"
PATIENCE_S = 90.0


class Slurm:
    """`sbatch` the job script and read what was called."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder = folder
        self.state = folder / "slurm"
        self.logs = folder / "log files"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.state.mkdir()
        (self.state / "cluster.json").write_text(json.dumps({"nodes": nodes}))
        for program in ("sbatch", "srun", "scontrol"):
            self.program(program, [sys.executable, "-IS", str(HERE / "fake_slurm.py"), program])
        self.python = self.program("python of the job", [sys.executable, "-IS", str(HERE / "slurm_agent.py")])
        self.started: list[subprocess.Popen[str]] = []

    def program(self, name: str, words: list[str]) -> Path:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    def environment(self, plan: list[dict[str, Any]], **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FT_")) or name == "FT_TEST_SESSION"}
        own = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE_SLURM": str(self.state), "FAKE_PLAN": json.dumps(plan), "FAKE_SLURM_NODES": "3", "PYTHON": str(self.python),
            "FT_STORE": "etcd://store-1:2379", "FT_LOG_DIR": str(self.logs), "PYTHONPATH": str(HERE.parent.parent), "SPARES": "1",
        }  # fmt: skip
        return {**clean, **own, **more}

    def submit(self, plan: list[dict[str, Any]], *args: str, script: Path = JOB, **more: str) -> tuple[int, str]:
        """The job from its submission to its end: exit code and what it said."""
        done = self.begin(plan, *args, script=script, **more)
        said, _ = done.communicate(timeout=PATIENCE_S)
        return done.returncode, said

    def begin(self, plan: list[dict[str, Any]], *args: str, script: Path = JOB, **more: str) -> subprocess.Popen[str]:
        command = [str(self.bin / "sbatch"), str(script), *(args or ("train.py",))]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(plan, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def calls(self, program: str) -> list[list[str]]:
        lines = (self.state / "calls.jsonl").read_text().splitlines()
        return [call[1:] for call in map(json.loads, lines) if call[0] == program]

    def orders(self) -> list[str]:
        """What scontrol was told to do, as text."""
        return [" ".join(call) for call in self.calls("scontrol") if "show" not in call]

    def agents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.logs / "agents.jsonl").read_text().splitlines()]

    def job(self) -> dict[str, Any]:
        doc: dict[str, Any] = json.loads((self.state / "job.json").read_text())
        return doc


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Six nodes, n1 to n6."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    made = Slurm(folder, [f"n{i}" for i in range(1, 7)])
    yield made
    for process in made.started:
        if process.poll() is None:
            end_tree(process.pid)
        process.communicate()


def end_tree(pid: int) -> None:
    """A submission and all below it: the batch script and the agents have sessions of their own."""
    top = psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
