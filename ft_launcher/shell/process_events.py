"""What agent and zygote say to each other: rank specifications one way, events the other.

Plain data and its JSON form. It knows neither sockets nor processes, and imports so little that the zygote can afford it. Times named `at_ns` are
CLOCK_MONOTONIC nanoseconds, comparable between all processes of one host.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal

START_FAILED = (
    71  # EX_OSERR: the exit code of a rank whose process could not even be set up; the reason is in its log, or else in the zygote's
)
StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank to start. `env` overrides the zygote's own environment at exec (None: unset). `page_fd` is the agent's descriptor of its section page.

    `log_path` is opened for appending by the rank itself, for standard output and error. `stacks_path` likewise, for the stacks that
    a rank dumps on request; both are relative to nothing: absolute, or below the zygote's folder.
    """

    rank: int
    slot: int
    log_path: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    page_fd: int | None = None
    stacks_path: str | None = None


@dataclass(frozen=True, slots=True)
class ZygoteReady:
    """Ranks can be forked. `method` is what is really used; when it is not what was asked for, `why` says so in one line. `seconds` since start."""

    pid: int
    method: StartMethod
    preloaded: tuple[str, ...]
    seconds: float
    why: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Importing:
    """The zygote is about to import a module of the preload list: what it was doing, should it die now."""

    module: str


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank's process exists."""

    cycle: int
    rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process ended: either with an exit code or by a signal. Sent in the order in which the kernel handed the processes over."""

    cycle: int
    rank: int
    pid: int
    code: int | None
    signal: int | None
    at_ns: int
    core_dumped: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """Nothing of any rank is left below the zygote, except `left`: pids that did not die in time. `strays` is how many that were no ranks had to be killed."""

    cycle: int
    strays: int
    left: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """A TCPStore of this token's own listens on this port."""

    token: int
    port: int


@dataclass(frozen=True, slots=True)
class StandbyFailed:
    """There is no store for this token, or no longer: it could not be made, or its process ended before it was released."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class SourcesChanged:
    """Files of preloaded modules differ from what was imported: this cycle was *not* forked; a new zygote is needed. At most 20 files are named."""

    cycle: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pong:
    """The zygote's loop turns."""


@dataclass(frozen=True, slots=True)
class ZygoteLost:
    """The zygote's process is gone, and with it (or moments later, by their death signal) its ranks. Made by the agent's end; the last event."""

    reason: str


ProcessEvent = (
    ZygoteReady | RankStarted | RankEnded | Reaped | StandbyReady | StandbyFailed | SourcesChanged | Pong | ZygoteLost | Importing
)  # fmt: skip
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(ProcessEvent)}


def encode(event: ProcessEvent) -> dict[str, Any]:
    """The event as a JSON object."""
    return {"event": type(event).__name__, **asdict(event)}


def decode(body: Mapping[str, Any]) -> ProcessEvent:
    """The event of a JSON object. Raises KeyError or TypeError when it is none."""
    kind = _BY_NAME[body["event"]]
    lists = _tuple_fields(kind)
    values = {name: tuple(value) if name in lists else value for name, value in body.items() if name != "event"}
    return typing.cast(ProcessEvent, kind(**values))


@cache
def _tuple_fields(kind: type) -> frozenset[str]:
    hints = typing.get_type_hints(kind)
    return frozenset(f.name for f in fields(kind) if _is_tuple(hints[f.name]))


def _is_tuple(hint: object) -> bool:
    return isinstance(hint, types.GenericAlias) and hint.__origin__ is tuple
