"""PyTorch Lightning: `FTCallback` says where training is, so that `ft-launch` learns how long a step takes, sees progress and finds a hang.

    from ft_launcher.integrations.lightning import FTCallback
    trainer = Trainer(callbacks=[FTCallback()], ...)

Sections: `setup` from the trainer's own setup to the first batch (sanity checks are part of it), `step` around each training batch with
`trainer.global_step` as its iteration, `step` without an iteration around each batch of validation, test and prediction, `checkpointing`
around each save. One that ends with an exception is closed as such and is no progress.

Works with `lightning` and with `pytorch_lightning` (which are two packages with two classes of the same name), whichever the script has
imported, and imports neither of them itself until it is used. Outside ft-launch it does nothing. Never waits, never raises.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from ft_launcher.errors import ConfigError
from monitors.client import Monitor, Section, attach

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class FTCallback:
    """Opens and closes sections in Lightning's hooks. Making one gives an object that is a `Callback` of every Lightning that is loaded.

    Raises ConfigError where neither package can be imported.
    """

    _monitor: Monitor
    _open: dict[str, Section]
    _wrapped: Any

    def __new__(cls) -> FTCallback:
        """An instance of a class that has the callbacks of the loaded packages as further bases."""
        made: FTCallback = object.__new__(_with_bases(cls, _callbacks()))
        made._monitor, made._open, made._wrapped = attach(), {}, None
        return made

    def __reduce__(self) -> tuple[type[FTCallback], tuple[()]]:
        """In another process (a strategy that spawns) it is that process's own."""
        return FTCallback, ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The first hook of all: `setup` begins, and saves are watched."""
        self._begin("setup")
        if self._wrapped is None:
            self._wrapped = trainer
            trainer.save_checkpoint = self._timed(trainer.save_checkpoint)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A training step begins."""
        self._end("setup")
        self._begin("step", trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """A training step ends."""
        self._end("step")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """A batch of validation begins; one of the sanity check is part of `setup`."""
        if not getattr(trainer, "sanity_checking", False):
            self._end("setup")
            self._begin("step")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """A batch of validation ends."""
        self._end("step")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training ends with an exception: what was open has not been completed. Lightning calls no teardown then."""
        self._close_all(exception)
        self._unwrap(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The last hook."""
        self._close_all(None)
        self._unwrap(trainer)

    def _unwrap(self, trainer: Any) -> None:
        if self._wrapped is not None and self._wrapped is trainer:
            self._wrapped = None
            trainer.__dict__.pop("save_checkpoint", None)

    def _begin(self, name: str, iteration: int | None = None) -> None:
        self._end(name)
        section = self._monitor.section(name, iteration)
        section.__enter__()
        self._open[name] = section

    def _end(self, name: str, error: BaseException | None = None) -> None:
        section = self._open.pop(name, None)
        if section is not None:
            section.__exit__(type(error) if error is not None else None, error, None)

    def _close_all(self, error: BaseException | None) -> None:
        for name in reversed(list(self._open)):
            self._end(name, error)

    def _timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """`trainer.save_checkpoint` inside a section: there is a hook before the file is written and none after."""

        @wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with self._monitor.section("checkpointing"):
                return save(*args, **kwargs)

        return save_checkpoint


_made: dict[tuple[type, ...], type[FTCallback]] = {}


def _with_bases(cls: type[FTCallback], callbacks: tuple[type, ...]) -> type[FTCallback]:
    """The class with these further bases, the same one each time. Its name is Lightning's key for a callback's state, so it stays."""
    if (cls, *callbacks) not in _made:
        _made[cls, *callbacks] = _class(cls, callbacks)
    return _made[cls, *callbacks]


def _class(cls: type[FTCallback], callbacks: tuple[type, ...]) -> type[FTCallback]:
    return type(cls.__name__, (cls, *callbacks), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _callbacks() -> tuple[type, ...]:
    """`Callback` of each Lightning that the script has imported; of the first that can be imported where it has none."""
    loaded = tuple(sys.modules[name].Callback for name in PACKAGES if hasattr(sys.modules.get(name), "Callback"))
    return loaded or (_import_callback(),)


def _import_callback() -> type:
    for name in PACKAGES:
        try:
            found: type = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    raise ConfigError("FTCallback needs PyTorch Lightning: pip install lightning (or pytorch-lightning)")
