"""The launchers of the stand-in, and its Script."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Launcher:
    nsys_profile: bool = False
    nsys_folder: str = "nsys_profile"
    nsys_filename: str = "profile_%p"
    nsys_trace: list[str] = field(default_factory=lambda: ["nvtx", "cuda"])
    nsys_extra_args: list[str] = field(default_factory=list)
    nsys_gpu_metrics: bool = False

    def transform(self, cmd: list[str]) -> Script | None:
        return None


@dataclass(kw_only=True)
class Torchrun(Launcher):
    rdzv_backend: str = "c10d"


@dataclass(kw_only=True)
class FaultTolerance(Launcher):
    max_restarts: int | None = None


@dataclass(kw_only=True)
class SlurmTemplate(Launcher):
    template_path: str | None = None
    template_inline: str | None = None
    template_vars: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.template_path and not self.template_inline:
            raise ValueError("Either template_path or template_inline must be provided")


@dataclass(kw_only=True)
class SlurmRay(SlurmTemplate):
    def __post_init__(self) -> None:
        self.template_path = "slurm_ray.sh.j2"
        super().__post_init__()


LAUNCHER_MAP: dict[str, type[Launcher]] = {
    "torchrun": Torchrun,
    "ft": FaultTolerance,
    "slurm_ray": SlurmRay,
    "slurm_template": SlurmTemplate,
}


@dataclass
class Script:
    path: str = ""
    inline: str = ""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: str = "bash"
    m: bool = False

    def __post_init__(self) -> None:
        assert self.path or self.inline
        if self.m:
            assert "python" in self.entrypoint

    def to_command(self, with_entrypoint: bool = False) -> list[str]:
        words = [*(["-m"] if self.m else []), self.path, *self.args]
        return [self.entrypoint, *words] if with_entrypoint else words
