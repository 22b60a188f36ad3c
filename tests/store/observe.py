"""What the tests of the store share: running a scenario against a store, and recording a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing

from ft_launcher.config import StoreOptions
from ft_launcher.shell.etcd import EtcdStore
from ft_launcher.shell.etcd_calls import Calls
from ft_launcher.shell.etcd_proto import pb
from ft_launcher.shell.store import Changes, Store
from tests.store.etcd_server import EtcdServer, Tls

LONG_S = 60.0
"""A deadline for what must happen at all."""


def options(endpoints: Iterable[EtcdServer | tuple[str, int]], timeout_s: float = LONG_S, **other: object) -> StoreOptions:
    """Options of a store at these servers."""
    where = tuple(e.endpoint if isinstance(e, EtcdServer) else e for e in endpoints)
    return StoreOptions(kind="etcd", endpoints=where, timeout_s=timeout_s, **other)  # type: ignore[arg-type]


def tls_options(server: EtcdServer, tls: Tls, timeout_s: float = LONG_S) -> StoreOptions:
    """Options of a store at a server with TLS, whose certificate is the client's as well."""
    return options([server], timeout_s, ca=tls.ca, cert=tls.cert, key=tls.key)


def run(make: Callable[[], Store], body: Callable[..., Awaitable[None]], *more: object) -> None:
    """Run a scenario with a store of its own, close that, and see that nothing of it is left running."""

    async def scenario() -> None:
        store = make()
        try:
            async with asyncio.timeout(3 * LONG_S):
                await body(store, *more)
        finally:
            await store.close()
        async with asyncio.timeout(LONG_S):  # gRPC takes a moment to see that its cancelled calls have ended
            while left := asyncio.all_tasks() - {asyncio.current_task()}:
                assert not any("ft_launcher" in repr(task) for task in left), f"left running: {left}"
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def run_etcd(opts: StoreOptions, body: Callable[[EtcdStore], Awaitable[None]]) -> None:
    """`run` with an EtcdStore."""
    run(lambda: EtcdStore(opts), body)


async def compact(store: EtcdStore, revision: int) -> None:
    """Forget the history before this revision."""
    await calls_of(store).call(lambda line: line.kv.Compact, pb.CompactionRequest(revision=revision, physical=True))


def calls_of(store: EtcdStore) -> Calls:
    return store._calls  # the tests' way to the server below the contract


async def until_away(store: EtcdStore) -> None:
    """Until the store's own calls have noticed."""
    async with asyncio.timeout(LONG_S):
        while not store.health.away:
            await asyncio.sleep(0.02)


class Recorder:
    """Records a watch from a revision on. `async with` it."""

    def __init__(self, store: Store, prefix: str, revision: int) -> None:
        self.batches: list[Changes] = []
        self.error: Exception | None = None
        self.ended = False
        self._news = asyncio.Event()
        self._store, self._prefix, self._revision = store, prefix, revision

    async def __aenter__(self) -> Recorder:
        self._task = asyncio.create_task(self._record())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _record(self) -> None:
        try:
            async with aclosing(self._store.watch(self._prefix, self._revision)) as changes:
                async for batch in changes:
                    self.batches.append(batch)
                    self._news.set()
        except Exception as error:  # noqa: BLE001 - kept for the test to look at
            self.error = error
        self.ended = True
        self._news.set()

    @property
    def seen(self) -> list[tuple[str, str | None]]:
        """(last part of the key, value or None), in order."""
        return [(c.key.removeprefix(self._prefix), c.entry and c.entry.value) for batch in self.batches for c in batch.changes]

    @property
    def values(self) -> list[str | None]:
        return [value for _, value in self.seen]

    async def until(self, done: Callable[[Recorder], bool]) -> None:
        """Wait until what was recorded satisfies this; fails with what was recorded."""
        try:
            async with asyncio.timeout(LONG_S):
                while not done(self):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not seen in {LONG_S} s; recorded {self.batches[-20:]}, error {self.error!r}") from None
