"""Following keys of the store for as long as that makes sense, through outages of the store.

What is there now comes first, as a `reset`; then every change, in order. A store that is away longer than its timeout ends an agent that has nothing else to do, but never one
whose ranks train: they need no store until something happens to them, and then a *write* that finds none ends the agent. It knows keys and revisions, not what they mean.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from ft_launcher.errors import PlatformError
from ft_launcher.shell.store import Change, Changes, Listing, Store

UNREACHABLE = 69


async def follow(store: Store, prefix: str, patient: Callable[[], bool], listing: Listing | None = None) -> AsyncGenerator[Changes, None]:
    """The keys under a prefix (or only what came after a `listing` of them), then their changes; ends when the store is closed.

    What a batch with `reset` does not list is gone. Raises PlatformError where the store stays away and `patient()` is false. Abandon it with `aclose`.
    """
    if listing is None:
        listing = await store.list(prefix)
        yield Changes(tuple(Change(e.key, e, e.modified) for e in listing.entries), listing.revision, reset=True)
    position = listing.revision + 1
    while True:
        found = store.watch(prefix, position)
        try:
            async for batch in found:
                position = batch.revision + 1
                yield batch
            return
        except PlatformError as error:
            if error.exit_code != UNREACHABLE or not patient():
                raise
        finally:
            await found.aclose()
