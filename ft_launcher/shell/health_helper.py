"""A helper process that answers questions, one line of JSON for each: the agent's way to ask what could block for ever.

A question that is not answered in time ends the helper with SIGKILL and is itself the answer: whoever it asked hangs. One that has ended (somebody killed it) is started again, and
only where it ends at once is nothing known. The event loop never waits for it. It knows a command and lines; what is asked, it does not know.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_READ_BYTES = 65_536
_WAIT_S = 0.2
"""A killed process is collected within milliseconds; one that hangs in the kernel is left to its own."""


class Helper:
    """One helper at a time, started by the first question. Use it from the event loop, in the main thread: the helper dies with that."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._env = dict(os.environ if env is None else env)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._answer: asyncio.Future[Any] | None = None

    @property
    def pid(self) -> int | None:
        """The helper's pid while there is one."""
        return None if self._process is None else self._process.pid

    async def ask(self, limit_s: float) -> Any | None:
        """The answer to one more question; None where no helper gives any. Raises TimeoutError after `limit_s` seconds."""
        for _ in range(2):
            if not self._start():
                return None
            answer = await self._ask_once(limit_s)
            if answer is not None:
                return answer
        return None

    async def _ask_once(self, limit_s: float) -> Any | None:
        process = self._process
        if process is None or process.stdin is None:
            return None
        self._answer = asyncio.get_running_loop().create_future()
        try:
            os.write(process.stdin.fileno(), b"\n")
            return await asyncio.wait_for(self._answer, limit_s)
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise
            return None

    def _start(self) -> bool:
        if self._process is not None:
            return True
        try:
            process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            return False
        self._process, self._said = process, b""
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._on_readable)
        return True

    def _on_readable(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        try:
            data = os.read(process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        self._said += data
        line, newline, rest = self._said.partition(b"\n")
        if newline:
            self._said = rest
            self._settle(_parsed(line))
        elif not data:
            self.close()

    def _settle(self, answer: Any | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def close(self) -> None:
        """End the helper; a question under way gets no answer."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdout is not None:
            asyncio.get_running_loop().remove_reader(process.stdout.fileno())
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_WAIT_S)
        self._settle(None)


def _parsed(line: bytes) -> Any | None:
    """JSON, or nothing that is known."""
    try:
        return json.loads(line)
    except ValueError:
        return None
