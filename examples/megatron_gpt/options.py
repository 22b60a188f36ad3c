"""What the user chose: Megatron's own argument names, read once.

Knows: argument names, defaults, what must divide what. Must never import torch or Megatron: a mistake costs a line, not seven seconds.
The degrees of parallelism may come from the launcher (`FT_TP`, `FT_PP`), so that `ft-launch --tp 2 --pp 2 train.py` need not say them twice.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

DEFAULT_SAVE_INTERVAL = 20
FIRST_CHECKED = 2

KINDS = ("transient", "persistent", "application")
DIAGNOSTICS = ("correct_result", "transient_error", "persistent_error")

# Everything that training imports beyond the standard library: with `ft-launch --preload` of these a rank imports nothing of weight itself.
PRELOAD = "torch,megatron.core,megatron.core.models.gpt.gpt_layer_specs,megatron.core.dist_checkpointing.strategies.torch,torch.utils.serialization.config"
if find_spec("psutil"):  # torch's checkpoints use it where it is installed
    PRELOAD += ",psutil"


def parser() -> argparse.ArgumentParser:
    """The command line; every default trains visibly in about a minute on two CPU cores."""
    p = argparse.ArgumentParser(description="Train a GPT of megatron-core on Python's own standard library.")
    shape = p.add_argument_group("model")
    shape.add_argument("--num-layers", type=_positive, default=4)
    shape.add_argument("--hidden-size", type=_positive, default=128)
    shape.add_argument("--num-attention-heads", type=_positive, default=4)
    shape.add_argument("--seq-length", type=_positive, default=128, help="bytes of text a sample")
    shape.add_argument("--attention-dropout", type=float, default=0.0)
    shape.add_argument("--hidden-dropout", type=float, default=0.0)
    place = p.add_argument_group("parallelism")
    place.add_argument("--tensor-model-parallel-size", type=_positive, default=_size_from_env("FT_TP"), help="default: FT_TP, else 1")
    place.add_argument("--pipeline-model-parallel-size", type=_positive, default=_size_from_env("FT_PP"), help="default: FT_PP, else 1")
    train = p.add_argument_group("training")
    train.add_argument("--micro-batch-size", type=_positive, default=8)
    train.add_argument("--global-batch-size", type=_positive, default=16)
    train.add_argument("--train-iters", type=int, default=200)
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--min-lr", type=float, default=3e-4)
    train.add_argument("--lr-warmup-iters", type=int, default=10)
    train.add_argument("--lr-decay-iters", type=int, default=None, help="default: --train-iters")
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument("--clip-grad", type=float, default=1.0)
    train.add_argument("--seed", type=int, default=1234)
    train.add_argument("--eval-interval", type=int, default=50, help="iterations between held-out losses; 0: never")
    train.add_argument("--eval-iters", type=_positive, default=2, help="global batches in a held-out loss")
    wrong = p.add_argument_group("wrong numbers")
    wrong.add_argument("--inject", choices=KINDS, default=None, help="spoil a gradient; needs --at, --on, --save")
    wrong.add_argument("--at", type=_positive, default=None, metavar="ITERATION")
    wrong.add_argument("--on", type=int, default=None, metavar="RANK")
    wrong.add_argument(
        "--rerun", choices=("ours", "megatron", "off"), default=None, help="who checks results; default: ours with --inject, else off"
    )
    wrong.add_argument(
        "--error-injection-rate", type=int, default=0, metavar="N", help="Megatron's: pretend an error at one check in N; 0: never"
    )
    wrong.add_argument("--error-injection-type", choices=DIAGNOSTICS, default="transient_error")
    wrong.add_argument(
        "--result-rejected-tracker-filename", default=None, metavar="FILE", help="Megatron's: a line for each rejected result"
    )
    keep = p.add_argument_group("checkpoints and output")
    keep.add_argument("--save", type=Path, default=None, metavar="DIR")
    keep.add_argument("--load", type=Path, default=None, metavar="DIR", help="default: --save")
    keep.add_argument("--save-interval", type=_positive, default=DEFAULT_SAVE_INTERVAL)
    keep.add_argument("--keep", type=_positive, default=3, help="checkpoints kept")
    keep.add_argument("--log", "--loss-log", type=Path, default=None, metavar="FILE", help="one JSON line an iteration, the loss exact")
    keep.add_argument("--sample-bytes", type=int, default=240, help="length of the text written at the end; 0: none")
    keep.add_argument("--step-delay-ms", type=float, default=0.0, help="slow each iteration down (demonstrations)")
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments, checked. Exits with 2 and one line that names the argument, its value and what is allowed."""
    p = parser()
    args = p.parse_args(argv)
    args.load = args.load or args.save
    args.lr_decay_iters = args.lr_decay_iters or max(1, args.train_iters)
    args.data_parallel_size = _data_parallel_size(p, args)
    _check_wrong_numbers(p, args)
    _require(p, args.num_layers % args.pipeline_model_parallel_size == 0, args, "num_layers", "pipeline_model_parallel_size")
    _require(p, args.num_attention_heads % args.tensor_model_parallel_size == 0, args, "num_attention_heads", "tensor_model_parallel_size")
    _require(p, args.hidden_size % args.num_attention_heads == 0, args, "hidden_size", "num_attention_heads")
    if args.log and not args.log.absolute().parent.is_dir():
        p.error(f"--log {args.log}: there is no folder {args.log.absolute().parent}: create it or choose another file")
    per_micro_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_micro_step:
        p.error(
            f"--global-batch-size {args.global_batch_size} must be a multiple of micro batch size x data parallel size = {per_micro_step}"
        )
    args.num_microbatches = args.global_batch_size // per_micro_step
    return args


def _check_wrong_numbers(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.rerun = args.rerun or ("ours" if args.inject or args.error_injection_rate else "off")
    if not args.inject:
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.at is None or args.at < FIRST_CHECKED:
        p.error(f"--inject {args.inject} needs --at {FIRST_CHECKED} or later (found {args.at}): the first step of a start is not checked")
    if args.on is None or not 0 <= args.on < world:
        p.error(f"--inject {args.inject} needs --on 0 to {world - 1}, the rank that it strikes (found {args.on})")
    if args.save is None:
        p.error(f"--inject {args.inject} needs --save DIR: what has been struck, and where, is remembered there")


def _data_parallel_size(p: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model: int = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if world % model:
        p.error(f"{world} ranks cannot hold tensor x pipeline = {model}: start a multiple of {model} ranks")
    return world // model


def _require(p: argparse.ArgumentParser, good: bool, args: argparse.Namespace, what: str, divisor: str) -> None:
    if not good:
        flag, by = (f"--{name.replace('_', '-')}" for name in (what, divisor))
        p.error(f"{flag} {getattr(args, what)} must be a multiple of {by} {getattr(args, divisor)}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: 1 or more")
    return value


def _size_from_env(name: str) -> int:
    text = os.environ.get(name, "") or "1"
    return int(text) if text.isdecimal() and int(text) > 0 else 1
