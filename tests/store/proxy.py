"""A TCP proxy that misbehaves: delays, swallows answers, keeps requests back and lets them go later, cuts.

It lives in the test's event loop. `endpoint` is where the client goes. The modes are plain attributes, and hold for bytes that arrive from now on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Proxy:
    """`async with Proxy(target)`. `delay_s` is added in each direction."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.delay_s = 0.0
        self.swallow_answers = False
        self.swallow_requests = False
        self.refuse = False
        self.kept: list[tuple[asyncio.StreamWriter, bytes]] | None = None
        self.connections = 0
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def keep(self) -> None:
        """Keep requests back from now on. `seal` what has come; `release` it."""
        self.kept = []

    def seal(self) -> list[tuple[asyncio.StreamWriter, bytes]]:
        """What was kept. Further bytes of the same connections are lost."""
        kept, self.kept = self.kept or [], None
        self.swallow_requests = True
        return kept

    async def release(self, kept: list[tuple[asyncio.StreamWriter, bytes]]) -> None:
        """Bring to the server what was kept, late."""
        for writer, data in kept:
            writer.write(data)
            await writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, sink, forth in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._pump(source, sink, forth))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, sink: asyncio.StreamWriter, data: bytes) -> None:
        """A longer way, not a narrower one: all that is under way is late by the same time."""
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, sink.write, data)
            return
        sink.write(data)
        await sink.drain()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, forth: bool) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if forth and self.kept is not None:
                    self.kept.append((sink, data))
                elif not (self.swallow_requests if forth else self.swallow_answers):
                    await self._send(sink, data)
        self._writers.discard(sink)
        sink.transport.abort()
