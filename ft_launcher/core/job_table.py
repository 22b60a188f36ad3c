"""The job machine's table: which phase may follow which, and what each event means in each phase. The program of `job.py`, to be read before it."""

from __future__ import annotations

from ft_launcher.core.events import DrainAsked, NodeJoined, NodeLost, ProgressSeen, ReportReceived, TimerFired
from ft_launcher.core.machine import IGNORE, total
from ft_launcher.core.state import Phase

EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.DRAINING, Phase.ENDING}),
    Phase.DRAINING: frozenset({Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.PAUSED, Phase.DONE}),
    Phase.PAUSED: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""Which phase may follow which (docs/states.md is drawn from this)."""

_ROWS: dict[type, dict[Phase, str]] = {
    NodeJoined: dict.fromkeys(Phase, "on_joined") | {Phase.DONE: IGNORE},
    NodeLost: dict.fromkeys(Phase, "on_lost") | {Phase.DONE: IGNORE},
    ReportReceived: {
        Phase.FORMING: "on_report_waiting",
        Phase.RUNNING: "on_report_running",
        Phase.DRAINING: "on_report_draining",
        Phase.ENDING: "on_report_ending",
        Phase.PAUSED: "on_report_waiting",
        Phase.DONE: IGNORE,
    },
    DrainAsked: dict.fromkeys(Phase, "on_drain_asked") | {Phase.DONE: IGNORE},
    ProgressSeen: dict.fromkeys(Phase, IGNORE) | {Phase.RUNNING: "on_progress"},
    TimerFired: {
        Phase.FORMING: "on_timer_waiting",
        Phase.RUNNING: "on_timer_running",
        Phase.DRAINING: "on_timer_draining",
        Phase.ENDING: "on_timer_ending",
        Phase.PAUSED: "on_timer_waiting",
        Phase.DONE: IGNORE,
    },
}

TRANSITIONS = total(Phase, _ROWS)
