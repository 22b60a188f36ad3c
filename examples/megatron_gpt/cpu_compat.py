"""Megatron-core on a CPU: the few places where it takes a GPU for granted.

Knows: which calls of torch.cuda megatron-core 0.16 makes on the way of a plain GPT step, and what each means without a device. Nothing here
changes a number that is computed; where a GPU is present `install()` does nothing at all. Must never know anything of the model or the loop.
May run before or after `import megatron.core` (a preloading parent may have imported it long ago): every patch is looked up at call time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
CPU = torch.device("cpu")


def on_gpu() -> bool:
    """Whether this process computes on a GPU. Asks the driver the first time, so never call it in a process that will fork."""
    return bool(torch.cuda.is_available())


def install() -> None:
    """Make `torch.cuda` answer for the CPU, once; nothing where there is a GPU."""
    if on_gpu() or getattr(torch.cuda, "_answers_for_cpu", False):
        return
    torch.cuda._answers_for_cpu = True
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_: None
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.type = _typed_as_cuda(torch.Tensor.type)
    _map_cuda_generator()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory with a literal `device="cuda"` read as the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, str) and device.startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def _typed_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` in the words that gradient clipping asserts; with an argument it converts as ever."""

    @functools.wraps(original)
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return "torch.cuda.FloatTensor" if answer == "torch.FloatTensor" else answer

    return wrapped


def _map_cuda_generator() -> None:
    """The "CUDA" generator is the CPU's one: what Megatron's RNG tracker saves, seeds and swaps is then what dropout really uses."""
    from megatron.core.tensor_parallel import random as tracker

    generator = torch.default_generator
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: generator.get_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: generator.set_state(state)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = generator.manual_seed  # torch.manual_seed would call back here
    tracker._set_cuda_rng_state = lambda state, *_, **__: generator.set_state(state)
    # The tracker warns at each dropout that "the CPU generator changed": here that is its purpose.
    logging.getLogger(tracker.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
