"""The node machine's table: what can run on a node, what may follow what, and what each event means in each phase. The program of `node.py`, to be read before it."""

from __future__ import annotations

from enum import StrEnum

from ft_launcher.core.events import (
    ErrorsRead,
    ExceptionStamped,
    GraceExpired,
    HangFound,
    JobChanged,
    NodeUnfit,
    RankEnded,
    RanksReaped,
    RanksStarted,
    SignalArrived,
    StandbyOpened,
    StopUnheard,
    ZygoteDied,
    ZygoteStarted,
)
from ft_launcher.core.machine import IGNORE, IMPOSSIBLE, total


class NodePhase(StrEnum):
    """What runs on the node."""

    IDLE = "idle"
    """No ranks: warm, waiting for a cycle."""
    RUNNING = "running"
    """Ranks of `cycle` were started and nobody has ended the cycle."""
    STOPPING = "stopping"
    """The cycle is over: killing, collecting, reading last words."""
    LEFT = "left"
    """The agent is ending."""


_LIVE = {NodePhase.RUNNING, NodePhase.STOPPING}


def _while_live(handler: str, idle: str = IGNORE) -> dict[NodePhase, str]:
    """A row for events of running ranks: stale once the node is idle."""
    return {phase: handler if phase in _LIVE else (idle if phase is NodePhase.IDLE else IGNORE) for phase in NodePhase}


def _only_stopping(handler: str) -> dict[NodePhase, str]:
    """A row for the answers to what only a stopping node asks."""
    return {NodePhase.IDLE: IGNORE, NodePhase.RUNNING: IMPOSSIBLE, NodePhase.STOPPING: handler, NodePhase.LEFT: IGNORE}


def _until_left(handler: str) -> dict[NodePhase, str]:
    return {phase: IGNORE if phase is NodePhase.LEFT else handler for phase in NodePhase}


EDGES: dict[NodePhase, frozenset[NodePhase]] = {
    NodePhase.IDLE: frozenset({NodePhase.RUNNING, NodePhase.LEFT}),
    NodePhase.RUNNING: frozenset({NodePhase.STOPPING}),
    NodePhase.STOPPING: frozenset({NodePhase.IDLE}),
    NodePhase.LEFT: frozenset(),
}
"""Which phase may follow which (docs/states.md is drawn from this)."""

TRANSITIONS = total(
    NodePhase,
    {
        JobChanged: _until_left("on_job"),
        ZygoteStarted: _until_left("on_zygote_started"),
        ZygoteDied: _until_left("on_zygote_died"),
        StandbyOpened: _until_left("on_standby"),
        RanksStarted: _while_live("on_started"),
        ExceptionStamped: _while_live("on_stamp"),
        RankEnded: _while_live("on_ended"),
        NodeUnfit: _until_left("on_unfit"),
        HangFound: {NodePhase.IDLE: IGNORE, NodePhase.RUNNING: "on_hang", NodePhase.STOPPING: IGNORE, NodePhase.LEFT: IGNORE},
        RanksReaped: _only_stopping("on_reaped"),
        ErrorsRead: _only_stopping("on_errors"),
        GraceExpired: _only_stopping("on_grace"),
        SignalArrived: _until_left("on_signal"),
        StopUnheard: _until_left("on_unheard"),
    },
)
