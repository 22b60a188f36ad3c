"""All options of `ft-launch` as one dataclass, for launchers that are configured in Python instead of on a command line.

One field an option, by the option's name, None for "say nothing" (the launcher's own default, its file and its environment then hold). The
fields stand here so that an editor can complete and a type checker can check them; a test compares them with the command line's table, so
that an option cannot be added there and forgotten here. What is given becomes flags, nothing is dropped: a 0 is a 0.

`check` asks the launcher's own rules about the values, so that a mistake is one line where the recipe is written, and not an exit code 2
after a night in the queue. Knows nothing of NeMo or of any scheduler, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ft_launcher.core.command import Command
from ft_launcher.edge import values
from ft_launcher.edge.resolve import PASSWORD, Machine, resolve
from ft_launcher.edge.sources import Reader, Setting
from ft_launcher.edge.table import OPTIONS
from ft_launcher.errors import ConfigError

_NEED_WORLD: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "etp"), values.count()),
    "rank-order": values.nonempty,
    "tee": values.tee,
}
"""Options whose check needs the number of ranks, and how far each can be checked without."""


@dataclass(kw_only=True)
class LaunchOptions:
    """What can be said to `ft-launch`; see `ft-launch --help` for each. Times are in seconds. `config` is a file on the machine where it runs.

    `timeouts` and `node_label` are mappings, `preload`, `forward_signals` lists (an empty one is the flag's word `none`).
    """

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    rank_order: str | None = None
    nnodes: int | str | None = None
    nproc_per_node: int | str | None = None
    node_id: str | None = None
    node_addr: str | None = None
    node_label: dict[str, str] | None = None
    store: str | None = None
    store_timeout: float | None = None
    store_ca: str | None = None
    store_cert: str | None = None
    store_key: str | None = None
    store_user: str | None = None
    run_id: str | None = None
    timeouts: dict[str, float] | None = None
    out_of_section: float | None = None
    learn_timeouts: bool | None = None
    hang_action: str | None = None
    max_restarts: int | None = None
    no_progress_cycles: int | None = None
    healthy_stretch: float | None = None
    quarantine_after: int | None = None
    quarantine_days: float | None = None
    progress_file: str | None = None
    node_ttl: float | None = None
    join_wait: float | None = None
    spare_wait: float | None = None
    exit_grace: float | None = None
    term_grace: float | None = None
    survivor_grace: float | None = None
    forward_signals: list[str] | None = None
    health_check: str | None = None
    preload: list[str] | None = None
    start_method: str | None = None
    ft_state: str | None = None
    log_dir: str | None = None
    tee: str | None = None
    config: str | None = None

    def option_values(self) -> dict[str, Any]:
        """Field name -> value, of what was given."""
        names = (field.name for field in fields(LaunchOptions))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def flags(self) -> list[str]:
        """The words of a command line, in the table's order, not quoted for any shell. Raises ConfigError for a value that no flag can hold."""
        words = [] if self.config is None else ["--config", self.config]
        for name, texts in self._texts().items():
            option = OPTIONS[name]
            for text in texts:
                words += [f"--{_switch(name, text)}"] if option.off else [f"--{name}", text]
        return words

    def _texts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, option in OPTIONS.items():
            value = getattr(self, field_name(name), None)
            if value is not None:
                found[name] = _pairs(value) if option.repeats and isinstance(value, Mapping) else [_text(name, value)]
        return found

    def check(self, script_args: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError, one line, for a value that `ft-launch` would refuse.

        What only the machine knows (its GPUs, its modules, its files) is taken to be right; sizes are compared where `nnodes` and
        `nproc_per_node` are both given. `environ` is what is known of the environment there; None: the store and the run id may come from it.
        """
        given = {name: [Setting(text, "flag", field_name(name)) for text in texts] for name, texts in self._texts().items()}
        sized = "nnodes" in given and given.get("nproc-per-node", [Setting("auto", "", "")])[0].text.isdigit()
        if not sized:
            script_args = ()
            _check_alone({name: given.pop(name) for name in _NEED_WORLD if name in given})
        if environ is None:
            given.setdefault("store", [Setting("etcd://somewhere:2379", "environment", "FT_STORE")])
            given.setdefault("run-id", [Setting("1", "environment", "SLURM_JOB_ID")])
        elif store := environ.get("FT_STORE"):
            given.setdefault("store", [Setting(store, "environment", "FT_STORE")])
        resolve(Reader(given), Command(module=None, script="script.py", args=tuple(script_args)), _SOME_MACHINE)


def field_name(option: str) -> str:
    """The field of an option: `max-restarts` is `max_restarts`."""
    return option.replace("-", "_")


def _check_alone(given: Mapping[str, Sequence[Setting]]) -> None:
    reader = Reader({name: list(settings) for name, settings in given.items()})
    for name in given:
        reader.optional(name, _NEED_WORLD[name])


def _switch(name: str, text: str) -> str:
    """The spelling that switches it on or off."""
    try:
        return name if values.boolean(text) else OPTIONS[name].off
    except values.BadValueError as bad:
        raise ConfigError(f"{field_name(name)} {values.show(text)}: {bad}") from None


def _pairs(value: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_scalar(item)}" for key, item in value.items()]


def _text(name: str, value: Any) -> str:
    """The notation of the flag."""
    if isinstance(value, Mapping):
        return ",".join(_pairs(value))
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "none"
    if isinstance(value, str | int | float | Path):
        return _scalar(value)
    raise ConfigError(f"{field_name(name)} {values.show(repr(value))}: must be a text, a number, a list of texts or a mapping")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


_SOME_MACHINE = Machine(
    hostname=lambda: "node",
    gpus=lambda: 1,
    cores=lambda: 1,
    importable=lambda name: True,
    new_run_id=lambda: "run",
    cwd=Path("/"),
    environ={PASSWORD: "known there"},
)
