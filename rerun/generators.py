"""The random generators of this process, taken at the beginning of a step and put back for its rerun: Python's, numpy's, torch's, and the current GPU's.

Without a GPU in use there is no fourth. Generators of a script's own (Megatron's tracker, say) are its to save: RerunStateMachine's `state_save_func`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

Restore = Callable[[], None]


def take() -> Restore:
    """Remembers all of them; what it returns puts them back, as often as it is called."""
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state()
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        if legacy is not None:
            numpy.set_state(legacy)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore
