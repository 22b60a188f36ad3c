"""Writes that happen exactly once, and never late.

A write whose answer is lost leaves three possibilities: it was done, it was not, or it is still on its way (in a frozen member, or a slow network)
and will be done after we have decided something else. Comparing the written value with ours cannot tell these apart. So each transaction also
writes a register key of ours with a number that is used once, and compares that the register is as we left it:

- sent twice, it succeeds at most once, for the first success changes the register;
- if a repetition fails, the register read in the same transaction says whether an earlier copy was the one that succeeded, and at which revision;
- if none did, a last transaction overwrites the register, after which no copy that is still on its way can ever succeed. Only then the answer is no.

That costs one small key in the transactions that are made anyway, and one round trip more after trouble only. The keys are a client's own: a random
name below a common prefix, one for each transaction under way at the same time, made before their first use (so that no copy of a write can ever
find its register as it left it once that is deleted), deleted by `close`; a killed client leaves them (some 100 bytes).

It knows transactions. It must never know what they are for, nor how a call is brought to a server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.errors import FTError, PlatformError
from ft_launcher.shell.etcd_calls import UNREACHABLE, Answer, Calls
from ft_launcher.shell.etcd_endpoint import Line, Method
from ft_launcher.shell.etcd_proto import pb, transactions
from ft_launcher.shell.store import LeaseGoneError, Outcome


@dataclass(slots=True)
class _Register:
    """A key of ours and the revision at which we wrote it last. Never 0 in a guarded write: a register that is gone must refuse late copies."""

    key: bytes
    revision: int = 0


class Writer:
    """Carries out transactions; several at a time, each with a register of its own."""

    def __init__(self, calls: Calls, prefix: str) -> None:
        self._calls = calls
        self._name = f"{prefix}{uuid.uuid4().hex}."
        self._made = 0
        self._number = 0
        self._free: list[_Register] = []

    async def write(self, compares: Sequence[Any], operations: Sequence[Any]) -> Outcome:
        """Carry out etcd's Compare and RequestOp messages. Raises as Calls.call does."""
        register = self._free.pop() if self._free else await self._make()
        outcome = await self._write(register, compares, operations)
        self._free.append(register)  # where that raised or was cancelled, the register is in doubt: never used again
        return outcome

    async def _make(self) -> _Register:
        self._made += 1
        register = _Register(f"{self._name}{self._made}".encode())
        mark = self._mark()
        answer = await self._calls.call(_txn, _guarded(register, mark, (), ()))
        if answer.response.succeeded:
            self._moved(register, answer)
        else:
            self._found(register, answer, mark)  # an earlier copy of this request has made it
        return register

    async def _write(self, register: _Register, compares: Sequence[Any], operations: Sequence[Any]) -> Outcome:
        mark = self._mark()
        request = _guarded(register, mark, compares, operations)
        try:
            answer = await self._calls.call(_txn, request)
        except LeaseGoneError:
            done = await self._void(register, mark)
            if done is None:
                raise
            return Outcome(True, done)
        if answer.response.succeeded:
            return Outcome(True, self._moved(register, answer))
        done = self._found(register, answer, mark)
        if done is None and answer.sent > 1:
            done = await self._void(register, mark)
        return Outcome(False, answer.response.header.revision) if done is None else Outcome(True, done)

    async def _void(self, register: _Register, mark: bytes) -> int | None:
        """Make sure that no copy of the write with this mark can succeed any more. Returns the revision at which one did, if so."""
        own = self._mark()
        answer = await self._calls.call(_txn, _guarded(register, own, (), ()))
        if answer.response.succeeded:
            self._moved(register, answer)
            return None
        if self._found(register, answer, own) is not None:
            return None
        done = self._found(register, answer, mark)
        if done is None:
            raise PlatformError(f"store {self._calls.name}: lost what it had confirmed (the key {register.key.decode()})", UNREACHABLE)
        return done

    def _mark(self) -> bytes:
        self._number += 1
        return str(self._number).encode()

    @staticmethod
    def _moved(register: _Register, answer: Answer) -> int:
        register.revision = answer.response.header.revision
        return register.revision

    @staticmethod
    def _found(register: _Register, answer: Answer, mark: bytes) -> int | None:
        """The revision of the register where it bears the mark."""
        for kv in answer.response.responses[0].response_range.kvs:
            if kv.value == mark:
                register.revision = kv.mod_revision
                return int(kv.mod_revision)
        return None

    async def close(self) -> None:
        """Delete the registers, without insisting."""
        if not self._made or self._calls.health.away:
            return
        request = pb.DeleteRangeRequest(key=self._name.encode(), range_end=self._name[:-1].encode() + b"/")
        try:
            async with asyncio.timeout(1.0):
                await self._calls.call(_delete, request)
        except (TimeoutError, FTError):
            return


def _guarded(register: _Register, mark: bytes, compares: Sequence[Any], operations: Sequence[Any]) -> Any:
    untouched = (transactions.Mod(register.key) == register.revision).build_message()
    marked = pb.RequestOp(request_put=pb.PutRequest(key=register.key, value=mark))
    look = pb.RequestOp(request_range=pb.RangeRequest(key=register.key))
    return pb.TxnRequest(compare=[*compares, untouched], success=[*operations, marked], failure=[look])


def _txn(line: Line) -> Method:
    return line.kv.Txn  # type: ignore[no-any-return]


def _delete(line: Line) -> Method:
    return line.kv.DeleteRange  # type: ignore[no-any-return]
