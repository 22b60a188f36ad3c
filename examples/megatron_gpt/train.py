"""Train a GPT of megatron-core on Python's own standard library; survive whatever happens to it.

    ft-launch --tp 2 --pp 2 --nproc-per-node 4 examples/megatron_gpt/train.py --train-iters 200 --save DIR
    torchrun --nproc-per-node 4 examples/megatron_gpt/train.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save DIR

The order of things, and nothing else: arguments, process groups, model, resume, loop, sample. The parts are `options`, `cpu_compat`, `data`,
`model`, `loop`, `checkpoint`, `storage`, `reruns`, `corruption`. Runs on CUDA and NCCL where there is a GPU, else on the CPU and gloo. What makes it restartable: three lines of
`monitors.client` (sections) and the checkpoint folder's fence (`checkpoint`); without ft-launch the first does nothing and the second still holds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import options

from monitors.client import attach


class Log:
    """One JSON line an iteration, appended by a single write so that a kill never tears one. Losses also as hexadecimal floats: exact."""

    def __init__(self, args: argparse.Namespace, writes: bool) -> None:
        self._file = os.open(args.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if args.log and writes else None
        self._prints, self._total = writes, args.train_iters

    def iteration(self, number: int, loss: float, grad_norm: float, seconds: float) -> None:
        """One training iteration, on the console and in the file."""
        self._say(f"iteration {number}/{self._total} loss {loss:.6f} grad norm {grad_norm:.3f} {seconds * 1e3:.0f} ms")
        self._write(iteration=number, loss=loss, loss_hex=loss.hex(), grad_norm=grad_norm, seconds=seconds)

    def held_out(self, number: int, loss: float) -> None:
        """A held-out loss after iteration `number`."""
        self._say(f"iteration {number}/{self._total} held-out loss {loss:.6f}")
        self._write(iteration=number, held_out_loss=loss, held_out_loss_hex=loss.hex())

    def sample(self, text: str) -> None:
        """What the model writes by itself."""
        self._say("sample:\n" + "\n".join("    " + line for line in text.splitlines()))

    def _say(self, text: str) -> None:
        if self._prints:
            print(text, flush=True)

    def _write(self, **values: Any) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(values) + "\n").encode())


def start_distributed(args: argparse.Namespace) -> int:
    """Process groups on this rank's device, deterministic where that costs nothing; the rank."""
    import cpu_compat
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gpu = cpu_compat.on_gpu()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    cpu_compat.install()
    from megatron.core import parallel_state

    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, alone)  # `python train.py`: one rank
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, create_gloo_process_groups=False
    )
    return int(dist.get_rank())


def main() -> None:
    """The whole run."""
    args = options.parse()
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")  # what Megatron would rather have than a CPU
    mon = attach()
    with mon.section("setup"):
        rank = start_distributed(args)
        import checkpoint
        import data
        import loop
        import model
        import reruns

        try:
            train_text, held_out_text = data.standard_library(args.seq_length)
        except (OSError, ValueError) as error:
            options.parser().error(str(error))
        trainee = model.build(args)
        checks = reruns.Reruns(args, trainee)
        folder = checkpoint.Checkpoints(args, trainee, checks, train_text.fingerprint(), mon.commit_allowed)
        progress = folder.load()
        checks.take(loop.batches(args, train_text, progress.consumed_samples), progress.iteration)
        log = Log(args, writes=rank == int(os.environ["WORLD_SIZE"]) - 1)

    while progress.iteration < args.train_iters:
        started = time.perf_counter()
        number = progress.iteration + 1
        try:
            with mon.section("step", iteration=number):
                loss, grad_norm = loop.train_step(args, trainee, checks, progress)
                time.sleep(args.step_delay_ms / 1e3)
        except reruns.Leave as wrong:
            leave(wrong, mon, functools.partial(folder.save, progress, fault=True))
        progress = checkpoint.Progress(number, progress.consumed_samples + args.global_batch_size)
        log.iteration(number, loss, grad_norm, time.perf_counter() - started)
        last = number == args.train_iters
        if args.eval_interval and (last or number % args.eval_interval == 0):
            with mon.section("evaluation"):
                log.held_out(number, loop.held_out_loss(args, trainee, held_out_text))
        if args.save and (last or number % args.save_interval == 0):
            with mon.section("checkpointing"):
                folder.save(progress)
    if args.sample_bytes:
        with mon.section("sample"):
            log.sample(loop.sample_text(args, trainee))
    finish()


def leave(wrong: Any, mon: Any, save: Callable[[], None]) -> NoReturn:
    """End before the optimizer step, as the checks of `reruns` want it: the launcher acts upon the exit code."""
    if wrong.checkpoint:
        with mon.section("checkpointing"):
            save()
    finish()
    sys.exit(wrong.code)


def finish() -> None:
    """Leave together: a rank that closes its connections early would look like a crash to the others."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
