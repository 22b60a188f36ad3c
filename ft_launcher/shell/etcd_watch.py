"""A watch that loses nothing and repeats nothing, over restarts, changes of leader, frozen servers and compaction.

One stream a watch, and one position: the next revision that the consumer has not seen. Whatever ends the stream (its server went away, lost its
leader, or failed a *call*: `Endpoint.stream`), a new one begins at the position, at whichever server answers a call first. Where the history from there on is
compacted away, or the store has gone back in time (rebuilt from an old backup), no stream can tell what happened: the watch lists and says `reset`.

It knows events and revisions. It must never use the package's own Watcher (after a reconnect it can hand events to the wrong watch).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from grpc import aio

from ft_launcher.errors import PlatformError
from ft_launcher.shell.etcd_calls import BACKOFF_S, SLOWEST_S, UNREACHABLE, Calls, ClosedError
from ft_launcher.shell.etcd_endpoint import Line, Method, we_are_cancelled
from ft_launcher.shell.etcd_proto import pb
from ft_launcher.shell.store import Change, Changes, Entry, Listing, boottime_s


class _HistoryGoneError(Exception):
    """The stream cannot go on from the position."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The keys that start with `prefix`, but for those that start with `hidden`: the client's own registers."""

    prefix: str
    hidden: str

    def interval(self) -> tuple[bytes, bytes]:
        """etcd's (key, range_end). UTF-8 has no byte 255, so the last one can always be raised."""
        key = self.prefix.encode(errors="surrogateescape")
        return (key, key[:-1] + bytes([key[-1] + 1])) if key else (b"\0", b"\0")

    def shows(self, key: str) -> bool:
        """Whether a key that was found in the interval is the consumer's business."""
        return not key.startswith(self.hidden)


def entry(kv: Any) -> Entry:
    """etcd's KeyValue as the store's. What is not UTF-8 (not ours) survives as surrogates."""
    key, value = (text.decode(errors="surrogateescape") for text in (kv.key, kv.value))
    return Entry(key, value, kv.create_revision, kv.mod_revision, kv.lease)


async def list_scope(calls: Calls, scope: Scope) -> Listing:
    """Everything in the scope, by key, at one revision, as the majority of the cluster has it."""
    key, end = scope.interval()
    response = (await calls.call(range_of, pb.RangeRequest(key=key, range_end=end))).response
    found = (entry(kv) for kv in response.kvs)
    return Listing(tuple(e for e in found if scope.shows(e.key)), response.header.revision)


async def probe(calls: Calls, scope: Scope) -> None:
    """A call that only asks whether the store is there, a majority of it: it has to, for a read that may not be stale. Raises as Calls.call does."""
    key, end = scope.interval()
    await calls.call(range_of, pb.RangeRequest(key=key, range_end=end, limit=1, keys_only=True))


def range_of(line: Line) -> Method:
    """The method for reads."""
    return line.kv.Range  # type: ignore[no-any-return]


class Watch:
    """The changes in one scope from a revision on."""

    def __init__(self, calls: Calls, scope: Scope, revision: int, timeout_s: float) -> None:
        self._calls = calls
        self._scope = scope
        self._position = revision
        self._timeout_s = timeout_s
        self._pause_s = 0.0
        self._lost_s: float | None = None
        self._endpoint = calls.endpoint
        self._stream: Any = None
        self._asked_s = 0.0

    async def changes(self) -> AsyncGenerator[Changes, None]:
        """See Store.watch. Ends when the store is closed; raises PlatformError (69) when nothing can be watched for `timeout_s`."""
        try:
            while True:
                for batch in await self._next():
                    yield batch
        except ClosedError:
            return
        finally:
            self._drop()

    async def _next(self) -> list[Changes]:
        """What the server sends next, over a new stream where there is none. Possibly nothing."""
        try:
            response = await (self._open() if self._stream is None else self._read())
        except _HistoryGoneError:
            self._drop()
            return [await self._reset()]
        if response is None:
            self._drop()
            await self._recover()
            return []
        self._pause_s, self._lost_s = 0.0, None
        return list(self._batches(response))

    def _drop(self) -> None:
        if self._stream is not None:
            self._endpoint.release(self._stream)
            self._stream = None

    async def _recover(self) -> None:
        """After a stream has ended: wait until a server answers. Permission and login are sorted out by that call too."""
        self._lost_s = boottime_s() if self._lost_s is None else self._lost_s
        await self._calls.pause(self._pause_s)
        self._pause_s = min(BACKOFF_S[1], max(BACKOFF_S[0], 2 * self._pause_s))
        await probe(self._calls, self._scope)
        if boottime_s() - self._lost_s > self._timeout_s + SLOWEST_S:
            raise PlatformError(
                f"store {self._calls.name}: answers, but serves no watch for {self._timeout_s:g} s (--store-timeout)", UNREACHABLE
            )

    async def _reset(self) -> Changes:
        listing = await list_scope(self._calls, self._scope)
        self._position = listing.revision + 1
        return Changes(tuple(Change(e.key, e, e.modified) for e in listing.entries), listing.revision, reset=True)

    async def _open(self) -> Any:
        """Ask for the events from the position on. The server's first response, None where the stream does not stand."""
        self._calls.check()
        metadata = await self._calls.metadata()
        self._endpoint = self._calls.endpoint
        self._stream, self._asked_s = self._endpoint.stream(metadata), boottime_s()
        key, end = self._scope.interval()
        request = pb.WatchRequest(create_request=pb.WatchCreateRequest(key=key, range_end=end, start_revision=self._position))
        try:
            async with asyncio.timeout(self._calls.patience_s):
                response = await self._read(request)
        except TimeoutError:
            self._calls.failed(self._endpoint, self._asked_s, timed_out=True)
            return None
        if response is not None and response.header.revision < self._position - 1:
            await self._check_history()
        return response

    async def _check_history(self) -> None:
        """The server is behind what we have seen: a follower that will catch up, or a store that was rebuilt?"""
        if (await list_scope(self._calls, self._scope)).revision < self._position - 1:
            raise _HistoryGoneError

    async def _read(self, request: Any = None) -> Any:
        """The next response (to this request), None where the stream has ended."""
        try:
            if request is not None:
                await self._stream.write(request)
            response = await self._stream.read()
        except aio.AioRpcError:
            self._calls.failed(self._endpoint, self._asked_s, timed_out=False)
            return None
        except asyncio.InvalidStateError:
            return None
        except asyncio.CancelledError:
            if we_are_cancelled():
                raise
            return None  # the endpoint has given up its streams
        if response is aio.EOF:
            return None
        if response.compact_revision:
            raise _HistoryGoneError
        return None if response.canceled else response

    def _batches(self, response: Any) -> Iterator[Changes]:
        """The changes of each revision, in order, from the position on. A server never splits a revision over responses."""
        for revision, events in groupby(response.events, key=lambda event: event.kv.mod_revision):
            if revision < self._position:
                continue
            self._position = revision + 1
            changes = (self._change(event, revision) for event in events)
            if shown := tuple(c for c in changes if self._scope.shows(c.key)):
                yield Changes(shown, revision)

    @staticmethod
    def _change(event: Any, revision: int) -> Change:
        found = entry(event.kv)
        return Change(found.key, None if event.type == pb.Event.DELETE else found, revision)
