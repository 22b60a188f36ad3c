"""FTCallback against recorded runs of the real Lightning (2.6.6), and against the real one where it is installed."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.errors import ConfigError
from ft_launcher.integrations import lightning
from tests.integrations.notebook import Notebook

HERE = Path(__file__).resolve().parent
RUNS = ("fit", "validate", "raises")


class Callback:
    """Lightning's, as far as FTCallback goes."""

    def on_fit_start(self, trainer: Any, module: Any) -> str:
        return "Lightning's own"

    @property
    def state_key(self) -> str:
        return self.__class__.__qualname__


class Trainer:
    global_step, sanity_checking = 0, False

    def save_checkpoint(self, path: str, fails: bool = False) -> str:
        if fails:
            raise OSError(28, "disk full")
        return path


def recorded(run: str) -> list[str]:
    return (HERE / "recorded" / f"lightning_{run}.txt").read_text().splitlines()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A `pytorch_lightning` that is loaded, and no other."""
    module = types.ModuleType("pytorch_lightning")
    module.Callback = Callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    yield "pytorch_lightning"


@pytest.fixture
def notebook(package: str, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setattr(lightning, "attach", lambda: made)
    return made


@pytest.mark.parametrize("run", RUNS)
def test_the_hooks_of_a_real_run_give_its_sections(notebook: Notebook, run: str) -> None:
    callback, trainer = lightning.FTCallback(), Trainer()
    for line in recorded(run):
        word, name, *rest = line.split()
        if (word, name) == ("open", "checkpointing"):
            trainer.save_checkpoint("x")
        if word == "hook":
            trainer.global_step, trainer.sanity_checking = int(rest[0]), rest[1:] == ["sanity"]
            notebook.hook(name, trainer.global_step, trainer.sanity_checking)
            batch = [] if name in ("setup", "teardown") else [None, 0]
            arguments = {"setup": ["fit"], "teardown": ["fit"], "on_exception": [RuntimeError("a bad batch")]}.get(name, batch)
            getattr(callback, name)(trainer, None, *arguments)
    assert notebook.lines == recorded(run)
    assert "save_checkpoint" not in vars(trainer)


def test_each_section_of_a_run_that_ends_is_closed_once() -> None:
    for run in RUNS:
        opened = [line.split()[1] for line in recorded(run) if line.startswith("open")]
        closed = [line.split()[1] for line in recorded(run) if line.startswith("close")]
        assert sorted(opened) == sorted(closed), run
    assert "close step RuntimeError" in recorded("raises"), "a step that failed is not a step that was done"


def test_a_save_that_fails_is_closed_with_its_error_and_raised(notebook: Notebook) -> None:
    callback, trainer = lightning.FTCallback(), Trainer()
    callback.setup(trainer, None, "fit")
    assert trainer.save_checkpoint("a") == "a"
    with pytest.raises(OSError, match="disk full"):
        trainer.save_checkpoint("a", fails=True)
    assert notebook.lines[1:] == ["open checkpointing", "close checkpointing", "open checkpointing", "close checkpointing OSError"]


def test_two_stages_with_one_trainer_wrap_it_once_each(notebook: Notebook) -> None:
    callback, trainer = lightning.FTCallback(), Trainer()
    for _ in range(2):
        callback.setup(trainer, None, "fit")
        callback.setup(trainer, None, "fit")
        trainer.save_checkpoint("a")
        callback.teardown(trainer, None, "fit")
    assert notebook.lines.count("open checkpointing") == 2


def test_it_is_a_callback_of_every_lightning_that_is_loaded(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Callback", (), {"state_key": "other"})
    module = types.ModuleType("lightning.pytorch")
    module.Callback = other  # type: ignore[attr-defined]
    assert isinstance(lightning.FTCallback(), Callback)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    both = lightning.FTCallback()
    assert isinstance(both, Callback) and isinstance(both, other) and isinstance(both, lightning.FTCallback)
    assert both.on_fit_start(None, None) == "Lightning's own"  # type: ignore[attr-defined]
    assert type(both).__qualname__ == "FTCallback", "the key of its state, whichever package it is"


def test_copies_are_fresh(package: str) -> None:
    callback = lightning.FTCallback()
    callback.setup(Trainer(), None, "fit")
    for again in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert isinstance(again, lightning.FTCallback) and not again._open and again._wrapped is None


def test_without_lightning_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*lightning.PACKAGES, "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install lightning"):
        lightning.FTCallback()


def test_importing_it_imports_neither_lightning_nor_torch() -> None:
    code = "import sys, ft_launcher.integrations.lightning; print([m for m in ('torch', 'lightning', 'pytorch_lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.serial
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("run", RUNS)
def test_the_real_package_calls_the_recorded_hooks(package: str, run: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None or importlib.util.find_spec("torch") is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lightning_run", package, run],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == recorded(run)
