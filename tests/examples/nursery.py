"""A process that has imported torch and megatron.core once and forks ranks from then on: a start costs milliseconds, not seven seconds.

Run as `python nursery.py MODULE...`. One JSON request a line on stdin:
- `{"argv": [script, ...], "env": {...}, "world": 4, "logs": dir}` forks the ranks and a TCPStore to meet at; answered by `{"pids": [...]}`
  on stdout, and later by one `{"pid": p, "status": s}` for each rank that ends;
- `{"signal": n, "to": [pid, ...]}` signals those of them that it has not reaped yet: no other process can be hit.

Everything below it dies with it. It stands for the launcher's zygote without being it, so that a failing test blames the example.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)


def run_script(argv: list[str]) -> None:
    """What `python script.py ...` does, in this process."""
    path = str(Path(argv[0]).resolve())
    sys.argv, sys.path[0] = list(argv), os.path.dirname(path)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with open(path, "rb") as source:
        code = compile(source.read(), path, "exec")
    exec(code, main.__dict__)


def child(argv: list[str], env: dict[str, str], log: str) -> None:
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0), os.dup2(out, 1), os.dup2(out, 2)
    os.closerange(3, 64)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    run_script(argv)


def fork(work: Any, *args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(*args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:  # noqa: BLE001  the boundary of the rank
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    return 0


def serve_store(answer: int, world: int) -> None:
    die_with_parent()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
    os.write(answer, f"{store.port}\n".encode())
    while True:
        signal.pause()


def start(request: dict[str, Any], stores: list[int]) -> list[int]:
    for pid in stores:
        os.kill(pid, signal.SIGKILL)
    reader, writer = os.pipe()
    stores[:] = [fork(serve_store, writer, request["world"])]
    os.close(writer)
    with os.fdopen(reader) as answer:
        port = int(answer.readline())
    world = str(request["world"])
    pids = []
    for rank in range(request["world"]):
        env = dict(request["env"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        pids.append(fork(child, request["argv"], env, os.path.join(request["logs"], f"rank_{rank}.log")))
    return pids


def say(answer: dict[str, Any]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


def reap(stores: list[int], alive: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        alive.discard(pid)
        if pid not in stores:
            say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def requests(stores: list[int], alive: set[int]) -> Iterator[dict[str, Any]]:
    """Requests as they come; reaps in between. Ends with the parent's end of the pipe."""
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_reader], [], [])
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            reap(stores, alive)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from map(json.loads, lines)


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    stores: list[int] = []
    alive: set[int] = set()
    say({"threads": len(os.listdir("/proc/self/task"))})
    for request in requests(stores, alive):
        if "signal" in request:
            for pid in alive.intersection(request["to"]):
                os.kill(pid, request["signal"])
        else:
            pids = start(request, stores)
            alive.update(pids)
            say({"pids": pids})


if __name__ == "__main__":
    main()
