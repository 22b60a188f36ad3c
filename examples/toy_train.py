"""The whole idea without Megatron, in about 90 lines of code: a small data-parallel model that survives crashes and ends with the same losses.

    ft-launch --nproc-per-node 4 examples/toy_train.py --steps 200 --save DIR      (torchrun works too; then sections do nothing)

What makes it restartable: sections around what it does; a checkpoint of everything that the next step depends on (data and dropout are functions of step and rank); and
the fence of the checkpoint folder, by which the storage itself refuses a process of an older start.
"""

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

WIDTH, KEEP = 16, 3
GPU = torch.cuda.is_available()
Model, Optimizer = torch.nn.Module, torch.optim.Optimizer


def train_step(model: Model, optimizer: Optimizer, step: int) -> float:
    """One step; returns the loss over all ranks."""
    torch.manual_seed(1_000_003 * step + dist.get_rank())
    inputs = torch.randn(32, WIDTH, device=next(model.parameters()).device)
    loss = torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs.sum(1, keepdim=True)))
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach().view(1)]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, grad in zip(model.parameters(), flat[:-1].split([p.numel() for p in model.parameters()]), strict=True):
        p.grad.copy_(grad.view_as(p))
    optimizer.step()
    return float(flat[-1])


def save(folder: Path, fence: CheckpointFence, step: int, model: Model, optimizer: Optimizer) -> None:
    """Complete or absent: a temporary file, fsync, rename, commit. Raises FenceLost when a newer start owns the folder."""
    content = io.BytesIO()
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, content)
    name = f"step_{step:07d}.f{fence.number:04d}"
    with (folder / f".tmp-{name}").open("wb") as file:
        file.write(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
        file.flush()
        os.fsync(file.fileno())
    (folder / f".tmp-{name}").rename(folder / name)
    fence.commit(name)
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


def resume(folder: Path, model: Model, optimizer: Optimizer) -> tuple[CheckpointFence | None, int]:
    """Rank 0 claims the fence and chooses; all ranks load that choice. Returns rank 0's fence and the number of steps done."""
    fence, box = None, [None]
    if dist.get_rank() == 0:
        fence = CheckpointFence.claim(folder, lambda name: read(folder / name) is not None, checkpoints(folder))
        for leftover in folder.glob(".tmp-step_*"):
            leftover.unlink(missing_ok=True)
        box = [read(folder / fence.chosen) if fence.chosen else None]
    dist.broadcast_object_list(box)
    found: Any = box[0] or {"step": 0, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return fence, int(found["step"])


def main() -> None:
    """Arguments, setup, loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--save-every", type=int, default=10, choices=range(1, 1_000_001), metavar="N")
    parser.add_argument("--step-ms", type=float, default=0.0, help="slow each step down")
    parser.add_argument("--log", "--loss-log", type=Path, metavar="FILE", help="JSON lines, losses exact")
    args, mon = parser.parse_args(), attach()
    with mon.section("setup"):
        torch.set_num_threads(1)
        dist.init_process_group("nccl" if GPU else "gloo")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        fence, done = resume(args.save, model, optimizer) if args.save else (None, 0)
    if done and dist.get_rank() == 0:
        print(f"resumed after step {done}", flush=True)
    for step in range(done + 1, args.steps + 1):
        with mon.section("step", iteration=step):
            loss = train_step(model, optimizer, step)
            time.sleep(args.step_ms / 1e3)
        if dist.get_rank() == 0:
            print(f"iteration {step} loss {loss:.6f}", flush=True)
        if dist.get_rank() == 0 and args.log:
            with args.log.open("a") as file:
                file.write(json.dumps({"iteration": step, "loss": loss, "loss_hex": loss.hex()}) + "\n")
        if fence and mon.commit_allowed() and (step % args.save_every == 0 or step == args.steps):
            with mon.section("checkpointing"):
                save(args.save, fence, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
