"""`ft-state`: what an operator asks of a run, from its files alone. Reads, never writes; the run may be alive, over, or on another
continent.

Exit codes: 0; 1 where `validate` found errors; 2 where the file cannot be read or the usage is wrong, with one line on stderr. Output is
for people (`--json` for programs), plain when piped, and a reader that leaves early (`| head -1`) is no error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ft_launcher.dashboard.find import Seen, see, state_path
from ft_launcher.dashboard.heard import silence
from ft_launcher.dashboard.show import plain, tables
from ft_launcher.errors import ConfigError
from ft_launcher.printing import OutputError, out
from ft_launcher.state.reading import BadJsonError, parse, read_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPED_WIDTH = 140
_RETRIES = 15
_RETRY_S = 0.02
_ERRORS_SHOWN = 50

_HOST = "127.0.0.1"
_EVERY_S = 0.5

_PATH = click.argument("path", type=click.Path(path_type=Path), default=Path("ft_logs/ft_state.json"), required=False)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Shows what ft-launch knows of a run, from its files.

    PATH is an ft_state.json, a log-dir or a run's folder; ./ft_logs/ft_state.json unless given."""


@cli.command()
@_PATH
@click.option("--json", "as_json", is_flag=True, help="The document itself, for programs.")
def show(path: Path, as_json: bool) -> None:
    """Tables: where the run is, timeouts, cycles, incidents.

    Run, topology, where it is now, timeouts and why, cycles with reasons and recovery times, the last incidents, hardware under
    suspicion, budgets.
    """
    seen = see(path)
    for note in seen.notes:
        sys.stderr.write(f"ft-state: {plain(note)}\n")
    if as_json:
        out(json.dumps(seen.document, indent=1, allow_nan=False))
    else:
        _print(seen)


@cli.command()
@_PATH
def validate(path: Path) -> None:
    """Checks against the JSON Schema: exit 0, 1 or 2.

    Each error is one line with its JSON path. Exit code 0: valid, 1: invalid, 2: unreadable.
    """
    where = state_path(path)
    errors = _errors_in(_parsed(where))
    if not errors:
        out(f"{plain(str(where))}: valid")
        return
    more = len(errors) - _ERRORS_SHOWN
    out("\n".join([*errors[:_ERRORS_SHOWN], *([f"... and {more} more errors"] if more > 0 else [])]))
    raise click.exceptions.Exit(1)


@cli.command()
@_PATH
@click.option("--once", is_flag=True, help="One look, then the end; what `show` prints, and the ranks' states.")
@click.option(
    "--every", "every_s", type=click.FloatRange(0.1, 3600), default=_EVERY_S, show_default=True, help="Seconds between two looks."
)
def watch(path: Path, once: bool, every_s: float) -> None:
    """The tables, live, until Ctrl-C.

    Looks at the files again and again and draws when something has changed. The file may appear later, be rewritten, or go away and come back. Where the output
    is no terminal, each change is one line.
    """
    from ft_launcher.dashboard.source import Source
    from ft_launcher.dashboard.watch import lines, live, rendered

    if once:
        found = Source(path).look()
        if found.document is None:
            raise ConfigError(found.notes[0] if found.notes else f"{path}: cannot be read")
        _print_all(rendered(found))
    elif sys.stdout is not None and sys.stdout.isatty():
        live(Source(path), every_s)
    else:
        lines(Source(path), every_s, out)


@cli.command()
@_PATH
@click.option("--host", default=_HOST, show_default=True, help="Where to listen; beyond this machine only with a token, or --no-token.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free one; it is printed.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="Ask for the bearer token in this file (else FT_STATE_TOKEN, where set)."
)
@click.option("--no-token", is_flag=True, help="Ask nobody for a token, whatever --host is.")
def serve(path: Path, host: str, port: int, token_file: Path | None, no_token: bool) -> None:
    """A page, /metrics and /api/state over HTTP, until Ctrl-C.

    Reads the files when asked, never writes. The file may appear later.
    """
    from ft_launcher.dashboard import gate
    from ft_launcher.dashboard.answers import Answers
    from ft_launcher.dashboard.server import StateServer
    from ft_launcher.dashboard.source import Source

    token = gate.read_token(token_file, no_token, os.environ)
    opened = gate.opened_for(host, token, no_token)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with StateServer(host, port, Answers(source := Source(path), opened)) as server:
        where = source.look()
        out(f"serving {plain(str(where.path))} on {server.url}" + (" (asks for the token)" if token else ""))
        for note in where.notes:
            sys.stderr.write(f"ft-state: {plain(note)}\n")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


def main() -> NoReturn:
    """The `ft-state` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False) or 0
    except OutputError as error:
        code = 0 if error.silent else _fail(str(error))  # nobody reads any more: `| head -1`
    except ConfigError as error:
        code = _fail(str(error))
    except click.UsageError as error:
        code = _fail(f"{error.format_message()}; see ft-state --help")
    except OSError as error:
        code = _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)


class _Page(io.StringIO):
    """Where rich prints to: memory, so that trailing blanks can go, with the encoding of the real output, so that boxes are drawn in what
    it has.
    """

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of stdout."""
        return sys.stdout.encoding if sys.stdout is not None else "utf-8"


def _print(seen: Seen) -> None:
    over = (seen.verdict is not None and seen.other is None) or (seen.document["run"] or {}).get("outcome") is not None
    _print_all(tables(seen, silence(seen.document, over, time.time())))


def _print_all(renderables: Iterable[RenderableType]) -> None:
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal or os.environ.get("COLUMNS") else PIPED_WIDTH
    page = _Page()
    console = Console(file=page, width=width, force_terminal=terminal or None, highlight=False, emoji=False, markup=False)
    for number, table in enumerate(renderables):
        console.print(*([""] if number else []), table, sep="\n")
    out("\n".join(line.rstrip() for line in page.getvalue().split("\n")).rstrip("\n"))


def _parsed(path: Path) -> object:
    """The JSON value at `path`, tried again for a moment while it is torn (being rewritten). Raises `ConfigError`, one line."""
    trouble = ""
    for _ in range(_RETRIES):
        try:
            return parse(read_bytes(path))
        except OSError as error:
            raise ConfigError(f"{path}: unreadable ({error.strerror or error})") from error
        except BadJsonError as error:
            trouble = str(error)
            time.sleep(_RETRY_S)
    raise ConfigError(f"{path}: {trouble}")


def _errors_in(value: object) -> list[str]:
    import jsonschema

    schema = json.loads(resources.files("ft_launcher.state").joinpath("ft_state.schema.json").read_text("utf-8"))
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return sorted(f"{plain(error.json_path)}: {plain(error.message)}" for error in found)


def _fail(line: str) -> int:
    sys.stderr.write(f"ft-state: {plain(line)}\n")
    return 2


if __name__ == "__main__":
    main()
