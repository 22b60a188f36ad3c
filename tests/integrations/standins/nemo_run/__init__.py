"""A stand-in for NeMo-Run 0.11.1: what a launcher and a plugin of ours touch, with the same names, defaults and rules. Nothing runs.

Where the real package is installed, `test_nemo_contract.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_run import core
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Script, SlurmRay, SlurmTemplate, Torchrun

__all__ = [
    "FaultTolerance",
    "LocalExecutor",
    "Partial",
    "Plugin",
    "Script",
    "SlurmExecutor",
    "SlurmRay",
    "SlurmTemplate",
    "Torchrun",
    "core",
]


class Partial:
    """A configured function."""


@dataclass(kw_only=True)
class Plugin:
    experiment_id: str = field(init=False, default="")


@dataclass(kw_only=True)
class Executor:
    launcher: Launcher | str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    experiment_id: str | None = None
    job_dir: str = ""


@dataclass(kw_only=True)
class LocalExecutor(Executor):
    ntasks_per_node: int = 1
    nodes: int = 1

    def nnodes(self) -> int:
        return self.nodes

    def nproc_per_node(self) -> int:
        return self.ntasks_per_node


@dataclass(kw_only=True)
class DockerExecutor(Executor):
    ntasks_per_node: int = 1

    def nnodes(self) -> int:
        return 1

    def nproc_per_node(self) -> int:
        return self.ntasks_per_node


@dataclass(kw_only=True)
class Tunnel:
    job_dir: str = ""


@dataclass(kw_only=True)
class SlurmExecutor(Executor):
    account: str
    nodes: int = 1
    ntasks_per_node: int = 1
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    torchrun_nproc_per_node: int | None = None
    container_image: str | None = None
    srun_args: list[str] | None = None
    setup_lines: str | None = None
    run_as_group: bool = False
    tunnel: Any = field(default_factory=Tunnel)

    def nnodes(self) -> int:
        return self.nodes

    def nproc_per_node(self) -> int:
        if self.torchrun_nproc_per_node:
            return self.torchrun_nproc_per_node
        if self.gpus_per_node and self.ntasks_per_node == 1:
            return self.gpus_per_node
        return self.gpus_per_task or self.ntasks_per_node

    def supports_launcher_transform(self) -> bool:
        return isinstance(self.launcher, SlurmTemplate)
