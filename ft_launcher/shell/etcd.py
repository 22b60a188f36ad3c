"""The store over etcd v3: what `shell/store.py` promises, for many nodes (docs/adr/0003-etcd-client.md).

This room puts the parts together: `etcd_calls` brings a call to a server that answers, `etcd_register` makes writes happen exactly once,
`etcd_watch` follows changes, `etcd_endpoint` and `etcd_proto` hold connections and messages. While anything is watched, a pulse asks the store every
two seconds whether it is still there, unless other calls do: a watch cannot tell a quiet store from a frozen one.

It knows etcd's requests. It must never know what keys and values mean, and it never crosses a fork: one process, one event loop.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from ft_launcher.config import StoreOptions
from ft_launcher.errors import FTError
from ft_launcher.shell.etcd_calls import Calls, LeaseExistsError
from ft_launcher.shell.etcd_endpoint import Line, Method
from ft_launcher.shell.etcd_proto import pb, transactions
from ft_launcher.shell.etcd_register import Writer
from ft_launcher.shell.etcd_watch import Scope, Watch, entry, list_scope, probe, range_of
from ft_launcher.shell.store import (
    Changes,
    Compare,
    Created,
    Entry,
    LeaseGoneError,
    Listing,
    Operation,
    Outcome,
    Put,
    boottime_s,
    require_distinct,
)
from ft_launcher.shell.store_health import Health

PULSE_S = 2.0
"""The store is asked at least so often while something is watched. 2,000 agents at this pace, keep-alives included, cost etcd about half a core."""
REGISTERS = "/ft/v1/.registers/"
"""Where a client keeps its registers (etcd_register) unless it is told otherwise."""


class EtcdStore:
    """`Store` over an etcd cluster. All methods raise PlatformError (69) after `options.timeout_s` without an answer, ConfigError where etcd refuses the user.

    `registers` is a key prefix of the client's own, never listed or watched; the etcd user must be able to write below it.
    """

    def __init__(self, options: StoreOptions, registers: str = REGISTERS) -> None:
        self._options = options
        self._registers = registers
        self._calls = Calls(options)
        self._writer = Writer(self._calls, registers)
        self._watched: list[Scope] = []
        self._pulse: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        """Whether the store answers, and since when; who wants to hear of an outage may `listen`."""
        return self._calls.health

    async def get(self, key: str) -> Entry | None:
        """See Store."""
        response = (await self._calls.call(range_of, pb.RangeRequest(key=key.encode()))).response
        return entry(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See Store."""
        return await list_scope(self._calls, Scope(prefix, self._registers))

    async def put(self, key: str, value: str, lease: int = 0) -> int:
        """See Store. An earlier put whose answer was lost is never applied after a later one."""
        return (await self._writer.write((), [_operation(Put(key, value, lease))])).revision

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """See Store. Applied at most once, and not at all once it has been said that it was not."""
        require_distinct(operations)
        wanted = [_compare(compare) for compare in compares]
        if operations:
            return await self._writer.write(wanted, [_operation(operation) for operation in operations])
        response = (await self._calls.call(_txn, pb.TxnRequest(compare=wanted))).response
        return Outcome(response.succeeded, response.header.revision)

    async def grant(self, ttl_s: float) -> int:
        """See Store. etcd counts whole seconds: rounded up. The id is chosen here, so that a repeated request makes no second lease."""
        lease = uuid.uuid4().int >> 65
        with suppress(LeaseExistsError):
            await self._calls.call(_grant, pb.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=lease))
        return lease

    async def keep_alive(self, lease: int) -> float | None:
        """See Store. The server's own count began later than ours: it never ends the lease before the deadline."""
        try:
            answer = await self._calls.call(_refresh, pb.LeaseKeepAliveRequest(ID=lease))
        except LeaseGoneError:
            return None
        return answer.asked_s + answer.response.TTL if answer.response.TTL > 0 else None

    async def revoke(self, lease: int) -> None:
        """See Store."""
        with suppress(LeaseGoneError):
            await self._calls.call(_revoke, pb.LeaseRevokeRequest(ID=lease))

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        """See Store."""
        scope = Scope(prefix, self._registers)
        self._watched.append(scope)
        if self._pulse is None:
            self._pulse = asyncio.create_task(self._beat())
        try:
            async with aclosing(Watch(self._calls, scope, revision, self._options.timeout_s).changes()) as found:
                async for changes in found:
                    yield changes
        finally:
            self._watched.remove(scope)

    async def _beat(self) -> None:
        """Ask whether the store is there whenever nobody else has for PULSE_S. A call that fails takes the watches off its server."""
        while self._watched:
            idle_s = boottime_s() - self.health.contact_s
            try:
                if idle_s >= PULSE_S:
                    await probe(self._calls, self._watched[0])
                else:
                    await asyncio.sleep(PULSE_S - idle_s)
            except FTError:
                await self._calls.pause(PULSE_S)  # the watches meet the same, and say so
        self._pulse = None

    async def close(self, *, tidy: bool = True) -> None:
        """See Store. Nothing is left: no task, no connection, and (with `tidy`, which asks the store) no register."""
        if tidy:
            await self._writer.close()
        if (pulse := self._pulse) is not None:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)
        await self._calls.close()


def _compare(compare: Compare) -> Any:
    key = compare.key.encode()
    wanted = transactions.Create(key) if isinstance(compare, Created) else transactions.Mod(key)
    return (wanted == compare.revision).build_message()


def _operation(operation: Operation) -> Any:
    key = operation.key.encode()
    if isinstance(operation, Put):
        put = pb.PutRequest(key=key, value=operation.value.encode(errors="surrogateescape"), lease=operation.lease)
        return pb.RequestOp(request_put=put)
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def _txn(line: Line) -> Method:
    return line.kv.Txn  # type: ignore[no-any-return]


def _grant(line: Line) -> Method:
    return line.lease.LeaseGrant  # type: ignore[no-any-return]


def _refresh(line: Line) -> Method:
    return line.refresh


def _revoke(line: Line) -> Method:
    return line.lease.LeaseRevoke  # type: ignore[no-any-return]
