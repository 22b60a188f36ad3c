"""The GPT: megatron-core's layers, optimizer and schedule, put together for tensor, pipeline and data parallelism.

Knows: Megatron's configuration objects and which of its fused paths need a GPU. Must never know files, checkpoints or the order of the loop.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from cpu_compat import on_gpu
from data import VOCABULARY
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class Trainee:
    """What is trained: the model of this rank (wrapped for data parallelism) and its optimizer."""

    model: DistributedDataParallel
    optimizer: Any

    @property
    def bare(self) -> GPTModel:
        """The model without its data-parallel wrapper."""
        return self.model.module


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def build(args: argparse.Namespace) -> Trainee:
    """Model and optimizer of this rank, initialised from `args.seed`; needs the process groups."""
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), force_reset_rng=True)
    config = _transformer_config(args)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    ).to(device())
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), gpt)
    optimizer = get_megatron_optimizer(_optimizer_config(args), [wrapped], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(wrapped, optimizer)


def learning_rate(args: argparse.Namespace, iteration: int) -> float:
    """Linear warm-up, then a cosine to `min_lr`: a function of the iteration alone, so there is nothing to restore."""
    if iteration < args.lr_warmup_iters:
        return float(args.lr * (iteration + 1) / args.lr_warmup_iters)
    done = (iteration - args.lr_warmup_iters) / max(1, args.lr_decay_iters - args.lr_warmup_iters)
    return float(args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(1.0, done))))


def _transformer_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not on_gpu(),
        # Compiled at the first step, or kernels of a GPU: seconds of start-up that a model of this size never earns back.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay, adam_beta2=0.95, clip_grad=args.clip_grad
    )
