"""Who is compared, and how each is started: the same script, the same environment, each launcher's documented options.

torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts fail under gloo (the new ranks read the old attempt's keys in the
shared store). `floor` is no launcher at all (`scripts/bare.py`). Commands run with this interpreter's environment and from a folder of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from _common.processes import Job, free_port
from _common.stamps import ENV, Stamps

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
FT, FLOOR, TORCHRUN, NVRX = "ft-launch", "floor", "torchrun", "NVRx"
LAUNCHERS = (FT, TORCHRUN, NVRX)
EVERYONE = (FT, FLOOR, TORCHRUN, NVRX)
MAX_RESTARTS = 1000
_SAME_FOR_ALL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_KEPT = frozenset({"FT_TEST_SESSION"})  # how the tests recognise what they started
_LAUNCHERS_OWN = ("FT_", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PYTEST_")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: `script` and its arguments on `world` ranks of one node.

    `preload`: modules for ft-launch and the floor ("none": none); torchrun and NVRx have no such thing. `tp`, `pp`: for ft-launch.
    `timeouts`: NVRx's and ft-launch's sections, seconds; `out_of_section_s` the time between them. `check_every_s`: how often NVRx looks for hangs; None: its default.
    """

    script: Path
    args: Sequence[str] = ()
    world: int = 4
    tp: int = 1
    pp: int = 1
    preload: str = "torch"
    timeouts: Mapping[str, float] = field(default_factory=lambda: {"setup": 300.0, "step": 300.0, "checkpointing": 300.0})
    out_of_section_s: float = 300.0
    check_every_s: float | None = None


def launch(name: str, plan: Plan, folder: Path) -> tuple[Job, Stamps]:
    """A job of contestant `name` (entered by the caller's `with`), and where its ranks stamp. `folder` must be new: short, for it holds unix sockets."""
    folder.mkdir(parents=True)
    stamps = Stamps(folder / "stamps", plan.world)
    (folder / "tmp").mkdir()
    return Job(_COMMANDS[name](plan, folder), environment(stamps, folder / "tmp"), folder), stamps


def environment(stamps: Stamps, tmp: Path) -> dict[str, str]:
    """What every contestant's processes get: ours without any launcher's own variables, and where to stamp."""
    env = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_LAUNCHERS_OWN)}
    return env | _SAME_FOR_ALL | {ENV: str(stamps.folder), "TMPDIR": str(tmp)}


def _ft_launch(plan: Plan, folder: Path) -> list[str]:
    sections = ",".join(f"{name}={seconds:g}" for name, seconds in plan.timeouts.items())
    options = ["--tp", plan.tp, "--pp", plan.pp, "--nproc-per-node", plan.world, "--max-restarts", MAX_RESTARTS, "--preload", plan.preload]
    hangs = ["--timeouts", sections, "--out-of-section", f"{plan.out_of_section_s:g}"]
    return [str(BIN / "ft-launch"), *map(str, options), *hangs, "--log-dir", str(folder / "logs"), *_script(plan)]


def _floor(plan: Plan, folder: Path) -> list[str]:
    return [sys.executable, str(SCRIPTS / "bare.py"), str(plan.world), f"{plan.preload},monitors.client", *_script(plan)]


def _rendezvous(plan: Plan) -> list[str]:
    at = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    return ["--nnodes=1:1", f"--nproc-per-node={plan.world}", f"--max-restarts={MAX_RESTARTS}", "--rdzv-backend=c10d", at, "--rdzv-id=j"]


def _torchrun(plan: Plan, folder: Path) -> list[str]:
    return [str(BIN / "torchrun"), *_rendezvous(plan), "--local-addr=127.0.0.1", *_script(plan)]


def _nvrx(plan: Plan, folder: Path) -> list[str]:
    sections = ", ".join(f"{name}: {seconds:g}" for name, seconds in plan.timeouts.items())
    look = "" if plan.check_every_s is None else f", workload_check_interval: {plan.check_every_s:g}"
    config = folder / "ft.yaml"
    config.write_text(
        f"fault_tolerance: {{rank_section_timeouts: {{{sections}}}, rank_out_of_section_timeout: {plan.out_of_section_s:g}, log_level: ERROR{look}}}\n"
    )
    return [str(BIN / "ft_launcher"), *_rendezvous(plan), f"--ft-cfg-path={config}", *_script(plan)]


def _script(plan: Plan) -> list[str]:
    return [str(plan.script), *plan.args]


_COMMANDS = {FT: _ft_launch, FLOOR: _floor, TORCHRUN: _torchrun, NVRX: _nvrx}


def versions() -> dict[str, str]:
    """What is compared with what."""
    return {name: version(name) for name in ("ft-launcher", "torch", "nvidia-resiliency-ext", "megatron-core")}
