"""The environment of a rank: what torchrun sets, and ours (docs/design.md section 9). A pure function of job and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ft_launcher.config import Config
from ft_launcher.core.state import JobState

FALLBACKS = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Set only where the user has not. Unbuffered: a killed rank's last words must be in its log. One OpenMP thread, as torchrun does with several ranks a node."""


def job_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of this agent share and what must be set before the zygote imports anything: the user's environment with our fall-backs."""
    fallbacks = dict(FALLBACKS)
    if config.nproc == 1:
        del fallbacks["OMP_NUM_THREADS"]
    return {**fallbacks, **environ}


def rank_environment(config: Config, job: JobState, rank: int, error_file: Path) -> dict[str, str]:
    """One rank's own variables for one cycle."""
    topology, placement, master = config.topology, job.placement, job.master
    if placement is None or master is None:
        raise ValueError("a rank needs a placement and a store")
    node, slot = placement.place(rank)
    torchrun = {
        "RANK": rank,
        "LOCAL_RANK": slot,
        "WORLD_SIZE": topology.world,
        "LOCAL_WORLD_SIZE": config.nproc,
        "GROUP_RANK": placement.position_of(node),
        "GROUP_WORLD_SIZE": len(placement.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": topology.world,
        "MASTER_ADDR": master.host,
        "MASTER_PORT": master.port,
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_RESTART_COUNT": job.cycle,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": master.serving,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    ours = {
        "FT_RUN_ID": config.run_id,
        "FT_CYCLE": job.cycle,
        "FT_NODE_ID": node,
        "FT_SLOT": slot,
        "FT_COORDS": topology.coords(rank),
        "FT_RESTART_REASON": job.restart_reason,
        "FT_TP": topology.tp,
        "FT_PP": topology.pp,
        "FT_CP": topology.cp,
        "FT_DP": topology.dp,
        "FT_EP": topology.ep,
        **({"FT_RERUN_VERDICT": job.rerun_verdict} if job.rerun_verdict else {}),
    }
    return {name: str(value) for name, value in {**torchrun, **ours}.items()}
