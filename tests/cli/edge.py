"""A launch resolved without a machine: what the tests of the edge share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ft_launcher.config import Config
from ft_launcher.core.command import Command
from ft_launcher.edge import torchrun
from ft_launcher.edge.resolve import Machine, resolve
from ft_launcher.edge.sources import Reader, Setting, gather


def machine(environ: Mapping[str, str] = {}, gpus: int = 0, modules: tuple[str, ...] = ("torch",)) -> Machine:
    """A host `box` with 12 cores."""
    return Machine(
        hostname=lambda: "box",
        gpus=lambda: gpus,
        cores=lambda: 12,
        importable=lambda name: name in modules,
        new_run_id=lambda: "run-1",
        cwd=Path("/work"),
        environ=environ,
    )


def settings(flags: Mapping[str, str | list[str]]) -> torchrun.Flags:
    """What the command line hands on for these flags."""
    as_lists = {name: [text] if isinstance(text, str) else text for name, text in flags.items()}
    return {name: [Setting(text, "flag", f"--{name}") for text in texts] for name, texts in as_lists.items()}


def config(
    flags: Mapping[str, str | list[str]] = {},
    args: tuple[str, ...] = (),
    environ: Mapping[str, str] = {},
    file: str | None = None,
    on: Machine | None = None,
) -> Config:
    """The Config of `ft-launch FLAGS train.py ARGS` on such a host."""
    ours, _ = torchrun.translate(settings(flags))
    return resolve(Reader(gather(ours, file, environ)), Command(module=None, script="train.py", args=args), on or machine(environ))
