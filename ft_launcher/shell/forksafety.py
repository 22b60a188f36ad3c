"""May ranks be forked from this process? One question, asked after every preloaded module so that the answer can name the import that spoiled it.

A fork copies one thread. Whatever other threads held stays held, a CUDA context does not survive, and a second process that the import started would belong
to nobody. torch's own mark ("bad fork") has holes and can only be read in a child, so it is one sign among five. Each probe returns None or half a sentence
that fits behind "after importing X: ". The probes look and never repair; what follows from an answer is the zygote's business. The two CUDA probes that need
a device say nothing where there is none.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from ft_launcher.shell import strays

CANARY_S = 120.0  # creating a CUDA context takes seconds on a big node
_PROBE_S = 10.0
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_SETTLE_S = 0.5  # a thread that has been joined stays in /proc for a moment


def after_import() -> str | None:
    """The first sign, if any, that this process can no longer be forked. Cheap enough to ask after each module: two listings and, with torch, one fork."""
    return stand_in() or threads() or child_processes() or uvm_open() or driver_initialised() or bad_fork_mark()


def threads(settle_s: float = _SETTLE_S) -> str | None:
    """More than one thread, given `settle_s` for threads that are ending."""
    end = time.monotonic() + settle_s
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > end:
            return f"{len(os.listdir('/proc/self/task'))} threads run ({', '.join(_thread_names())})"
        time.sleep(0.005)
    return None


def child_processes() -> str | None:
    """A process was started and is still there."""
    names = [f"{pid} {_comm(f'/proc/{pid}/comm')}" for pid in sorted(strays.children(os.getpid()))]
    return f"a child process runs ({', '.join(names)})" if names else None


def uvm_open(device: str = "/dev/nvidia-uvm") -> str | None:
    """CUDA's memory device is open: a context exists. (NVML alone opens /dev/nvidiactl and /dev/nvidiaN, which is harmless.)"""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(device):
            return f"{target} is open: CUDA is initialised"
    return None


def driver_initialised() -> str | None:
    """The driver library, where one is mapped already (a mere `import torch` does that), no longer says "not initialised"."""
    path = mapped_library(r"libcuda\.so")
    if path is None:
        return None
    try:
        code = ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # replaced on disk meanwhile, or no driver in spite of its name
        return None
    return None if code == _NOT_INITIALIZED else f"the CUDA driver is initialised (cuDeviceGetCount answers {code})"


def stand_in() -> str | None:
    """Something else calls itself torch: a file of that name beside the script, or an empty namespace. A fresh interpreter would import it, too, but nothing can be taken over from it."""
    torch = sys.modules.get("torch")
    if torch is None or hasattr(torch, "version"):
        return None
    return f"'torch' is {getattr(torch, '__file__', None) or 'a namespace without a file'}, which is not PyTorch; if that is not meant, rename it"


def bad_fork_mark() -> str | None:
    """torch itself would refuse CUDA in a forked child: asked in one, for here it always says no."""
    torch = sys.modules.get("torch")
    mark = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    if mark is None:
        return None
    return (
        None
        if in_child(lambda: not mark(), _PROBE_S)
        else "torch has asked the CUDA driver for devices, and refuses CUDA in a forked process"
    )


def canary() -> str | None:
    """Where torch has CUDA and a device node exists: a forked child initialises CUDA and computes. Seconds; once per preload list."""
    torch = sys.modules.get("torch")
    if torch is None or not os.path.exists("/dev/nvidia0") or torch.version.cuda is None:
        return None
    return None if in_child(_use_cuda, CANARY_S) else "a forked child could not initialise CUDA (its message is in the zygote's log)"


def _use_cuda() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.cuda.device_count() == 0 or torch.ones(2, device="cuda").sum().item() == 2)


def in_child(question: Callable[[], bool], limit_s: float) -> bool:
    """The answer of `question` in a forked child; False when it raises, dies or takes longer than `limit_s`."""
    pid = os.fork()
    if pid == 0:
        _answer(question)
    pidfd = os.pidfd_open(pid)
    try:
        ended = bool(select.select([pidfd], [], [], limit_s)[0])
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
    return ended and os.waitstatus_to_exitcode(status) == 0


def _answer(question: Callable[[], bool]) -> None:
    code = 1
    try:
        code = 0 if question() else 1
    except BaseException as error:  # noqa: BLE001  a probe's child may not run on as a second zygote
        sys.stderr.write(f"ft-launch: a probe of the zygote failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)


def mapped_library(pattern: str) -> str | None:
    """The path of a shared library mapped into this process whose file name matches `pattern` at its start."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and re.match(pattern, os.path.basename(path[0])):  # noqa: PTH119
                return path[0]
    return None


def _thread_names() -> list[str]:
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    others = (int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid())
    return [known.get(task) or _comm(f"/proc/self/task/{task}/comm") for task in others]


def _comm(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
