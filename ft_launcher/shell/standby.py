"""The store of the next cycle, listening before anybody needs it: a process whose only content is a TCPStore.

Each serves one cycle and is killed afterwards: no stale keys, no race for a port (the kernel chooses it), and no rank whose death takes the store along. A
zygote that has torch forks it in milliseconds. One that has not (start method spawn) execs a Python that imports torch, seconds before it is wanted: one such
blank process always waits, without a store yet, for the next request. It dies with the zygote. It must never be mistaken for a rank: `Rack.pids` is what the
reaper spares.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import setproctitle

from ft_launcher.shell import baseline, linux
from ft_launcher.shell.process_events import StandbyFailed, StandbyReady

READY_S = 120.0  # importing torch from a slow file system
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100
_EVERYWHERE = ("", "0.0.0.0", "::", "*")
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ft_launcher.shell.standby import main; main(*map(int, sys.argv[2:]))"


@dataclass(slots=True)
class _Store:
    pid: int
    answer_fd: int
    token: int = -1
    deadline: float = 0.0
    promised: bool = False


@dataclass(slots=True)
class _Blank:
    store: _Store
    requests: socket.socket


_NOT_FOR_US = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Ranks that use their grace after a signal to all processes of the job may still need their store; its end is a SIGKILL, of the zygote or by its death."""


class Rack:
    """The stores of one zygote. `forking`: this process has torch and can fork one; otherwise they are exec'd with `flags` and `env`."""

    def __init__(self, forking: bool, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self._forking = forking
        self._flags = tuple(flags)
        self._env = env
        self._stores: list[_Store] = []
        self._blank: _Blank | None = None

    @property
    def pids(self) -> frozenset[int]:
        """All processes of the rack, the waiting blank one included."""
        blank = () if self._blank is None else (self._blank.store.pid,)
        return frozenset((*(store.pid for store in self._stores), *blank))

    @property
    def fds(self) -> list[int]:
        """Readable when `collect` has something to say."""
        return [store.answer_fd for store in self._stores if store.answer_fd >= 0]

    def next_deadline(self) -> float | None:
        """CLOCK_MONOTONIC seconds at which `collect` will give up on a store, or None."""
        return min((store.deadline for store in self._stores if store.answer_fd >= 0), default=None)

    def warm(self) -> None:
        """Starts importing torch for the next store, where a store cannot be forked. Raises OSError."""
        if not self._forking and self._blank is None:
            self._blank = self._exec_blank()

    def prepare(self, token: int, host: str) -> StandbyReady | StandbyFailed | None:
        """Starts a store. None: `collect` will tell how it went; a store that is not forked has its port at once, and `collect` tells only if it comes to nothing.

        Raises OSError when no process can be started or no port opened.
        """
        if not self._forking and importlib.util.find_spec("torch") is None:
            return StandbyFailed(token, "torch is not installed")
        listener = None if self._forking else _listen(host)
        store = self._fork(host) if listener is None else self._use_blank(host, listener)
        store.token, store.deadline, store.promised = token, time.monotonic() + READY_S, listener is not None
        self._stores.append(store)
        if listener is None:
            return None
        port = int(listener.getsockname()[1])
        listener.close()
        return StandbyReady(token, port)

    def release(self, token: int) -> None:
        """Ends the store of a token; one that is unknown (ended already) is no error."""
        for store in [store for store in self._stores if store.token == token]:
            self._drop(store)

    def collect(self) -> list[StandbyReady | StandbyFailed]:
        """What the stores have answered by now, without waiting."""
        events: list[StandbyReady | StandbyFailed] = []
        for store in [store for store in self._stores if store.answer_fd >= 0]:
            answer = _read(store.answer_fd)
            if answer is None and time.monotonic() < store.deadline:
                continue
            os.close(store.answer_fd)
            store.answer_fd = -1
            port = (answer or {}).get("port")
            if port is not None:
                events += [] if store.promised else [StandbyReady(store.token, port)]
                continue
            events.append(StandbyFailed(store.token, _failure(answer)))
            self._drop(store)
        return events

    def ended(self, pid: int, status: int) -> StandbyFailed | None:
        """To be told of every child that was collected: an event when it was a store that should still be there. Call `collect` first."""
        if self._blank is not None and self._blank.store.pid == pid:
            os.close(self._blank.store.answer_fd)
            self._forget_blank()
        for store in [store for store in self._stores if store.pid == pid]:
            if store.answer_fd >= 0:
                os.close(store.answer_fd)
            self._stores.remove(store)
            return StandbyFailed(store.token, f"the standby store's process ended ({_how(status)})")
        return None

    def _drop(self, store: _Store) -> None:
        self._stores.remove(store)
        if store.answer_fd >= 0:
            os.close(store.answer_fd)
        with suppress(ProcessLookupError):
            os.kill(store.pid, signal.SIGKILL)

    def _fork(self, host: str) -> _Store:
        answer_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_store(parent, host, write_fd)
        os.close(write_fd)
        return _Store(pid, answer_fd)

    def _use_blank(self, host: str, listener: socket.socket) -> _Store:
        self.warm()
        assert self._blank is not None
        store = self._blank.store
        with suppress(OSError):  # it has ended: then its answer pipe says so
            socket.send_fds(self._blank.requests, [json.dumps({"host": host}).encode()], [listener.fileno()])
        self._forget_blank()
        self.warm()
        return store

    def _forget_blank(self) -> None:
        assert self._blank is not None
        self._blank.requests.close()
        self._blank = None

    def _exec_blank(self) -> _Blank:
        requests, theirs = socket.socketpair()
        answer_fd, answer_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._exec((parent, theirs.fileno(), answer_end))
        theirs.close()
        os.close(answer_end)
        return _Blank(_Store(pid, answer_fd), requests)

    def _exec(self, numbers: tuple[int, int, int]) -> NoReturn:
        try:
            for fd in numbers[1:]:
                os.set_inheritable(fd, True)
            baseline.default_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            args = [sys.executable, "-P", *self._flags, "-c", BOOT, json.dumps([*_own_library_first(sys.path), _ROOT]), *map(str, numbers)]
            os.execve(sys.executable, args, dict(self._env or os.environ))
        finally:
            os._exit(1)


def _own_library_first(path: Sequence[str]) -> list[str]:
    """Python's own library before the script's folder: this helper is no script, and a `http.py` beside the user's must not become part of it."""
    home = os.path.dirname(os.__file__)
    own = [p for p in path if p and (p == home or p.startswith(os.path.join(home, "lib-dynload")))]
    return [*own, *(p for p in path if p not in own)]


def main(parent: int, request_fd: int, answer_fd: int) -> None:
    """The blank process: imports torch, waits for a host, becomes its store. Ends when the zygote does."""
    if not linux.die_with_parent(signal.SIGKILL, parent):
        return
    os.setsid()
    setproctitle.setproctitle("ft-launch: standby store")
    failure = None
    try:
        import torch.distributed  # noqa: F401
    except BaseException as error:  # noqa: BLE001  told when somebody asks
        failure = error
    with socket.socket(fileno=request_fd) as requests:
        request, fds, _, _ = socket.recv_fds(requests, 1 << 16, 1)
    if not request or not fds:
        return
    if failure is not None:
        _answer(answer_fd, {"reason": _text(failure)})
        return
    listener = socket.socket(fileno=fds[0])
    _serve(lambda: make_store(json.loads(request)["host"], listener), answer_fd)


def _become_store(parent: int, host: str, answer_fd: int) -> NoReturn:
    """A forked child of the zygote, which it must never return into."""
    try:
        if linux.die_with_parent(signal.SIGKILL, parent):
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for fd in baseline.open_fds() - {0, 1, 2, answer_fd}:
                os.close(fd)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            setproctitle.setproctitle("ft-launch: standby store")
            _serve(lambda: make_store(host, _listen(host)), answer_fd)
    except BaseException as error:  # noqa: BLE001
        _answer(answer_fd, {"reason": _text(error)})
    finally:
        os._exit(1)


def _serve(make: Callable[[], Any], answer_fd: int) -> None:
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    try:
        store = make()
    except Exception as error:  # noqa: BLE001  whatever torch says, the agent goes on without
        _answer(answer_fd, {"reason": _text(error)})
        return
    _answer(answer_fd, {"port": store.port})
    while True:
        signal.pause()


def _listen(host: str) -> socket.socket:
    """A listening socket on a port of the kernel's choice: on all interfaces for `""` and `0.0.0.0`, else on the address of `host` alone. Raises OSError."""
    if host in _EVERYWHERE:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), 0), family=family, backlog=4096)


def make_store(host: str, listener: socket.socket) -> Any:
    """A TCPStore server behind that socket. Raises what torch raises."""
    from torch.distributed import TCPStore

    port = int(listener.getsockname()[1])
    name = "127.0.0.1" if host in _EVERYWHERE else str(listener.getsockname()[0])
    return TCPStore(name, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _answer(fd: int, body: Mapping[str, Any]) -> None:
    os.write(fd, json.dumps(body).encode())
    os.close(fd)


def _read(fd: int) -> dict[str, Any] | None:
    """The answer in a pipe; None when there is none yet, an empty one when the writer is gone without a word."""
    try:
        text = os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
    return dict(json.loads(text)) if text else {}


def _failure(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return f"the standby store did not listen within {READY_S:.0f} s"
    return str(answer.get("reason", "the standby store's process ended before it listened"))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
