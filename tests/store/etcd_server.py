"""Real etcd servers for tests: one or a cluster, on free ports, in a folder of the test, killed by their own process id.

`EtcdServer` can be stopped, killed, frozen and started again on the same ports and data; `cluster` makes three that know each other. The binary is
the one that `tools/etcd.sh` finds (FT_ETCD). Ports are taken below the kernel's ephemeral range, so that a server which is down for a moment finds
its port free again. A server dies with the test process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server with TLS. `clients`: also ask for a client certificate of the same authority."""

    ca: Path
    cert: Path
    key: Path
    clients: bool = False


@cache
def binary() -> str:
    """The etcd server to test with."""
    return os.environ.get("FT_ETCD") or subprocess.run([TREE / "tools/etcd.sh"], check=True, capture_output=True, text=True).stdout.strip()


@cache
def _unsafe_no_fsync() -> bool:
    """Whether the server can leave out fsync (3.5): a killed process loses nothing by it, only a machine would."""
    return "--unsafe-no-fsync" in subprocess.run([binary(), "--help"], check=False, capture_output=True, text=True).stdout


def free_port() -> int:
    """A port that nobody listens on, outside the range from which the kernel takes ports for outgoing connections."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many different ones. Another process may be about to take the same: chosen by the system's dice, which no test has set."""
    dice, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = dice.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


class EtcdServer:
    """One server. `endpoint` is where clients go."""

    def __init__(self, folder: Path, name: str = "a", flags: Sequence[str] = (), tls: Tls | None = None) -> None:
        self.name = name
        self.flags = tuple(flags)
        self.tls = tls
        self._take_ports()
        self._served = False
        self.others: list[EtcdServer] = []
        self._folder = folder / f"etcd-{name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def _take_ports(self) -> None:
        self.client, self.peer, self.metrics = free_ports(3)

    @property
    def endpoint(self) -> tuple[str, int]:
        return ("127.0.0.1", self.client)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        scheme = "https" if self.tls else "http"
        here = f"http://127.0.0.1:{self.peer}"
        everybody = ",".join(f"{s.name}=http://127.0.0.1:{s.peer}" for s in [self, *self.others])
        client = f"{scheme}://127.0.0.1:{self.client}"
        command = [
            binary(), "--name", self.name, "--data-dir", str(self._folder / "data"), "--heartbeat-interval", "50", "--election-timeout", "250",
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", here, "--initial-advertise-peer-urls", here,
            "--listen-metrics-urls", f"http://127.0.0.1:{self.metrics}", "--initial-cluster", everybody, "--log-level", "warn", *self.flags,
        ]  # fmt: skip
        if _unsafe_no_fsync():
            command.append("--unsafe-no-fsync")
        if self.tls:
            command += ["--cert-file", str(self.tls.cert), "--key-file", str(self.tls.key), "--trusted-ca-file", str(self.tls.ca)]
            command += ["--client-cert-auth"] if self.tls.clients else []
        if shutil.which("setpriv"):
            command[:0] = ["setpriv", "--pdeathsig", "KILL"]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> EtcdServer:
        """Start and wait until it serves; the first time on other ports where somebody was faster."""
        self.launch()
        while not self._served and not self.others and self._taken():
            self._take_ports()
            self.launch()
        self.wait_ready()
        return self

    def _taken(self) -> bool:
        """Whether it ended because another process has one of its ports; waits until that is known."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while self._process.poll() is None and time.monotonic() < deadline and '"health":"true"' not in self._http("health"):
            time.sleep(0.02)
        return self._process.poll() is not None and "address already in use" in self.log()[-2000:]

    def wait_ready(self) -> None:
        """Until the server, and the cluster it is in, takes writes."""
        deadline = time.monotonic() + READY_S
        while '"health":"true"' not in self._http("health"):
            assert self._process is not None and self._process.poll() is None, f"etcd ended: {self.log()[-2000:]}"
            assert time.monotonic() < deadline, f"etcd is not ready: {self.log()[-2000:]}"
            time.sleep(0.02)
        self._served = True

    def is_leader(self) -> bool:
        """Whether this member leads its cluster."""
        return "\netcd_server_is_leader 1" in self._http("metrics")

    def metric(self, name: str) -> float:
        """A figure of the server's own, 0 where it has none."""
        lines = [line for line in self._http("metrics").splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[1]) if lines else 0.0

    def _http(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def pause(self) -> None:
        """Freeze: connections stay, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + READY_S
        while not all(_state(task) == "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, "the server does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """At once, as by power loss of the process. Data stays."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In order. Data stays."""
        self._end(signal.SIGTERM)

    def wipe(self) -> None:
        """Forget everything; the next start is a new cluster on the same ports."""
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._process = None


def _state(task: Path) -> str:
    """The kernel's letter for a thread."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def cluster(folder: Path, size: int = 3, into: list[EtcdServer] | None = None) -> list[EtcdServer]:
    """Servers that form one cluster, started and ready; `into` has them from the beginning, for whoever must kill them in any case."""
    servers = [] if into is None else into
    servers += [EtcdServer(folder, name) for name in "abcdefg"[:size]]
    for server in servers:
        server.others = [s for s in servers if s is not server]
        server.launch()
    for server in servers:
        server.wait_ready()
    return servers


def leader(servers: Sequence[EtcdServer]) -> EtcdServer:
    """The member that leads now."""
    deadline = time.monotonic() + READY_S
    while not (found := [s for s in servers if s.is_leader()]):
        assert time.monotonic() < deadline, "the cluster elects nobody"
        time.sleep(0.02)
    return found[0]
