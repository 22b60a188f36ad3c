"""The floor: what a restart costs when nothing at all is in the way. No launcher: a process that has torch imported, forks ranks and waits.

    bare.py WORLD PRELOAD SCRIPT [ARGS]

When one rank dies it kills the others, collects them, opens a listening socket, forks a process that turns it into a TCPStore, and forks the ranks
again, which run SCRIPT at once. No logs, no sessions, no policy, no clean-up of what ranks started, no decision: the least that any restart must do.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve_store(listener: socket.socket, port: int) -> None:
    """Be the TCPStore of one attempt."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store:
        signal.pause()


def run_script(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Be one rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is up already: rank 0 does not open one
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), {"__name__": "__main__", "__file__": argv[0]})


def fork(job: Callable[..., None], *args: Any) -> int:
    """A child that does `job`; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            job(*args)
        finally:
            os._exit(1)
    return pid


def start(world: int, argv: list[str]) -> list[int]:
    """The store's process and the ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pids = [fork(serve_store, listener, port), *(fork(run_script, rank, world, port, argv) for rank in range(world))]
    listener.close()
    return pids


def main() -> None:
    """Start, wait for a death, and again."""
    world, preload, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    for name in preload.split(","):
        importlib.import_module(name)
    gc.freeze()
    while True:
        pids = start(world, argv)
        dead, _ = os.wait()
        pids.remove(dead)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


main()
