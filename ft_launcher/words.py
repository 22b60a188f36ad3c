"""`selftest`, `simulate` and `drain`: what stands in the script's place and is no script.

Each is a small command of its own with its own options, made into the frozen options that its room takes. The rooms are imported when
their word is used, not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import click

from ft_launcher.config import DrainOptions, SelftestOptions, SimulateOptions
from ft_launcher.edge import values
from ft_launcher.errors import ConfigError

WORDS = ("selftest", "simulate", "drain")


def _checked(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback that reads the text with one of `values`' readers and complains as the rest of the launcher does."""

    def callback(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except values.BadValueError as bad:
            raise ConfigError(f"{param.opts[0]} {values.show(text or '')}: {bad}") from None

    return callback


def _option(name: str, metavar: str, parse: Callable[[str], Any], help_text: str, default: str | None = None) -> click.Option:
    return click.Option(
        [f"--{name}"], metavar=metavar, callback=_checked(parse), help=help_text, default=default, show_default=default is not None
    )


def _flag(name: str, help_text: str) -> click.Option:
    return click.Option([f"--{name}"], is_flag=True, help=help_text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise values.BadValueError("must be a whole number >= 0 of at most 19 digits")
    return int(text)


def command(word: str) -> click.Command:
    """The click command of a word; its `ctx.params` are what `call` takes."""
    return {"selftest": _selftest, "simulate": _simulate, "drain": _drain}[word]()


def _selftest() -> click.Command:
    return click.Command(
        "selftest",
        params=[_flag("json", "Print one JSON object instead of the table.")],
        help="Inject each kind of fault into a small job on this machine; print what was decided and how long it took.",
    )


def _simulate() -> click.Command:
    return click.Command(
        "simulate",
        params=[
            _option("ranks", "N", values.count(), "Ranks of the simulated job.", "128"),
            _option("nodes", "N", values.count(), "Nodes it runs on (default: chosen by the simulated world)."),
            _option("hours", "H", values.hours, "Simulated hours.", "24"),
            _option("seed", "N", _seed, "Seed: the same one gives the same run.", "0"),
            _option("faults", "SPEC", values.nonempty, "Which faults, in the simulator's notation."),
            _flag("json", "Make the last line a JSON object."),
            _flag("story", "Print what happened, event by event."),
        ],
        help="Run the launcher's own decisions in a simulated world with seeded faults.",
    )


def _drain() -> click.Command:
    return click.Command(
        "drain",
        params=[
            click.Argument(["node"]),
            click.Option(["--store"], metavar="etcd://HOST:PORT[,...]", help="The job's store (or FT_STORE)."),
            click.Option(["--run-id"], metavar="ID", help="The run (or FT_RUN_ID)."),
        ],
        help="Let a spare take over from NODE: its ranks leave, its ft-launch exits 0.",
    )


def call(word: str, params: dict[str, Any]) -> int:
    """Carries out `selftest` or `simulate`; the exit code."""
    if word == "selftest":
        return int(_room("ft_launcher.selftest", word).run(SelftestOptions(**params)))
    options = SimulateOptions(**params)
    if options.nodes is not None and options.ranks % options.nodes:
        raise ConfigError(
            f"--ranks {options.ranks} must be a multiple of --nodes {options.nodes}: every node holds the same number of ranks"
        )
    return int(_room("ft_launcher.sim.main", word).run(options))


def drain(options: DrainOptions) -> int:
    """Asks the job's controller to drain one node; the exit code."""
    return int(_room("ft_launcher.shell.drain", "drain").request(options))


def _room(module: str, word: str) -> Any:
    """The module behind a word, or one line that says that this installation has none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(f"{word}: this installation of ft-launcher has no {module}; install it anew") from None
