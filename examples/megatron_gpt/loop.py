"""One iteration, one held-out loss, one sample of text: what is done with the model, not when.

Knows: Megatron's schedules and how numbers travel between stages. Must never know checkpoints, files or the fault-tolerance client.
Losses are of their own iteration alone and travel as they are, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checkpoint import Progress
from data import Corpus
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from model import Trainee, device, learning_rate
from reruns import Check, Reruns

PROMPT = "import os\n\ndef "
TEMPERATURE = 0.8


class Shape(NamedTuple):
    """What goes through the pipeline at a time: micro-batches of rows x length tokens."""

    micro_batches: int
    rows: int
    length: int


def train_step(args: argparse.Namespace, trainee: Trainee, reruns: Reruns, progress: Progress) -> tuple[float, float]:
    """One optimizer step on the next samples of `reruns`; (loss, gradient norm), the loss on the last pipeline stage only (else 0). Raises `reruns.Leave` instead
    of stepping when a result was wrong. Forward and backward may run twice.
    """
    loss = 0.0
    reruns.begin(progress.iteration + 1)
    while reruns.run_forward_backward():
        trainee.model.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        loss = _run(args, trainee, reruns.samples, partial(_forward_step, reruns.check_loss), forward_only=False)
    reruns.leave_if_wrong()
    for group in trainee.optimizer.param_groups:
        group["lr"] = learning_rate(args, progress.iteration)
    _, grad_norm, _ = trainee.optimizer.step()
    return loss, float(grad_norm or 0.0)


def held_out_loss(args: argparse.Namespace, trainee: Trainee, corpus: Corpus) -> float:
    """Mean loss over the same few held-out batches every time; on the last pipeline stage only (else 0)."""
    trainee.model.eval()
    step = partial(_forward_step, None)
    losses = [
        _run(args, trainee, batches(args, corpus, n * args.global_batch_size), step, forward_only=True) for n in range(args.eval_iters)
    ]
    trainee.model.train()
    return sum(losses) / len(losses)


def sample_text(args: argparse.Namespace, trainee: Trainee, prompt: str = PROMPT) -> str:
    """Text that the model writes after `prompt`, byte by byte; the same on all ranks. A collective."""
    trainee.model.eval()
    draw = torch.Generator().manual_seed(args.seed)
    text = bytearray(prompt.encode())
    for _ in range(args.sample_bytes):
        text.append(_next_byte(args, trainee, bytes(text[-args.seq_length :]), draw))
    trainee.model.train()
    return text.decode(errors="replace")


def batches(args: argparse.Namespace, corpus: Corpus, consumed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of this data-parallel rank, micro-batch by micro-batch without end, each [micro_batch, seq_length]."""
    size, replica = args.micro_batch_size, parallel_state.get_data_parallel_rank()
    for micro in itertools.count():
        first = consumed + (micro * args.data_parallel_size + replica) * size
        rows = corpus.batch(args.seed, range(first, first + size)).to(device())
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _run(args: argparse.Namespace, trainee: Trainee, samples: Iterator[Any], step: Callable[..., Any], forward_only: bool) -> float:
    """All micro-batches of an iteration through the pipeline; the mean loss over them and over the data-parallel replicas."""
    losses = _schedule(trainee, step, samples, Shape(args.num_microbatches, args.micro_batch_size, args.seq_length), forward_only)
    if not parallel_state.is_pipeline_last_stage():
        return 0.0
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return float(mean) / float(args.data_parallel_size)


def _schedule(trainee: Trainee, step: Callable[..., Any], samples: Iterator[Any], shape: Shape, forward_only: bool) -> list[torch.Tensor]:
    """Megatron's schedule for this number of stages. `step(iterator, model) -> (output, loss function)`."""
    results: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=samples,
        model=[trainee.model],
        num_microbatches=shape.micro_batches,
        seq_length=shape.length,
        micro_batch_size=shape.rows,
        forward_only=forward_only,
    )
    return results


def _forward_step(check: Check | None, samples: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens, labels = next(samples)
    return model(tokens, _positions(tokens), None, labels=labels), partial(_mean_loss, check)


def _mean_loss(check: Check | None, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss to differentiate, loss to report): the schedule divides the first one in place."""
    loss = losses.float().mean()
    if check is not None:
        check(loss.detach())
    return loss, loss.detach().clone()


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _next_byte(args: argparse.Namespace, trainee: Trainee, context: bytes, draw: torch.Generator) -> int:
    """One byte after `context`: the last stage draws it (all its tensor ranks the same), everyone hears of it."""
    tokens = torch.tensor([list(context)], device=device())
    logits = _schedule(trainee, partial(_logits_step, tokens), iter(()), Shape(1, 1, len(context)), forward_only=True)
    answer = torch.zeros(1, dtype=torch.long, device=device())
    if parallel_state.is_pipeline_last_stage():
        odds = torch.softmax(logits[0].cpu().double() / TEMPERATURE, dim=-1)
        answer.copy_(torch.multinomial(odds, 1, generator=draw))
    dist.broadcast(answer, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group())
    return int(answer)


def _logits_step(tokens: torch.Tensor, _: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    return model(tokens, _positions(tokens), None), _last_logits


def _last_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits after the last byte, all of the vocabulary: [256]. They take the place of a loss."""
    last = gather_from_tensor_model_parallel_region(logits[:, -1, :])[0]
    return last.sum(), last
