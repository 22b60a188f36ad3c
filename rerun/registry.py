"""The one machine of this process: made, looked up, taken away, under Megatron's names. Apart, so that the data iterator can ask for it without knowing it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rerun.adapter import RerunStateMachine

logger = logging.getLogger(__name__)
_current: list[RerunStateMachine] = []


def initialize_rerun_state_machine(**kwargs: Any) -> None:
    """Makes the machine; arguments as RerunStateMachine takes them. AssertionError where there is one."""
    from rerun.adapter import RerunStateMachine

    assert not _current, "Rerun state machine is already initialized: call destroy_rerun_state_machine first"
    _current.append(RerunStateMachine(**kwargs))


def destroy_rerun_state_machine() -> None:
    """Takes the machine away; nothing where there is none."""
    _current.clear()


def get_rerun_state_machine() -> RerunStateMachine:
    """The machine; without one, a new one in mode DISABLED (as Megatron does, and says)."""
    if not _current:
        logger.warning("Implicit initialization of the rerun state machine, in mode disabled")
        initialize_rerun_state_machine()
    return _current[0]


def recording() -> bool:
    """Whether samples have to be kept for another run of the step."""
    from rerun.words import RerunMode

    return get_rerun_state_machine().get_mode() is not RerunMode.DISABLED
