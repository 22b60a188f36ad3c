"""Who said what: flags, the configuration file, FT_ variables, the scheduler, in one list per option with the strongest last.

Texts only. A file is read with every scalar as the text that stands there (YAML would make 246 of `4:6` and False of a node called `no`),
so that a value means the same wherever it is written. Knows the names of options, never their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ft_launcher.edge.table import OPTIONS, RANK_ENVIRONMENT, SCHEDULER
from ft_launcher.edge.values import BadValueError, nearest, show
from ft_launcher.errors import ConfigError

T = TypeVar("T")
LARGEST_FILE = 1 << 20
"""Bytes of configuration file that are read at most; also what keeps `--config /dev/zero` short."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One text for one option.

    `origin` is what the banner says (`flag`, `env FT_TP`), `where` what an error begins with (`--tp`, `FT_TP`).
    """

    text: str
    origin: str
    where: str


Given = dict[str, list[Setting]]
"""Option name -> settings, the strongest last."""


def gather(flags: Mapping[str, Sequence[Setting]], config_file: str | None, environ: Mapping[str, str]) -> Given:
    """All settings: scheduler < FT_ environment < file < flags. Raises ConfigError for a file that cannot be used."""
    given: Given = {}
    for name, variable in SCHEDULER.items():
        _add(given, name, environ.get(variable, ""), Setting("", f"env {variable}", variable))
    inside_a_rank = "FT_CYCLE" in environ
    for name, option in OPTIONS.items():
        if not (inside_a_rank and option.env in RANK_ENVIRONMENT):
            _add(given, name, environ.get(option.env, ""), Setting("", f"env {option.env}", option.env))
    if config_file is not None:
        for name, setting in read_file(config_file):
            given.setdefault(name, []).append(setting)
    for name, settings in flags.items():
        given.setdefault(name, []).extend(settings)
    return given


def _add(given: Given, name: str, text: str, blank: Setting) -> None:
    """A variable that is set to nothing says nothing."""
    if text.strip():
        given.setdefault(name, []).append(Setting(text.strip(), blank.origin, blank.where))


def environment_notes(environ: Mapping[str, str]) -> list[str]:
    """One line for each FT_ variable that is nearly, but not quite, an option's."""
    known = {option.env for option in OPTIONS.values()}
    others = RANK_ENVIRONMENT | {"FT_STORE_PASSWORD"}
    near = {name: _very_near(name, known) for name in sorted(environ) if name.startswith("FT_") and name not in known | others}
    return [f"{name} in the environment is not an option and is ignored; did you mean {hit}?" for name, hit in near.items() if hit]


def _very_near(name: str, known: set[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, n=1, cutoff=0.88)), None)


def read_file(path: str) -> list[tuple[str, Setting]]:
    """(option name, setting) for each key of a YAML file, in its order.

    Raises ConfigError: unreadable, malformed, unknown or repeated key.
    """
    root = _parse(path, _read(path))
    if root is None or (root.id == "scalar" and not root.value):
        return []
    if not isinstance(root.value, list) or root.id != "mapping":
        raise ConfigError(f"--config {path}: must be a mapping of option names to values, as in 'max-restarts: 5'")
    found: dict[str, Setting] = {}
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = _option_name(key, where)
        if name in found:
            raise ConfigError(f"{where}: {name} is given twice")
        found[name] = Setting(_flat(value, f"{where}: {name}"), f"file {where}", f"{where}: {name}:")
    return list(found.items())


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from None
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"--config {path}: is larger than {LARGEST_FILE} bytes; is it the right file?")
    return text


def _parse(path: str, text: str) -> Any:
    """The root node of the document, None where it is empty."""
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"--config {path}{line}: is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"--config {path}: is not valid YAML: {str(error).splitlines()[0] if str(error) else 'nested too deeply'}"
        ) from None


def _option_name(key: Any, where: str) -> str:
    text = key.value if isinstance(key.value, str) else ""
    name = text.replace("_", "-")
    if name not in OPTIONS:
        raise ConfigError(
            f"{where}: unknown key {show(text)}{nearest(name, OPTIONS) or '; the keys are the long options of ft-launch --help'}"
        )
    return name


def _flat(node: Any, where: str) -> str:
    """The text of a scalar; a list and a mapping of scalars in the notation of the flag: `a,b` and `k=v,k=v`."""
    if node.id == "scalar":
        return str(node.value).strip()
    pairs = node.value if node.id == "mapping" else [(None, item) for item in node.value]
    parts = []
    for key, value in pairs:
        if value.id != "scalar" or (key is not None and key.id != "scalar"):
            raise ConfigError(f"{where}: must be a value, a list of values or a mapping of names to values")
        parts.append(value.value if key is None else f"{key.value}={value.value}")
    return ",".join(parts)


@dataclass(slots=True)
class Reader:
    """Reads settings as values and keeps, per option, what `Config.effective` shows."""

    given: Given
    shown: dict[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether anybody said anything."""
        return bool(self.given.get(name))

    def origin(self, name: str) -> str:
        """Where the strongest setting came from; `default` where nobody said anything."""
        return self.given[name][-1].origin if self.has(name) else "default"

    def where(self, name: str) -> str:
        """What an error about the strongest setting begins with: `--tp`, `FT_TP`, `train.yaml:3: tp:`."""
        return self.given[name][-1].where if self.has(name) else f"--{name}"

    def read(self, name: str, parse: Callable[[str], T]) -> T:
        """The strongest setting, or the table's default, as a value. ConfigError names place, text and what is allowed."""
        value = self.optional(name, parse)
        if value is None:
            default = OPTIONS[name].default
            assert default is not None, name
            self.note(name, default, "default")
            return parse(default)
        return value

    def optional(self, name: str, parse: Callable[[str], T]) -> T | None:
        """The strongest setting as a value, None where nobody said anything."""
        if not self.has(name):
            return None
        setting = self.given[name][-1]
        self.note(name, setting.text, setting.origin)
        return self.parsed(setting, parse)

    def merged(self, name: str, parse: Callable[[str], Mapping[str, T]]) -> dict[str, T]:
        """All settings of a mapping, key by key, the strongest winning."""
        found: dict[str, T] = {}
        for setting in self.given.get(name, []):
            found |= self.parsed(setting, parse)
        return found

    def parsed(self, setting: Setting, parse: Callable[[str], T]) -> T:
        """One setting as a value, or the ConfigError that says what is wrong with it."""
        try:
            return parse(setting.text)
        except BadValueError as bad:
            raise ConfigError(f"{setting.where} {show(setting.text)}: {bad}") from None

    def note(self, name: str, text: object, origin: str) -> None:
        """What the banner shows for this option."""
        self.shown[name] = f"{text} ({origin})"
