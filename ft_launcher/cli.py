"""`ft-launch`: from the shell's words to one call, and from what happened to one exit code.

Options stop at the script; nothing behind it is looked at, but for Megatron's own sizes, which are read and left as they are. `selftest`,
`simulate` and `drain` are words only where the script would stand and only exactly so. Everything a user can do wrong becomes one line on
stderr and exit 2, before any process is started.

This room knows click and nothing of how a job is run. It imports what the chosen way needs, when it needs it: never torch, and YAML only
for `--config`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

import ft_launcher
from ft_launcher import words
from ft_launcher.edge import table, torchrun
from ft_launcher.edge.sources import Reader, Setting, environment_notes, gather
from ft_launcher.edge.values import nearest, show
from ft_launcher.errors import BugError, ConfigError, FTError
from ft_launcher.printing import OutputError, last_line, out, printing

if TYPE_CHECKING:
    from ft_launcher.config import Config
    from ft_launcher.core.command import Command
    from ft_launcher.edge.resolve import Machine

_USAGE = "[OPTIONS] [-m MODULE | SCRIPT] [SCRIPT ARGUMENTS]..."
_HELP = (
    "Run a training script on every slot of every node and keep it running: a rank that crashes, hangs or computes wrong numbers is restarted "
    "in its own place, failed hardware is replaced by a spare, and TP, PP and DP never change."
)
_HELP_OPTIONS = ["-h", "--help"]
_EPILOG = (
    "Options stop at the script; what follows reaches it unchanged. Every option can also stand in the --config file (max-restarts: 5) or in the "
    "environment (FT_MAX_RESTARTS=5); a flag outranks the file, the file the environment."
)


class Launch(click.Command):
    """The one command. Its options come from the table; what is left behind them stays in `ctx.args`, untouched."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options by group, as in the table, then the flags that are no options of a file."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, options in table.GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([record for option in options if (record := records.pop(_key(option.name), None))])
        with formatter.section("General"):
            formatter.write_dl([record for record in records.values() if record])
        with formatter.section("Other words in the script's place (a script of that name: ./NAME)"):
            formatter.write_dl([(f"{name} --help", word.help or "") for name, word in _other_words()])


def _other_words() -> list[tuple[str, click.Command]]:
    return [(word, words.command(word)) for word in words.WORDS]


def main() -> NoReturn:
    """The console script `ft-launch`."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Everything: returns the process's exit code, after at most one `ft-launch: error:` line on stderr."""
    try:
        return _dispatch(list(args))
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        return _fail(_usage_line(error), 2)
    except BugError as bug:
        last_line(f"ft-launch: bug: {bug}")
        return bug.exit_code
    except OutputError as error:
        return error.exit_code if error.silent else _fail(str(error), error.exit_code)
    except FTError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130


def _fail(message: str, code: int) -> int:
    """One line, whatever the message holds: a file name may contain a newline."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    last_line(f"ft-launch: error: {line}")
    return code


def _usage_line(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        known = [f"--{name}" for name in (*_visible_names(), "module", "config", "dry-run", "help", "version")]
        close = nearest(error.option_name, known)
        return f"unknown option {show(error.option_name)}{close or '; see ft-launch --help'} (options for the script go behind it)"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _dispatch(args: list[str]) -> int:
    command = _launch_command()
    with printing():  # --help and --version
        made = command.make_context("ft-launch", args)
    with made as ctx:
        flags = _flags(ctx)
        word = ctx.args[0] if ctx.args and ctx.args[0] in words.WORDS and not ctx.params["module"] else None
        if word is not None:
            return _word(word, ctx.args[1:], flags, ctx)
        return _launch(ctx, flags)


def _launch(ctx: click.Context, flags: torchrun.Flags) -> int:
    from ft_launcher.edge import preflight, resolve

    command = _command(ctx)
    reader, notes = _reader(flags, ctx.params["config"])
    config = replace(resolve.resolve(reader, command, _machine(command)), notes=tuple(notes))
    preflight.check(config, keep_disk=ctx.params["dry_run"])
    if ctx.params["dry_run"]:
        return _dry_run(config)
    from ft_launcher.shell.main import run as run_job

    return run_job(config)


def _command(ctx: click.Context) -> Command:
    from ft_launcher.core.command import Command

    if not ctx.args:
        missing = "module" if ctx.params["module"] else "script"
        raise ConfigError(f"missing {missing}: say what to run, as in ft-launch --tp 2 train.py, or -m package.train (ft-launch --help)")
    target, *args = ctx.args
    if not target:
        raise ConfigError("missing script: its name is empty")
    return (
        Command(module=target, script=None, args=tuple(args))
        if ctx.params["module"]
        else Command(module=None, script=target, args=tuple(args))
    )


def _reader(flags: torchrun.Flags, config_file: str | None) -> tuple[Reader, list[str]]:
    ours, notes = torchrun.translate(flags)
    return Reader(gather(ours, config_file, os.environ)), notes + environment_notes(os.environ) + _port_note(os.environ)


def _port_note(environ: Mapping[str, str]) -> list[str]:
    port = environ.get("MASTER_PORT")
    return [f"MASTER_PORT={port} in the environment is not used: {torchrun.UNUSED['master-port']}"] if port else []


def _machine(command: Command | None) -> Machine:
    from ft_launcher.edge.preflight import importable
    from ft_launcher.edge.resolve import Machine
    from ft_launcher.slots import count_gpus

    folder = str(Path(command.script).parent) if command is not None and command.script else "."
    return Machine(
        hostname=socket.gethostname,
        gpus=count_gpus,
        cores=lambda: os.cpu_count() or 1,
        importable=lambda name: importable(name, folder),
        new_run_id=lambda: time.strftime("run-%Y%m%d-%H%M%S-") + os.urandom(2).hex(),
        cwd=_cwd(),
        environ=os.environ,
    )


def _cwd() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current directory cannot be used: {error.strerror}; change to another one") from None


def _dry_run(config: Config) -> int:
    from ft_launcher.core.placement import Placement
    from ft_launcher.report import dry_run_table

    for note in config.notes:
        click.echo(f"ft-launch: note: {note}", err=True)
    nodes = [f"<node {position}>" for position in range(config.nnodes)]
    if config.nnodes == 1 or config.node_order is not None:
        nodes[min(config.node_order or 0, config.nnodes - 1)] = config.node_id
    out(dry_run_table(config.topology, Placement(tuple(nodes), config.nproc), config.effective()))
    return 0


def _word(word: str, args: list[str], flags: torchrun.Flags, ctx: click.Context) -> int:
    """selftest, simulate, drain. What stands before `drain` may say which store; before the others, options have no meaning."""
    before = next((f"--{name}" for name in (*flags, *(flag for flag in ("config", "dry-run") if ctx.params[_key(flag)]))), None)
    if before is not None and (word != "drain" or ctx.params["dry_run"]):
        raise ConfigError(f"{before} before {word!r}: options of {word} stand behind it; a script of that name is started as ./{word}")
    with printing():
        made = words.command(word).make_context(f"ft-launch {word}", args, help_option_names=_HELP_OPTIONS)
    with made as inner:
        params = dict(inner.params)
    return _drain(params, flags, ctx.params["config"]) if word == "drain" else words.call(word, params)


def _drain(params: dict[str, str | None], flags: torchrun.Flags, config_file: str | None) -> int:
    from ft_launcher.edge.preflight import check_store
    from ft_launcher.edge.resolve import resolve_drain

    for name in ("store", "run-id"):
        if (text := params[_key(name)]) is not None:
            flags.setdefault(name, []).append(Setting(text, "flag", f"--{name}"))
    reader, _ = _reader(flags, config_file)
    options = resolve_drain(reader, str(params["node"]), _machine(None))
    check_store(options.store)
    return words.drain(options)


def _flags(ctx: click.Context) -> torchrun.Flags:
    """What was given on the command line, by option name, in the table's order."""
    found: torchrun.Flags = {}
    for name in (*_visible_names(), *torchrun.TAKES_VALUE, *torchrun.SWITCHES, *torchrun.REFUSED, *torchrun.REFUSED_SWITCHES):
        value = ctx.params[_key(name)]
        if value is None or (value is False and name not in table.OPTIONS):
            continue
        texts = value if isinstance(value, tuple) else (value,)
        if texts:
            found[name] = [_setting(name, text) for text in texts]
    return found


def _setting(name: str, value: str | bool) -> Setting:
    if isinstance(value, str):
        if value.startswith("--") and value[2:].partition("=")[0].replace("_", "-") in table.OPTIONS:
            raise ConfigError(f"--{name} needs a value, but the next word is the option {show(value)}")
        return Setting(value, "flag", f"--{name}")
    off = table.OPTIONS[name].off if name in table.OPTIONS and not value else name
    return Setting("true" if value else "false", "flag", f"--{off}")


def _key(name: str) -> str:
    """click's name of a parameter."""
    return name.replace("-", "_")


def _visible_names() -> tuple[str, ...]:
    return tuple(table.OPTIONS)


def _launch_command() -> Launch:
    params: list[click.Parameter] = [_click_option(option) for option in table.OPTIONS.values()]
    params += [click.Option([f"--{name}"], hidden=True) for name in (*torchrun.TAKES_VALUE, *torchrun.REFUSED)]
    params += [click.Option([f"--{name}"], is_flag=True, hidden=True) for name in (*torchrun.SWITCHES, *torchrun.REFUSED_SWITCHES)]
    params += [
        click.Option(["-m", "--module"], is_flag=True, help="Run a module, as python -m does; its name stands where the script would."),
        click.Option(["--config"], metavar="FILE.yaml", help="Options from a YAML file."),
        click.Option(["--dry-run"], is_flag=True, help="Show rank -> coordinates -> node/slot and all options, create nothing."),
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."),
    ]
    settings = {"allow_interspersed_args": False, "allow_extra_args": True, "token_normalize_func": _hyphens, "max_content_width": 120}
    settings["help_option_names"] = _HELP_OPTIONS
    return Launch("ft-launch", params=params, context_settings=settings, options_metavar=_USAGE, help=_HELP, epilog=_EPILOG)


def _click_option(option: table.Option) -> click.Option:
    """All values are texts here: `resolve` reads them, so that a flag, a file and a variable meet the same rules."""
    default = option.default if option.default is not None and not option.off else option.default_help
    text = f"{option.help}  [{default}]" if default else option.help
    if option.off:
        return click.Option([f"--{option.name}/--{option.off}"], default=None, help=text)
    return click.Option([f"--{option.name}"], metavar=option.metavar, multiple=option.repeats, default=None, help=text)


def _hyphens(token: str) -> str:
    """torchrun's `--nproc_per_node` is our `--nproc-per-node`."""
    return token.replace("_", "-")


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"ft-launch {ft_launcher.__version__}")
        ctx.exit()
