"""What a training script uses to say where it is.

    from monitors.client import attach

    mon = attach()                                   # outside ft-launch: the same object, doing nothing
    with mon.section("setup"): ...
    for i in range(start, stop):
        with mon.section("step", iteration=i): ...
        with mon.section("checkpointing"):
            save()
            if mon.commit_allowed(): commit()

An open and a close are a handful of stores into shared memory: no socket, no lock, no system call, so they cost about a microsecond and can neither block nor fail
training. Whatever a script does wrong (an end without a start, too many sections, a name that is no text, several threads at once) is tolerated and counted in the
page, where the agent sees it. Every store is to a resource that only its taker holds (a slot taken from a list, an index from an iterator, each one indivisible in
CPython), so threads and signal handlers that come in the middle find nothing half done.

*Progress* is the end of a `step`, or a higher iteration than any before. With CUDA in use it counts when the device has done the work (`monitors.device_progress`).

In a process other than the rank's own there is no page and the client writes to private memory; a forked child falls silent by itself.

Must never: import torch or anything slow, synchronize a device, wait, raise.
"""

from __future__ import annotations

import sys
import time
from _thread import get_ident  # threading itself would cost more than this whole module
from os import register_at_fork

from monitors import layout
from monitors.hooks import STACKS_SIGNAL, install_hooks
from monitors.rank_page import RankPage, cut_utf8, own_page, scratch_words

TYPE_CHECKING = False  # importing typing would cost more than this whole module
if TYPE_CHECKING:
    from collections.abc import Callable

    from monitors.device_progress import DeviceProgress

__all__ = ["STACKS_SIGNAL", "Monitor", "Section", "attach", "install_hooks"]

_now = time.monotonic_ns
_clock = time.clock_gettime_ns
_BOOT = time.CLOCK_BOOTTIME
_UNPAIRED, _RESTARTED, _MANY_OPEN, _MANY_NAMES, _BAD_NAME, _LONG_NAME, _BAD_ITERATION, _INTERNAL = range(
    layout.MISUSE, layout.MISUSE + len(layout.MISUSES)
)
_ITERATION, _STEPS, _PROGRESS, _BEGAN = layout.ITERATION, layout.STEPS, layout.PROGRESS_NS, layout.PROGRESS_BEGAN_NS
_RING = layout.RING


class _Kind:
    """One interned section: where its words are, and which starts of it each thread has not ended."""

    __slots__ = ("by_thread", "counter", "index", "is_step", "ring", "stats")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.stats = layout.STATS + index * layout.STATS_WORDS
        self.ring = layout.RINGS + index * layout.RING_WORDS
        self.counter = iter(range(sys.maxsize))
        self.is_step = name == "step"
        self.by_thread: dict[int, Section] = {}


class Section:
    """One use of `with mon.section(...)`: open between `__enter__` and `__exit__`. One that ends with an exception is no occurrence and no progress."""

    __slots__ = ("_began_ns", "_iteration", "_kind", "_monitor", "_name", "_since_ns")
    _kind: _Kind
    _began_ns: int
    _since_ns: int

    def __init__(self, monitor: Monitor, name: str, iteration: int | None) -> None:
        self._monitor = monitor
        self._name = name
        self._iteration = iteration

    def __enter__(self) -> Section:
        self._monitor._open(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._monitor._close(self, kind is None)


class Monitor:
    """The rank's side of its section page; `attach()` makes it. `attached` tells whether there is a page to write to."""

    __slots__ = ("_cycle", "_device", "_free", "_highest", "_indexes", "_kinds", "_live", "_mark_ns", "_page", "_w", "attached")

    def __init__(self, page: RankPage | None) -> None:
        self._page = page
        self._w = scratch_words() if page is None else page.words
        self._highest = self._w[_ITERATION] if page else -1
        self.attached = page is not None
        self._cycle = self._w[layout.CYCLE]
        self._free = [layout.OPEN + i * layout.OPEN_WORDS for i in reversed(range(layout.OPEN_SLOTS))]
        self._indexes = iter(range(layout.SECTIONS))
        self._kinds: dict[str, _Kind] = {}
        self._live: dict[Section, int] = {}
        self._device: DeviceProgress | None = None
        self._mark_ns = _clock(_BOOT)

    def __reduce__(self) -> tuple[Callable[[], Monitor], tuple[()]]:
        """Copied or sent to another process (in a data set, say) it is that process's own Monitor."""
        return attach, ()

    def section(self, name: str, iteration: int | None = None) -> Section:
        """A context manager that keeps section `name` open; `iteration` is the absolute number of the training iteration, where it has one."""
        return Section(self, name, iteration)

    def start_section(self, name: str, iteration: int | None = None) -> None:
        """Opens section `name` for this thread. Opening what this thread has open already starts its clock again (the earlier start was never ended)."""
        try:
            self._start(name, iteration)
        except Exception:  # noqa: BLE001  monitoring never fails training
            self._w[_INTERNAL] += 1

    def end_section(self, name: str) -> None:
        """Ends what `start_section(name)` opened in this thread, else in another one."""
        try:
            kind = self._kinds.get(name)
            section = None if kind is None else kind.by_thread.pop(get_ident(), None)
            if section is None and kind is not None and kind.by_thread:
                section = kind.by_thread.popitem()[1]
        except Exception:  # noqa: BLE001  unhashable name, or emptied by another thread meanwhile
            section = None
        if section is None:
            self._w[_UNPAIRED] += 1
        else:
            self._close(section, True)

    def end_all_sections(self) -> None:
        """Ends every open section of this process, however and by whichever thread it was opened."""
        for section in list(self._live):
            self._close(section, True)
        for kind in list(self._kinds.values()):
            kind.by_thread.clear()

    def set_iteration(self, iteration: int) -> None:
        """Says that training has reached absolute iteration `iteration`; progress when it is higher than any before."""
        try:
            self._reach(self._number(iteration))
        except Exception:  # noqa: BLE001
            self._w[_INTERNAL] += 1

    def commit_allowed(self) -> bool:
        """False once this rank's cycle is superseded or revoked, or its lease deadline has passed with no progress that began after it. True outside ft-launch.

        An early hint, cheap enough to ask before each commit; what makes an old owner's commit harmless is the storage's own fence (`monitors.fence`).
        """
        if self._page is None:
            return True
        words = self._page.shared
        if words[layout.REVOKED] or words[layout.CYCLE] != self._cycle:
            return False
        lease_ns = words[layout.LEASE_NS]
        return lease_ns == 0 or _clock(_BOOT) <= lease_ns or words[_BEGAN] > lease_ns

    def report_rerun(self, status: int, iteration: int, text: str) -> None:
        """Leaves the rerun state machine's report in the page (see `RankPage.report_rerun`)."""
        if self._page is not None:
            self._page.report_rerun(status, iteration, text)

    # -- below: the hot path ------------------------------------------------------------------------------------------------------------------------------

    def _start(self, name: str, iteration: int | None) -> None:
        kind = self._kinds.get(name) if type(name) is str else None
        if kind is not None:
            earlier = kind.by_thread.pop(get_ident(), None)
            if earlier is not None and earlier in self._live:
                self._w[_RESTARTED] += 1
                self._close(earlier, False)
        section = Section(self, name, iteration)
        if self._open(section):
            by_thread = section._kind.by_thread
            left = by_thread.setdefault(get_ident(), section)
            if left is not section:  # a signal handler came in between and left the same section open
                by_thread[get_ident()] = section
                self._close(left, False)

    def _open(self, section: Section) -> bool:
        try:
            kind = self._kinds.get(section._name) or self._intern(section._name)
            if kind is None:
                return False
            if section in self._live:
                self._w[_RESTARTED] += 1
                return False
            slot = self._free.pop()
        except IndexError:
            self._w[_MANY_OPEN] += 1
            return False
        except Exception:  # noqa: BLE001  a name that cannot even be looked up
            self._w[_BAD_NAME] += 1
            return False
        given = section._iteration
        iteration = -1 if given is None else given if type(given) is int and -1 <= given < 1 << 63 else self._number(given)
        section._kind = kind
        w = self._w
        section._since_ns = w[slot + 1] = now_ns = _now()
        if kind.is_step:
            if iteration > self._highest and self._device is None:  # as _reach does, without its calls
                self._highest = w[_ITERATION] = iteration
                w[_BEGAN] = self._mark_ns
                w[_PROGRESS] = now_ns
            section._began_ns = self._mark_ns = _clock(_BOOT)
        elif iteration > self._highest:
            self._reach(iteration)
        w[slot + 2] = iteration
        w[slot] = kind.index + 1
        self._live[section] = slot
        return True

    def _close(self, section: Section, completed: bool) -> None:
        slot = self._live.pop(section, None)
        if slot is None:  # never opened, or ended by end_all_sections
            return
        now_ns = _now()
        w = self._w
        iteration = w[slot + 2]
        w[slot] = 0
        self._free.append(slot)
        kind = section._kind
        stats = kind.stats
        w[stats + 3] = now_ns
        if not completed:
            return
        took_ns = now_ns - section._since_ns
        index = next(kind.counter)
        ring = kind.ring + index % _RING * 2
        w[ring] = 0
        w[ring + 1] = took_ns
        w[ring] = index + 1
        w[stats + 1] = took_ns
        if took_ns > w[stats + 2]:  # noqa: PLR1730  max() costs three times as much
            w[stats + 2] = took_ns
        w[stats] = index + 1
        if kind.is_step:
            self._advance(iteration, True, section._began_ns)
        elif self._device is not None:
            self._device.poll()

    # -- below: rare, or once a step ----------------------------------------------------------------------------------------------------------------------

    def _intern(self, name: str) -> _Kind | None:
        if not isinstance(name, str) or not name:
            self._w[_BAD_NAME] += 1
            return None
        data = cut_utf8(name, layout.NAME_BYTES)
        text = data.decode()
        self._w[_LONG_NAME] += text != name
        kind = self._kinds.get(text)
        if kind is None:
            index = next(self._indexes, None)
            if index is None:
                self._w[_MANY_NAMES] += 1
                return None
            self._write_name(index, data)
            kind = self._kinds.setdefault(text, _Kind(index, text))
        if len(self._kinds) < 4 * layout.SECTIONS:  # the spelling that was cut, so that it is cut once
            self._kinds[str(name)] = kind
        return kind

    def _write_name(self, index: int, data: bytes) -> None:
        at = layout.NAMES + index * layout.NAME_WORDS
        whole = (bytes([len(data)]) + data).ljust(layout.NAME_WORDS * 8, b"\0")
        for i in reversed(range(layout.NAME_WORDS)):  # the length is in the first word: written last
            self._w[at + i] = int.from_bytes(whole[i * 8 : i * 8 + 8], "little", signed=True)

    def _number(self, iteration: object) -> int:
        """`iteration` as a word, -1 when it is none. Tensors are refused: reading one may synchronize the device."""
        exact = isinstance(iteration, int) or type(iteration).__module__ == "numpy"
        try:
            number = iteration.__index__() if exact else -2  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001
            number = -2
        if -1 <= number < 1 << 63:
            return int(number)
        self._w[_BAD_ITERATION] += 1
        return -1

    def _reach(self, iteration: int) -> None:
        if iteration > self._highest:
            began_ns, self._mark_ns = self._mark_ns, _clock(_BOOT)
            self._advance(iteration, False, began_ns)

    def _advance(self, iteration: int, step: bool, began_ns: int) -> None:
        if self._device is None and "torch" in sys.modules and self.attached:
            self._device = _find_device(self._publish)
        if self._device is None or not self._device.mark(iteration, step, began_ns):
            self._publish(iteration, step, began_ns)

    def _publish(self, iteration: int, step: bool, began_ns: int) -> None:
        w = self._w
        if step:
            w[_STEPS] += 1
        if iteration > self._highest:
            self._highest = w[_ITERATION] = iteration
        elif not step:
            return
        w[_BEGAN] = began_ns
        w[_PROGRESS] = _now()

    def _silence(self) -> None:
        self._w = scratch_words()
        self._device = None
        self.attached = False


def _find_device(publish: Callable[[int, bool, int], None]) -> DeviceProgress | None:
    """How to ask the device for progress, once torch has initialised CUDA in this process; torch is never imported for it."""
    try:
        if not sys.modules["torch"].cuda.is_initialized():
            return None
        from monitors.device_progress import cuda_progress

        return cuda_progress(publish)
    except Exception:  # noqa: BLE001  half-imported or strange torch: as without a device
        return None


_attached: dict[str, Monitor] = {}  # one entry; a dict because setdefault is indivisible, and threads may attach at once


def attach() -> Monitor:
    """This process's Monitor, the same one at each call. The first call in a rank announces it to the agent and installs the hooks. Never raises."""
    monitor = _attached.get("monitor")
    if monitor is None:
        page = own_page()
        monitor = _attached.setdefault("monitor", Monitor(page))
        if page is not None:
            install_hooks()
            page.words[layout.ATTACHED] = 1
    return monitor


def _after_fork() -> None:
    for monitor in _attached.values():
        monitor._silence()
    _attached.clear()


register_at_fork(after_in_child=_after_fork)
