"""Save and resume exactly: model, optimizer, every random generator, position in the data.

Knows: Megatron's sharded state dictionaries and `megatron.core.dist_checkpointing` (format torch_dist), the fence of the checkpoint folder, and who of
the ranks decides: rank 0 claims the fence and chooses, everyone checks a share of the files, everyone hears the outcome. The writer is torch's
own, inside the process: Megatron's would start helper processes at each rank's first save (seconds, and strays when the rank is killed).
Must never know the loop: it is handed a `Progress` and gives one back.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import storage
import torch
import torch.distributed as dist
from cpu_compat import on_gpu
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from model import Trainee
from reruns import Reruns
from torch.distributed import checkpoint as torch_checkpoint

from monitors.fence import CheckpointFence, FenceLost, newest_commit

# What must be the same in the run that saves and the run that loads.
SAME = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
)


BAD_USAGE = 2  # like argparse: a launcher does not try that again


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training is: iterations completed and samples used up, which is the position in the data."""

    iteration: int = 0
    consumed_samples: int = 0


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's torch_dist format, written by torch's own file writer in this process; fsync included."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Write this rank's shards; a collective."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class LocalLoad(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Megatron's torch_dist format, read by each rank for itself: the file says where its shards are, nobody needs to plan together (60 ms)."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Read this rank's shards; no collective."""
        together = torch_checkpoint.load_state_dict
        torch_checkpoint.load_state_dict = functools.partial(together, no_dist=True)  # Megatron leaves no other way to ask for it
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        finally:
            torch_checkpoint.load_state_dict = together


class Checkpoints:
    """The checkpoint folder of this run. All methods are collectives over all ranks.

    `commit_allowed` is the launcher's hint that this cycle is still the current one; the fence in the folder itself is what holds.
    """

    def __init__(self, args: argparse.Namespace, trainee: Trainee, reruns: Reruns, text: str, commit_allowed: Callable[[], bool]) -> None:
        self._args, self._trainee, self._reruns, self._commit_allowed = args, trainee, reruns, commit_allowed
        self._run = {name: getattr(args, name) for name in SAME} | {"text": text}
        self._fence: CheckpointFence | None = None  # on rank 0 alone
        self._number = 0
        self._saves = 0

    def load(self) -> Progress:
        """Claim the folder and resume from the newest intact checkpoint, else from the beginning. Exits with one line and 2 on a mismatch."""
        kind, found = self._lead() if dist.get_rank() == 0 else self._follow()
        if kind == "exit":
            _end(found, BAD_USAGE)
        checkpoint, self._number = found
        if checkpoint:
            return self._restore(Path(checkpoint))
        if dist.get_rank() == 0 and self._args.load:
            print(f"nothing to resume from in {self._args.load}: starting at iteration 0", flush=True)
        return Progress()

    def save(self, progress: Progress, fault: bool = False) -> None:
        """Write, seal and commit a checkpoint; with `fault`, of a step that is disputed. Exits with one line when another run owns the folder by now."""
        name = storage.name_of(progress.iteration, self._number, fault)
        temporary = self._args.save / (storage.TEMPORARY + name)
        if dist.get_rank() == 0:
            temporary.mkdir()
        dist.barrier()
        self._write(temporary, progress, fault)
        files: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(_own_files(temporary), files if dist.get_rank() == 0 else None)
        outcome = [self._commit(name, {k: v for part in files for k, v in part.items()}) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(outcome)
        if outcome[0]:
            _end(outcome[0], 1)

    # -- choosing

    def _lead(self) -> tuple[str, Any]:
        """Rank 0: claim, choose, tell."""
        answer: tuple[str, Any]
        try:
            answer = ("load", self._choose())
        except (OSError, FenceLost, MismatchError) as error:
            answer = ("exit", f"cannot use the checkpoint folder {self._args.save or self._args.load}: {error}")
        dist.broadcast_object_list([answer])
        return answer

    def _follow(self) -> tuple[str, Any]:
        """The other ranks: check a share of each candidate until rank 0 has decided."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box)
            kind, what = box[0]
            if kind != "check":
                return kind, what
            dist.gather_object(storage.damage(Path(what), dist.get_rank(), dist.get_world_size()))

    def _choose(self) -> tuple[str, int]:
        """(checkpoint path or "", fence number). This run's own folder first, `--load` when there is nothing in it."""
        save, load = self._args.save, self._args.load
        if save:
            if (newest := newest_commit(save)) and storage.manifest_of(save / newest):
                self._checked(save / newest)  # a mistake must not take the folder from a run that uses it
            self._fence = CheckpointFence.claim(save, lambda name: self._usable(save / name), storage.checkpoints(save))
            self._number = self._fence.number
            storage.sweep(save, self._number)
            if self._fence.chosen:
                return self._checked(save / self._fence.chosen), self._number
        if load and load != save:
            for name in storage.checkpoints(load):
                if self._usable(load / name):
                    return self._checked(load / name), self._number
        return "", self._number

    def _usable(self, checkpoint: Path) -> bool:
        """Whether every file is what the manifest says, all ranks reading a share; says in one line why not."""
        dist.broadcast_object_list([("check", str(checkpoint))])
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(storage.damage(checkpoint, 0, dist.get_world_size()), reasons)
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            print(f"checkpoint {checkpoint.name} is damaged ({reason}): falling back to the one before", flush=True)
        return reason is None

    def _checked(self, checkpoint: Path) -> str:
        """The path, if that checkpoint was written by a run of this shape. Raises MismatchError."""
        manifest = storage.manifest_of(checkpoint) or {"run": {}}
        for key, value in self._run.items():
            if manifest["run"].get(key) != value:
                raise MismatchError(f"{checkpoint.name} was written with {key} {manifest['run'].get(key)}, this run has {value}")
        return str(checkpoint)

    # -- state

    def _state(self, loading: bool) -> dict[str, Any]:
        model = self._trainee.bare.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self._trainee.optimizer.sharded_state_dict(model, is_loading=loading),
            "random": _sharded(_random_state()),
        }

    def _write(self, temporary: Path, progress: Progress, fault: bool) -> None:
        self._saves += 1
        state = self._state(loading=False) | asdict(progress)
        if fault:
            state["rerun_state_machine"] = self._reruns.state()
        strategy = InProcessSave("torch_dist", 1)
        # Megatron's check that each shard is written exactly once costs as much as the save: once a process is enough.
        dist_checkpointing.save(state, str(temporary), strategy, validate_access_integrity=self._saves == 1)

    def _restore(self, checkpoint: Path) -> Progress:
        wanted = self._state(loading=True)
        disputed = self._reruns.checks and checkpoint.name.endswith(storage.FAULT)
        if disputed:
            wanted["rerun_state_machine"] = self._reruns.state(wanted=True)
        state = dist_checkpointing.load(wanted, str(checkpoint), LocalLoad(), validate_access_integrity=False)
        self._trainee.bare.load_state_dict(state["model"])
        self._trainee.optimizer.load_state_dict(state["optimizer"])
        _restore_random_state(state["random"])
        if disputed:
            self._reruns.resume(state["rerun_state_machine"])
        progress = Progress(state["iteration"], state["consumed_samples"])
        if dist.get_rank() == 0:
            print(f"resumed from {checkpoint.name}: iteration {progress.iteration}, {progress.consumed_samples} samples used", flush=True)
        return progress

    # -- committing

    def _commit(self, name: str, files: dict[str, tuple[int, str]]) -> str:
        """Rank 0: seal and commit; "" or the reason to end this run."""
        assert self._fence is not None
        if not self._commit_allowed():
            print(f"checkpoint {name} not committed: this cycle is superseded or its lease has run out", flush=True)
            shutil.rmtree(self._args.save / (storage.TEMPORARY + name), ignore_errors=True)
            return ""
        try:
            if self._fence.held():
                storage.seal(self._args.save, name, files, self._run)
            self._fence.commit(name)
            storage.prune(self._args.save, self._args.keep, self._number, self._fence.chosen)
        except FenceLost as lost:
            return f"checkpoint {name} not committed, this run ends: {lost}"
        except OSError as error:
            owned = self._fence.held()
            return f"checkpoint {name} not committed, this run ends: {error if owned else 'a newer run owns the folder and has swept it'}"
        return ""


class MismatchError(Exception):
    """A checkpoint that this run cannot continue: which setting differs, and both values."""


def _end(reason: str, code: int) -> NoReturn:
    """End this rank; rank 0 says why."""
    if dist.get_rank() == 0:
        print(reason, file=sys.stderr, flush=True)
    raise SystemExit(code)


def _own_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (size, checksum) of the files that this rank has written; rank 0 answers for the common ones too."""
    mine = f"__{dist.get_rank()}_"
    names = [entry.name for entry in folder.iterdir()]
    return {
        name: storage.digest(folder / name, sync=True)
        for name in names
        if name.startswith(mine) or (dist.get_rank() == 0 and not name.startswith("__"))
    }


def _sharded(data: Any) -> ShardedObject:
    """An object that differs from rank to rank."""
    place = [
        (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()),
        (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()),
        (parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()),
    ]
    return ShardedObject("random", data, tuple(size for size, _ in place), tuple(rank for _, rank in place))


def _random_state() -> dict[str, Any]:
    """Every generator of this process, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if on_gpu():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
