"""A local etcd for one measurement, and a look at what happens in it.

The server runs as etcd itself would (its own heartbeat, election and fsync), on free ports, with its data in a folder of the benchmark. `Watch` follows a prefix from a thread of
its own and notes when each change became visible here (CLOCK_MONOTONIC): that is how a benchmark learns who decides, without asking a launcher. Neither knows what keys mean.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from _common.processes import BenchError, free_port
from ft_launcher.config import StoreOptions
from ft_launcher.shell.etcd import EtcdStore
from ft_launcher.shell.follow import follow
from ft_launcher.shell.store import Change, Delete, Entry

TREE = Path(__file__).resolve().parents[2]
READY_S = 60.0
STORE_TIMEOUT_S = 60.0


def binary() -> str:
    """The server that the project's script finds, or installs without root."""
    return subprocess.run([TREE / "tools/etcd.sh"], check=True, capture_output=True, text=True).stdout.strip()


class Etcd:
    """One server, ready inside the `with` block; killed and forgotten after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._peer, self._metrics = free_port(), free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process."""
        if self._process is None:
            raise BenchError("etcd was not started")
        return self._process.pid

    def store(self) -> EtcdStore:
        """A new client with a connection of its own. Inside a running event loop only."""
        return EtcdStore(StoreOptions(kind="etcd", endpoints=(("127.0.0.1", self._port),), timeout_s=STORE_TIMEOUT_S))

    def __enter__(self) -> Etcd:
        self._folder.mkdir(parents=True, exist_ok=True)
        client, peer, metrics = (f"http://127.0.0.1:{port}" for port in (self._port, self._peer, self._metrics))
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            binary(),
            "--name",
            "a",
            "--data-dir",
            str(self._folder / "data"),
            "--log-level",
            "warn",
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-metrics-urls", metrics]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"a={peer}"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + READY_S
        while '"health":"true"' not in self._http("health"):
            if self._process.poll() is not None or time.monotonic() > end:
                raise BenchError(f"etcd does not start: {(self._folder / 'log').read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """CPU time used so far, seconds."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        """Memory in use now."""
        return float(psutil.Process(self.pid).memory_info().rss) / 1e6

    def metric(self, name: str) -> float:
        """The sum of one of the server's own counters over all its labels."""
        lines = [line for line in self._http("metrics").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def _http(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A change and when it was visible here."""

    change: Change
    at_ns: int


class Watch:
    """What is under a prefix, and every change since `__enter__`, noted by a thread."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._entries: dict[str, Entry] = {}
        self.history: list[Seen] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(10)

    def get(self, key: str) -> Entry | None:
        """The newest entry that has been seen."""
        return self._entries.get(key)

    def delete(self, key: str) -> None:
        """Remove a key."""
        asyncio.run_coroutine_threadsafe(self._delete(key), self._loop).result(STORE_TIMEOUT_S)

    async def _delete(self, key: str) -> None:
        await self._store.transact((), [Delete(key)])

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._follow())
        self._loop.close()

    async def _follow(self) -> None:
        self._task = asyncio.current_task()
        self._store = self._etcd.store()
        try:
            async for batch in follow(self._store, self._prefix, lambda: True):
                at_ns = time.monotonic_ns()
                for change in batch.changes:
                    self._note(change, at_ns)
        finally:
            await self._store.close()

    def _note(self, change: Change, at_ns: int) -> None:
        self.history.append(Seen(change, at_ns))
        if change.entry is not None:
            self._entries[change.key] = change.entry
        else:
            self._entries.pop(change.key, None)
