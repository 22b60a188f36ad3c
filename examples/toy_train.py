"""The whole idea without Megatron: a small data-parallel model that survives crashes and ends with the same losses.

    ft-launch --nproc-per-node 4 examples/toy_train.py --steps 200 --save DIR      (torchrun works too; then sections do nothing)

What makes it restartable: sections around what it does, a checkpoint of *everything* that the next step depends on, and the fence of the
checkpoint folder, by which the storage itself refuses a process of an older start.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monitors.client import attach
from monitors.fence import CheckpointFence

BATCH, WIDTH, KEEP = 32, 16, 3


def device() -> torch.device:
    """This rank's GPU, else the CPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's batch, which is a function of (step, rank): the position in the data is the step number. Loss over all ranks."""
    draw = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH, generator=draw).to(device())
    loss = torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs.sum(1, keepdim=True)))
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach().view(1)]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, grad in zip(model.parameters(), flat[:-1].split([p.numel() for p in model.parameters()]), strict=True):
        p.grad.copy_(grad.view_as(p))
    optimizer.step()
    return float(flat[-1])


def save(folder: Path, fence: CheckpointFence | None, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes model, optimizer and every rank's generators: a temporary file, fsync, rename, commit. Nothing without a fence (the other ranks)."""
    generators: list[Any] = [None] * dist.get_world_size()
    own = (torch.get_rng_state(), torch.cuda.get_rng_state() if device().type == "cuda" else None)
    dist.gather_object(own, generators if dist.get_rank() == 0 else None)
    if fence:
        content = io.BytesIO()
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "generators": generators}, content)
        name = f"step_{step:07d}.f{fence.number:04d}"
        with (folder / f".tmp-{name}").open("wb") as file:
            file.write(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        (folder / f".tmp-{name}").rename(folder / name)
        fence.commit(name)  # raises FenceLost when a newer start owns the folder
        for old in checkpoints(folder)[KEEP:]:
            (folder / old).unlink()


def checkpoints(folder: Path) -> list[str]:
    """Names, newest (by fence, then step) first."""
    return sorted((path.name for path in folder.glob("step_*")), key=lambda name: name.split(".")[::-1], reverse=True)


def read(path: Path) -> Any:
    """The checkpoint, or None when it is missing, torn or damaged."""
    content = path.read_bytes() if path.is_file() else b""
    good = content[:32] == hashlib.sha256(content[32:]).digest()
    return torch.load(io.BytesIO(content[32:]), map_location="cpu") if good else None


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[CheckpointFence | None, int]:
    """Rank 0 claims the fence and chooses; all ranks load that choice. Returns rank 0's fence and the number of steps done."""
    fence: CheckpointFence | None = None
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        fence = CheckpointFence.claim(folder, lambda name: read(folder / name) is not None, checkpoints(folder))
        for leftover in folder.glob(".tmp-step_*"):
            leftover.unlink(missing_ok=True)
        box = [read(folder / fence.chosen) if fence.chosen else None]
    dist.broadcast_object_list(box)
    if box[0] is None:
        return fence, 0
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    cpu, gpu = box[0]["generators"][dist.get_rank()]
    torch.set_rng_state(cpu)
    if gpu is not None and device().type == "cuda":
        torch.cuda.set_rng_state(gpu)
    return fence, int(box[0]["step"])


def report(log: Path | None, step: int, loss: float) -> None:
    """A line for the reader, and one in which the loss is exact."""
    print(f"iteration {step} loss {loss:.6f}", flush=True)
    if log:
        with log.open("a") as file:
            file.write(json.dumps({"iteration": step, "loss": loss, "loss_hex": loss.hex()}) + "\n")


def main() -> None:
    """Arguments, setup, loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=0.0, help="slow each step down")
    parser.add_argument("--log", "--loss-log", type=Path, metavar="FILE", help="JSON lines, losses exact")
    args, mon = parser.parse_args(), attach()
    with mon.section("setup"):
        torch.set_num_threads(1)
        if device().type == "cuda":
            torch.cuda.set_device(device())
        dist.init_process_group("nccl" if device().type == "cuda" else "gloo")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)).to(device())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        torch.manual_seed(1000 + dist.get_rank())  # dropout differs from rank to rank
        fence, done = resume(args.save, model, optimizer) if args.save else (None, 0)
    for step in range(done + 1, args.steps + 1):
        with mon.section("step", iteration=step):
            loss = train_step(model, optimizer, step)
            time.sleep(args.step_ms / 1e3)
        if dist.get_rank() == 0:
            report(args.log, step, loss)
        if args.save and (step % args.save_every == 0 or step == args.steps):
            with mon.section("checkpointing"):
                save(args.save, fence if mon.commit_allowed() else None, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
