"""A run as text: the form of scenario files, and of what a violation prints.

    world ranks=8 nodes=2 spares=1 hours=0.5 seed=7 script.step_s=2 options.max_restarts=1
    at 100.000000 crash rank=2 signal=9

One line sets the world, each other line is one fault; `#` begins a comment. Everything that is not said has the defaults of named rates. Reading and
writing are inverse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from ft_launcher.core.state import Options
from ft_launcher.errors import ConfigError
from ft_launcher.sim.faults import KINDS, Fault
from ft_launcher.sim.setting import UNLIMITED, Platform, Script, Setting
from monitors.attribution import attribute

_SIZES = ("ranks", "nodes", "spares", "hours", "seed")


def read(text: str) -> Setting:
    """The setting that a scenario means. ConfigError names the line that makes no sense."""
    setting: Setting | None = None
    plan: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "world" and setting is None:
                setting = _world(words[1:])
            elif words[0] == "at" and setting is not None:
                plan.append(_fault(words))
            else:
                raise ValueError("expected one `world` line, then `at SECONDS KIND name=number ...` lines")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"scenario line {number}: {line.strip()}: {error}") from None
    if setting is None:
        raise ConfigError("scenario: there is no `world` line")
    return replace(setting, plan=tuple(plan))


def write(setting: Setting) -> str:
    """The scenario that means this setting."""
    return "\n".join((_world_line(setting), *(fault.text() for fault in setting.plan))) + "\n"


def _fault(words: list[str]) -> Fault:
    args = {name: float(value) for name, _, value in (word.partition("=") for word in words[3:])}
    if words[2] not in KINDS:
        raise ValueError(f"unknown kind of fault {words[2]!r}")
    return Fault(float(words[1]), words[2], args)


def _world(words: Iterable[str]) -> Setting:
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    sizes = {name: float(given.pop(name, "0")) for name in _SIZES}
    ranks, nodes, spares = int(sizes["ranks"]), int(sizes["nodes"] or 1), int(sizes["spares"])
    if ranks < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks on {nodes} nodes")
    base = Options(nodes_wanted=nodes, nproc=ranks // nodes, can_join=nodes + spares > 1, max_restarts=UNLIMITED, attribute=attribute)
    return Setting(
        ranks,
        ranks // nodes,
        nodes,
        spares,
        sizes["hours"] or 1.0,
        int(sizes["seed"]),
        _changed(base, "options", given),
        _changed(Script(), "script", given),
        _changed(Platform(), "platform", given),
    )


def _changed(value: Any, prefix: str, given: dict[str, str]) -> Any:
    """`value` with the fields that `prefix.name=...` words give; a word of no room is an error at the last one."""
    known = {f"{prefix}.{field.name}": field.name for field in fields(value)}
    changes = {name: given.pop(word) for word, name in known.items() if word in given}
    if prefix == "platform" and given:
        raise ValueError(f"unknown word {next(iter(given))!r}")
    return replace(value, **{name: _like(getattr(value, name), text) for name, text in changes.items()})


def _like(old: object, text: str) -> object:
    if isinstance(old, bool):
        return text == "1"
    return int(text) if isinstance(old, int) else float(text)


def _world_line(setting: Setting) -> str:
    sizes = {"ranks": setting.ranks, "nodes": setting.active, "spares": setting.spares, "hours": setting.hours, "seed": setting.seed}
    plain = read(f"world ranks={setting.ranks} nodes={setting.active} spares={setting.spares}")
    words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in sizes.items()]
    for room in ("options", "script", "platform"):
        old, new = getattr(plain, room), getattr(setting, room)
        changed = [(f.name, getattr(new, f.name)) for f in fields(new) if getattr(new, f.name) != getattr(old, f.name)]
        words += [f"{room}.{name}={int(value) if isinstance(value, bool) else value!r}" for name, value in changed]
    return "world " + " ".join(words)
