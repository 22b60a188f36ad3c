"""Finding and killing everything below a process: ranks, what they started, and what tried to leave (setsid, double fork).

Nothing can leave: agent and zygote are subreapers, so an orphan becomes a child of one of them, and every descendant hangs below a direct child. Hence the
two rules here. *Empty* means that the root has no child left (apart from the ones to spare), which one file of /proc tells without a race. *Killing* walks
the tree top down, names each process by pid and start time, and signals through a pidfd, so that a recycled number is never hit. A tree that grows while it
is walked is walked again. It knows /proc and signals; who is a rank, it does not know.

A root that is this very process also collects the dead that it adopted; in the zygote the main loop does that instead, for it must report the ranks among
them.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ft_launcher.shell.linux import become_subreaper

__all__ = ["Process", "Sweep", "Swept", "become_subreaper", "children", "descendants", "kill_all_below"]

_ROUND_S = 0.01  # between two walks: a kill takes effect within microseconds, unless the process sleeps in the kernel


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc names it: `start_ticks` (clock ticks since boot) tells it from a later one with the same pid; `dead`: a zombie."""

    pid: int
    ppid: int
    start_ticks: int
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """How many processes were killed, and the pids that did not die in time."""

    killed: int
    left: tuple[int, ...]


def read_process(pid: int) -> Process | None:
    """The process with this pid, or None when there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(after_name) < 20:
        return None
    dead = after_name[0] in b"ZX" and int(after_name[17]) <= 1  # its first thread may be dead and others alive
    return Process(pid, int(after_name[1]), int(after_name[19]), dead)


def children(pid: int) -> set[int]:
    """The pids of the direct children, zombies included, whichever thread forked them; empty when `pid` is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    found: set[int] = set()
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.update(map(int, file.read().split()))
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{task}"):  # a kernel without CONFIG_PROC_CHILDREN
                return _children_by_scan(pid)
        except OSError:
            continue  # the thread ended meanwhile: its children have moved to another one of the group, or up to us
    return found


def _children_by_scan(pid: int) -> set[int]:
    everyone = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid for process in everyone if process is not None and process.ppid == pid}


def descendants(root: int, spare: Collection[int] = ()) -> Iterator[Process]:
    """Everything below `root`, parents before their children, leaving out the pids in `spare` and all below them."""
    queue = [root]
    while queue:
        for pid in sorted(children(queue.pop(0)).difference(spare)):
            process = read_process(pid)
            if process is not None:
                yield process
                queue.append(pid)


class Sweep:
    """Kills all below `root`, one walk a `step`, until nothing is left."""

    def __init__(self, root: int, spare: Collection[int] = ()) -> None:
        self._root = root
        self._spare = frozenset(spare)
        self._killed: dict[tuple[int, int], int] = {}

    def spare(self, pids: Collection[int]) -> None:
        """From now on these are spared."""
        self._spare = frozenset(pids)

    def step(self) -> bool:
        """One walk. True when nothing was left before it: no child at all of this very process, or nothing alive below another one.

        The whole tree is listed before anything is killed: what is orphaned meanwhile can then not slip away from a root that is no subreaper.
        """
        if not children(self._root) - self._spare:
            return True
        found = list(descendants(self._root, self._spare))
        for process in found:
            if _kill(process):
                self._killed[process.pid, process.start_ticks] = process.pid
        return self._root != os.getpid() and all(process.dead for process in found)

    @property
    def killed(self) -> tuple[int, ...]:
        """The pids that were killed, each process once however often it had to be met (orphaned on the way, it changes its parent, not its identity)."""
        return tuple(self._killed.values())

    def left(self) -> tuple[int, ...]:
        """The pids that still live below the root."""
        return tuple(process.pid for process in descendants(self._root, self._spare) if not process.dead)


def kill_all_below(pid: int, spare: Collection[int] = (), deadline_s: float = 5.0) -> Swept:
    """Kills everything below `pid` except `spare` (and what hangs below those), for at most `deadline_s`; blocks.

    When `pid` is this process, the dead are collected too, none but the ones found here: nobody else's waitpid loses a status.
    """
    sweep = Sweep(pid, spare)
    end = time.monotonic() + deadline_s
    while not sweep.step():
        if pid == os.getpid():
            _collect(children(pid).difference(spare))
        if time.monotonic() > end:
            return Swept(len(sweep.killed), sweep.left())
        select.select([], [], [], _ROUND_S)
    return Swept(len(sweep.killed), ())


def _kill(process: Process) -> bool:
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)  # a zombie too: its other threads may be alive
    except OSError:  # dead already, or not ours to kill (a set-user-ID program): then it shows in what is left
        return False
    finally:
        os.close(fd)
    return not now.dead


def _collect(pids: Collection[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
