"""How a zygote comes to be: exec'd by the agent, it imports the preload list once and then serves (`zygote_loop`).

Ranks are copies of it, so everything that happens here happens as it would in `python script.py`: the script's folder is first on sys.path before anything is
imported, the launcher's own entries are gone from it, and nothing is computed. After each import the zygote asks whether it can still be forked. When it
cannot, when an import fails, or when the script's folder hides a module that the launcher has already loaded, it says why and execs itself again without
preloading: the same pid and the same conversation, but ranks are then started by exec (`spawn`). A clean process is worth its 50 ms: threads and CUDA
contexts end with the exec.

It must have no threads, no atexit functions, no finalizers and no temporary files: ranks would inherit them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import setproctitle

from ft_launcher.core.command import Command
from ft_launcher.shell import baseline, blas, forksafety, linux, main_module, process_events, rank_output, rank_start, strays
from ft_launcher.shell.baseline import Baseline
from ft_launcher.shell.rank_start import Surroundings
from ft_launcher.shell.sources import SourceGate, SourceStamps
from ft_launcher.shell.standby import Rack
from ft_launcher.shell.wire import Channel
from ft_launcher.shell.zygote_loop import Loop

_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_OWN_VARIABLES = {blas.VARIABLE: "1", _NVML: "1"}  # for the imports here; a rank has the user's values


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What the agent wants, read from a memory file so that a second exec can read it again."""

    command: Command
    preload: tuple[str, ...]
    start_method: str
    flags: tuple[str, ...]
    reap_s: float
    early_standby: bool

    @classmethod
    def read(cls, fd: int) -> Setup:
        """From the descriptor of the memory file, which stays open."""
        body = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        command = body["command"]
        return cls(
            command=Command(command["module"], command["script"], tuple(command["args"])),
            preload=tuple(body["preload"]),
            start_method=body["start_method"],
            flags=tuple(body["flags"]),
            reap_s=body["reap_s"],
            early_standby=body["early_standby"],
        )


@dataclasses.dataclass(slots=True)
class _Preloaded:
    modules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fds: frozenset[int] = frozenset()
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    stamps: SourceStamps = dataclasses.field(default_factory=SourceStamps)


_kept: list[object] = []


class CannotForkError(Exception):
    """Why this process cannot be the ranks' template, in one line."""


def main(path: Sequence[str], modules: Collection[str]) -> Callable[[], object]:
    """The process's life. Returns what is to be run on the empty stack: the user's code in a rank, nothing in the zygote itself.

    `path` and `modules` are sys.path and the loaded modules as a fresh interpreter has them, without the launcher's.
    """
    began = time.monotonic()
    parent, sock_fd, setup_fd = map(int, sys.argv[2:5])
    why = sys.argv[5] if len(sys.argv) > 5 else None
    if not linux.die_with_parent(signal.SIGTERM, parent):
        return _nothing
    strays.become_subreaper()
    for fd in (sock_fd, setup_fd):
        os.set_inheritable(fd, False)
    start = baseline.take()
    setup = Setup.read(setup_fd)
    setproctitle.setproctitle("ft-launch: zygote")
    rank_output.install()
    sys.path[:] = path
    channel = Channel(socket.socket(fileno=sock_fd))
    preloaded = _Preloaded()
    if setup.start_method == "fork" and why is None:
        try:
            preloaded = preload(setup, start.cwd, modules, channel)
        except CannotForkError as reason:
            _exec_again(start, (sock_fd, setup_fd), str(reason))
    os.close(setup_fd)
    method: process_events.StartMethod = "fork" if setup.start_method == "fork" and why is None else "spawn"
    ready = process_events.ZygoteReady(os.getpid(), method, preloaded.modules, time.monotonic() - began, why, preloaded.warnings)
    return _serve(setup, start, preloaded, (channel, ready))


def _serve(setup: Setup, start: Baseline, preloaded: _Preloaded, talk: tuple[Channel, process_events.ZygoteReady]) -> Callable[[], object]:
    channel, ready = talk
    fork = ready.method == "fork"
    rack = Rack(fork and "torch" in sys.modules, setup.flags, start.env)
    if setup.early_standby and (fork or importlib.util.find_spec("torch") is not None):
        rack.warm()
    env = baseline.merged(start.env, preloaded.env)
    around = Surroundings(
        command=setup.command,
        zygote_pid=os.getpid(),
        start=dataclasses.replace(
            start, env={name: value for name, value in env.items() if value is not None}, handlers=baseline.python_handlers()
        ),
        flags=setup.flags,
        imported_fds=preloaded.fds,
        blas_threads=blas.thread_setter() if fork else None,
    )
    loop = Loop(channel, rack, SourceGate(preloaded.stamps) if fork else None, setup.reap_s)
    loop.listen()
    if fork:
        main_module.compile_ahead(setup.command)
    gc.collect()
    gc.freeze()
    loop.send(ready)
    spec = loop.serve()
    if spec is None:
        os._exit(0)
    _kept.extend((loop, rack, preloaded, talk))  # taking them apart would touch, and so copy, a rank's share of many pages
    around = dataclasses.replace(around, abandon=loop.abandon)
    if not fork:
        rank_start.exec_rank(spec, around)
    rank_start.become_rank(spec, around)
    return functools.partial(main_module.run, setup.command)


def preload(setup: Setup, cwd: str, fresh_modules: Collection[str], channel: Channel) -> _Preloaded:
    """Imports the list with the script's folder first on sys.path, asking after each whether ranks can still be forked. Raises CannotForkError."""
    entry = main_module.path_entry(setup.command, cwd)
    hidden = hidden_module(entry, fresh_modules)
    if hidden is not None:
        raise CannotForkError(f"{entry} has a module {hidden!r} of its own, and the launcher has loaded another one of that name")
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)
    for name, value in _OWN_VARIABLES.items():
        os.environ[name] = value
    env, fds, handlers = dict(os.environ), baseline.open_fds(), baseline.python_handlers()
    found = _Preloaded()
    for name in setup.preload:
        channel.send(process_events.encode(process_events.Importing(name)))
        _import(name)
        found.stamps.remember()
        unsafe = forksafety.after_import()
        if unsafe is not None:
            raise CannotForkError(f"after importing {name!r}: {unsafe}")
    unsafe = forksafety.canary()
    if unsafe is not None:
        raise CannotForkError(f"after importing {', '.join(setup.preload)}: {unsafe}")
    found.modules = setup.preload
    found.fds = frozenset(baseline.open_fds() - fds)
    found.env = changes(env, os.environ)
    found.warnings = tuple(_handler_warnings(handlers))
    return found


def hidden_module(folder: str, fresh_modules: Collection[str]) -> str | None:
    """A module of the launcher's, or of the standard library on its behalf, that a fresh interpreter would have found in the script's `folder` instead."""
    for name in sorted({name.partition(".")[0] for name in sys.modules if name not in fresh_modules}):
        loaded = getattr(sys.modules.get(name), "__file__", None)
        for candidate in (os.path.join(folder, name, "__init__.py"), os.path.join(folder, f"{name}.py")):
            if loaded is not None and os.path.exists(candidate) and not os.path.samefile(candidate, loaded):  # noqa: PTH121
                return name
    return None


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What turns `before` into `after`, as overrides."""
    out: dict[str, str | None] = {name: value for name, value in after.items() if before.get(name) != value}
    out.update({name: None for name in before if name not in after})
    return out


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        lines = traceback.format_exception_only(type(error), error)
        frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
        where = f" ({frames[-1]})" if len(frames) > 1 else ""  # beyond our own: a module of that name in the script's folder, perhaps
        raise CannotForkError(f"preloading {name!r} failed: {lines[-1].strip()}{where}") from error


def _handler_warnings(before: Mapping[int, Any]) -> list[str]:
    changed = [number for number, handler in baseline.python_handlers().items() if before.get(number) is not handler]
    return [f"a preloaded module handles {signal.Signals(number).name}: every rank starts with that handler" for number in changed]


def _exec_again(start: Baseline, fds: tuple[int, int], why: str) -> NoReturn:
    sys.stderr.write(f"ft-launch: ranks cannot be forked from a preloaded process, each will start its own interpreter: {why}\n")
    sys.stderr.flush()
    strays.kill_all_below(os.getpid(), deadline_s=1.0)
    start.restore()
    for fd in baseline.open_fds() - {0, 1, 2, *fds}:
        os.close(fd)
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:], why.replace("\0", "?")], dict(start.env))


def _nothing() -> None:
    """The agent was gone before the zygote had begun."""
