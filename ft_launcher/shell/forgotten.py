"""A store that has lost what it had confirmed: its data were deleted, or an older copy of them was put back. Nobody can be told anything any more, and nobody has done it on purpose."""

from __future__ import annotations

import json

from ft_launcher.core.state import JobState
from ft_launcher.errors import PlatformError
from ft_launcher.shell.follow import UNREACHABLE
from ft_launcher.shell.store import Entry, Store


def forgotten(known: JobState | None, there: Entry | None) -> PlatformError | None:
    """The error for an agent that knew more of the job than the store holds now; None where the store knows as much. No job ever goes back to an earlier cycle."""
    if known is None:
        return None
    job = JobState.from_json(json.loads(there.value)) if there is not None else None
    if job is not None and (job.generation, job.cycle) >= (known.generation, known.cycle):
        return None
    holds = "nothing of it" if job is None else f"its generation {job.generation}, cycle {job.cycle}"
    return PlatformError(
        f"the store has lost run {known.run_id}: it holds {holds}, and cycle {known.cycle} of generation {known.generation} was confirmed; "
        "its data were deleted, or are an older copy",
        UNREACHABLE,
    )


async def store_forgot(store: Store, key: str, known: JobState | None) -> PlatformError | None:
    """As `forgotten`, of the job that is under `key` now."""
    return forgotten(known, await store.get(key))
