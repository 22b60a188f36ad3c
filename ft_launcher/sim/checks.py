"""What an invariant is shown: one step of the job machine, one action of a node, or the end of a launch.

An invariant is a function with a name that says the rule; it returns None, or one sentence that says what was seen instead. To add one, write it and
put it into its room's tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_launcher.core.actions import JobAction, NodeAction
from ft_launcher.core.events import JobEvent
from ft_launcher.core.state import JobState
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.controller import Controller

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch
    from ft_launcher.sim.world import World


@dataclass(frozen=True, slots=True)
class JobStep:
    """The job machine has answered an event: its state before and after, and what it wants done."""

    launch: Launch
    controller: Controller
    before: JobState
    after: JobState
    event: JobEvent
    actions: Sequence[JobAction]


@dataclass(frozen=True, slots=True)
class NodeStep:
    """A node is about to carry out an action; nothing of it has happened yet."""

    launch: Launch
    agent: Agent
    action: NodeAction


@dataclass(frozen=True, slots=True)
class CommitStep:
    """A job state is being written by the controller of this term, over the one of `before` (its term and the state; None: the first). `loading`: it has only just begun."""

    launch: Launch
    term: int
    job: JobState
    before: tuple[int, JobState] | None
    loading: bool


CommitInvariant = Callable[[CommitStep], str | None]
JobInvariant = Callable[[JobStep], str | None]
NodeInvariant = Callable[[NodeStep], str | None]
LaunchInvariant = Callable[["Launch"], str | None]
WorldInvariant = Callable[["World"], str | None]
