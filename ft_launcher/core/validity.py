"""What must be true of every job state, whatever happened; asked after every event by tests and the simulator."""

from __future__ import annotations

from ft_launcher.core.state import JobState, Options, Phase
from ft_launcher.core.topology import Topology


def what_is_wrong(state: JobState, topology: Topology, options: Options) -> str | None:
    """One sentence, or None for a state that makes sense."""
    placement = state.placement
    if placement is not None:
        placement.validate()
        if placement.world != topology.world:
            return f"placement holds {placement.world} ranks, not {topology.world}"
    if state.phase is Phase.DONE and state.verdict is None:
        return "done without a verdict"
    if state.phase is Phase.RUNNING and (placement is None or state.master is None):
        return "running without a placement or a store"
    if state.budgets.restarts > options.max_restarts:
        return f"{state.budgets.restarts} restarts, {options.max_restarts} allowed"
    return None
