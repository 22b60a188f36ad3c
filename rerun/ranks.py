"""How ranks know each other: this rank's number, and what any of them wants. torch.distributed where it is in use (gloo or NCCL), else alone.

It knows process groups; it must never know what the flags mean, or import torch before somebody else has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any


def rank() -> int:
    """This rank, from the process group, else from RANK, else 0."""
    dist = _distributed()
    if dist is not None:
        return int(dist.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def world_size() -> int:
    """How many ranks the process group has; 1 without one."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())


def any_rank(flags: Sequence[bool]) -> tuple[bool, ...]:
    """For each flag, whether any rank has it set. A collective over all ranks (none for no flags)."""
    dist = _distributed()
    if dist is None or not flags:
        return tuple(flags)
    import torch

    votes = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=_device(dist, torch))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return tuple(vote > 0 for vote in votes.tolist())


def gathered(what: Any) -> list[Any] | None:
    """What each rank has, on rank 0; None elsewhere. A collective over all ranks."""
    dist = _distributed()
    if dist is None:
        return [what]
    box: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(what, box)
    return box


def _distributed() -> Any:
    torch: Any = sys.modules.get("torch")
    dist: Any = getattr(torch, "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _device(dist: Any, torch: Any) -> Any:
    """Where the default group can reduce: NCCL only on the GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
