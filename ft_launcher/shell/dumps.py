"""Gathers what stuck ranks of this node can tell before they are killed: Python stacks, the kernel's view, torch's flight recorder.

Ranks have faulthandler on a reserved signal, writing to `<run>/cycle_0000/rank_00003.stacks`; that works while a rank is blocked in C and needs no ptrace. Everything that touches
/proc or storage happens on a thread of its own that nobody waits for: a gathering is over after `GATHER_S` at the latest, and a kill that comes earlier ends it at once. What it
finds goes two ways: a letter and a few words per rank to the agent (`Seen`, for the node's report), and the text into the rank's file, from where an incident takes it.

It signals only whom it is told to; who that is (ranks that have the handler and stand still) is the agent's to know.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from monitors.attribution_places import place_of
from monitors.hooks import STACKS_SIGNAL
from monitors.stacks import SEPARATOR, parse

GATHER_S = 0.5
POLL_S = 0.01
QUIET_POLLS = 3
"""A file that grew and then stayed the same for so many polls holds the whole dump."""
TEXT_BYTES = 256 * 1024
FILE_BYTES = 4 * 1024 * 1024
"""A rank that is suspected again and again: its file starts anew beyond this."""
FLIGHT_BYTES = 32 * 1024 * 1024
_HARD = frozenset("TtZXC")


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to look at. `signals`: it has the handler and may be signalled; `env`: its variables, for the flight recorder."""

    rank: int
    pid: int
    stacks: Path
    signals: bool
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found of a rank: the kernel's letter for its process (`C`: dumping core), and where its stack stands ("" unknown)."""

    state: str
    place: str = ""


Deliver = Callable[[Mapping[int, Seen]], None]


class Dumps:
    """One node's gatherings, one at a time. `signal` sends the reserved signal to these ranks' own processes; called in the event loop."""

    def __init__(self, signal: Callable[[Sequence[int]], None]) -> None:
        self._signal = signal
        self._current: _Gathering | None = None

    def gather(self, targets: Sequence[Target], deliver: Deliver) -> bool:
        """Begin, unless one is under way (False). `deliver` is called in the event loop: first with states, then with places too."""
        if not targets or (self._current is not None and self._current.alive):
            return False
        self._current = _Gathering(asyncio.get_running_loop(), targets, self._signal, deliver)
        self._current.start()
        return True

    def stop(self) -> None:
        """Whatever is not found by now is not wanted any more: the ranks are about to be killed."""
        if self._current is not None:
            self._current.stop()


class _Gathering:
    """One look at some ranks, on a thread of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, targets: Sequence[Target], signal: Callable[[Sequence[int]], None], deliver: Deliver
    ) -> None:
        self._loop = loop
        self._targets = targets
        self._signal = signal
        self._deliver = deliver
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-dumps", daemon=True)

    @property
    def alive(self) -> bool:
        """It still looks. One that storage holds up counts as alive: no second thread gets stuck behind it."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Deliver nothing from now on."""
        self._stopped.set()

    def _run(self) -> None:
        deadline = time.monotonic() + GATHER_S
        first = {t.rank: process_state(t.pid) for t in self._targets}
        self._tell({rank: Seen(state if state in _HARD else "") for rank, state in first.items()})
        began = time.time()
        asked = [t for t in self._targets if t.signals and first[t.rank] not in _HARD and catches(t.pid, STACKS_SIGNAL)]
        before = {t.rank: _prepared(t.stacks) for t in self._targets}
        _ask_flight_recorders(asked)
        self._in_loop(self._signal, [t.rank for t in asked])
        self._await_dumps(asked, before, deadline)
        if self._stopped.is_set():
            return
        kernel = {t.rank: kernel_view(t.pid) for t in self._targets}
        last = {t.rank: process_state(t.pid) for t in self._targets}
        texts = {t.rank: read_from(t.stacks, before[t.rank]) for t in self._targets}
        self._tell({r: Seen(_lasting(first[r], last[r]), _place(texts[r])) for r in texts})
        for target in self._targets:
            _append(target.stacks, kernel[target.rank] + _flight_dump(target, began))

    def _await_dumps(self, asked: Sequence[Target], before: Mapping[int, int], deadline: float) -> None:
        sizes: dict[int, int] = {}
        quiet: dict[int, int] = dict.fromkeys((t.rank for t in asked), 0)
        while not self._stopped.wait(POLL_S) and time.monotonic() < deadline:
            for target in asked:
                size = size_of(target.stacks)
                grown = size > before[target.rank]
                quiet[target.rank] = quiet[target.rank] + 1 if grown and size == sizes.get(target.rank) else 0
                sizes[target.rank] = size
            if all(count >= QUIET_POLLS for count in quiet.values()):
                return

    def _tell(self, seen: Mapping[int, Seen]) -> None:
        self._in_loop(self._deliver, seen)

    def _in_loop(self, call: Callable[..., None], value: object) -> None:
        def unless_stopped() -> None:
            if not self._stopped.is_set():
                call(value)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(unless_stopped)


def _lasting(first: str, last: str) -> str:
    """A state is told when it lasts: everybody is in uninterruptible sleep for a moment."""
    return last if last == first or last in _HARD else ""


def _place(text: str) -> str:
    try:
        place = place_of(parse(text), lambda file, line: linecache.getline(file, line) if line else "")
    except (OSError, ValueError, RecursionError, MemoryError):
        return ""
    return str(place) if place is not None else ""


# -- the kernel's view ---------------------------------------------------------------------------------------------------------------------------------


def process_state(pid: int) -> str:
    """The kernel's letter for a process; `C` while it dumps core, `X` when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
        with open(f"/proc/{pid}/status", "rb") as file:
            return "C" if b"CoreDumping:\t1" in file.read() else letter
    except (OSError, IndexError):
        return "X"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal now. A rank that has replaced its program since it said so would be killed by it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")]
    except (OSError, ValueError, IndexError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


def kernel_view(pid: int, most_threads: int = 64) -> str:
    """State and wait channel of the process and of each of its threads, one a line, as the launcher's own lines in a file of stacks."""
    folder = f"/proc/{pid}"
    lines = [f"{SEPARATOR}process {pid}: state {process_state(pid)}, waits in {_proc(folder + '/wchan') or '?'}"]
    with suppress(OSError):
        tasks = sorted(os.listdir(f"{folder}/task"), key=int)
        lines += [f"{SEPARATOR}  {_task(f'{folder}/task/{tid}', tid)}" for tid in tasks[:most_threads]]
        lines += [f"{SEPARATOR}  and {len(tasks) - most_threads} more threads"] if len(tasks) > most_threads else []
    return "\n".join(lines) + "\n"


def _task(folder: str, tid: str) -> str:
    state = _proc(folder + "/stat").rpartition(")")[2].split()[:1]
    return f"thread {tid} {_proc(folder + '/comm').strip()!r}: state {''.join(state) or '?'}, waits in {_proc(folder + '/wchan') or '?'}"


def _proc(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


# -- torch's flight recorder ------------------------------------------------------------------------------------------------------------------------------


def _ask_flight_recorders(targets: Sequence[Target]) -> None:
    """ProcessGroupNCCL dumps when something is written into its pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE, torch's ProcessGroupNCCL.cpp); absent elsewhere."""
    for target in targets:
        stem = target.env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
        if not stem:
            continue
        with suppress(OSError):
            fd = os.open(f"{stem}{target.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with suppress(OSError):
                os.write(fd, b"1\n")
            os.close(fd)


def _flight_files(target: Target) -> Iterator[Path]:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if stem := target.env.get(name):
            yield Path(f"{stem}{target.rank}")
    yield Path(f"/tmp/nccl_trace_rank_{target.rank}")


def _flight_dump(target: Target, since: float) -> str:
    """Copy the rank's flight recorder dump beside its stacks when it was written since then; the line that says so. It is a pickle: never opened here."""
    if not any(
        target.env.get(n) not in (None, "", "0")
        for n in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    ):
        return ""
    for path in _flight_files(target):
        with suppress(OSError):
            found = path.stat()
            if found.st_mtime >= since - 1.0 and found.st_uid == os.getuid() and found.st_size <= FLIGHT_BYTES:
                copy = target.stacks.with_suffix(".flight")
                shutil.copyfile(path, copy)
                return f"{SEPARATOR}flight recorder: {copy.name}, {found.st_size} bytes\n"
    return f"{SEPARATOR}flight recorder: on, but it wrote nothing\n"


# -- the file -----------------------------------------------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    """Its size in bytes, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _prepared(path: Path) -> int:
    """Where the next dump will begin. The rank appends, so its file may be cut while it is open."""
    size = size_of(path)
    if size <= FILE_BYTES:
        return size
    with suppress(OSError):
        os.truncate(path, 0)
    return size_of(path)


def read_from(path: Path, offset: int) -> str:
    """At most `TEXT_BYTES` of the file from `offset` on, empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _append(path: Path, text: str) -> None:
    with suppress(OSError), path.open("ab") as file:
        file.write(text.encode(errors="replace"))
