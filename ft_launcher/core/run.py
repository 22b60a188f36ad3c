"""What one controller has seen of the running cycle: soft, forgotten at the next start, rebuilt by nobody."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Run:
    """What this controller has seen of the running cycle; seconds of its own clock. Forgotten at the next start."""

    started_at: float
    worked_at: float
    """When a rank was last seen to have got anywhere, or to have left its last open section."""
    stepped: dict[str, int | None] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    seen: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    all_started: bool = False
    recovered: bool = False
    exit_grace: bool = False
    settling: bool = False
    asked: bool = False
