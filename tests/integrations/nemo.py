"""NeMo-Run for tests: the real package where it is installed, else the stand-in. `ours()` imports our module over it, afresh."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

STANDINS = Path(__file__).resolve().parent / "standins"
OURS = "ft_launcher.integrations.nemo_run"


def is_real() -> bool:
    """Whether NeMo-Run is installed here."""
    return importlib.util.find_spec("nemo_run") is not None


@contextmanager
def ours(real: bool) -> Iterator[tuple[ModuleType, ModuleType]]:
    """(nemo_run, our module)."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nemo_run" or name == OURS}
    if not real:
        sys.path.insert(0, str(STANDINS))
    _forget()
    if real:
        sys.modules.update({name: module for name, module in kept.items() if name != OURS})
    try:
        yield importlib.import_module("nemo_run"), importlib.import_module(OURS)
    finally:
        if not real:
            sys.path.remove(str(STANDINS))
        _forget()
        sys.modules.update(kept)


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nemo_run" or name == OURS]:
        del sys.modules[name]
