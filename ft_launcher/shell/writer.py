"""The one thread that touches storage, so that a stalled Lustre costs log lines and never a lease.

The event loop hands over small jobs (callables that write) and goes on at once; nothing it calls here takes longer than a few list
operations, whatever the disk does. Jobs queue in *lanes* (journal, state, incidents, ...): a lane that fails waits and tries again by
itself, the others go on. What happens when a lane is full or failing is said per job: lines may be dropped (counted, said once), of a
state only the newest matters, a verdict is never dropped. Knows nothing of what is written, raises nothing; each kind of trouble is said
in one line, and that it is over in another.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

Job = Callable[[], object]

CAPACITY = 10_000
_BACKOFF_S = (0.1, 2.0)
_SAY_AGAIN_S = 600.0


class Keep(Enum):
    """What becomes of a job when its lane has no room: LINE may be dropped, of NEWEST only the last one submitted is written, ALWAYS is
    kept whatever it takes.
    """

    LINE = "line"
    NEWEST = "newest"
    ALWAYS = "always"


@dataclass(slots=True)
class _Lane:
    queue: deque[tuple[int, Keep, Job]] = field(default_factory=deque)
    lines: int = 0
    dropped: int = 0
    retry_at_s: float = 0.0
    backoff_s: float = _BACKOFF_S[0]
    failing_since_s: float | None = None


class Writer:
    """One daemon thread and its lanes. `say` receives lines for the user, from that thread; it may block, but not for ever."""

    def __init__(self, say: Callable[[str], None], capacity: int = CAPACITY) -> None:
        self._say_to = say
        self._capacity = capacity
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self._said_at_s: dict[tuple[str, str], float] = {}
        self._submitted = 0
        self._running: tuple[int, float] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ft-writer", daemon=True)

    def start(self) -> None:
        """Starts the thread; jobs submitted before wait for it."""
        self._thread.start()

    def submit(self, lane: str, job: Job, keep: Keep = Keep.LINE) -> bool:
        """Queues `job`; False where it was dropped at once (lane full, or writer closed). Never blocks, never raises; safe from any
        thread.
        """
        with self._changed:
            if self._stopping:
                return False
            queue = self._lanes.setdefault(lane, _Lane())
            if keep is Keep.LINE and queue.lines >= self._capacity:
                queue.dropped += 1
                return False
            if keep is Keep.NEWEST:
                queue.queue = deque(entry for entry in queue.queue if entry[1] is not Keep.NEWEST)
            self._submitted += 1
            queue.lines += keep is Keep.LINE
            queue.queue.append((self._submitted, keep, job))
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was submitted before is written; failing lanes are tried again at once. False after `timeout_s`."""
        with self._changed:
            target = self._submitted
            for lane in self._lanes.values():
                lane.retry_at_s = 0.0
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._oldest_pending() > target, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flushes, stops the thread and says what was lost; returns within `timeout_s` even where the disk hangs. False where something
        was not written.
        """
        deadline = time.monotonic() + timeout_s
        written = self.flush(timeout_s) if self._thread.is_alive() else self._oldest_pending() > self._submitted
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            lost = {name: len(lane.queue) + lane.dropped for name, lane in self._lanes.items() if lane.queue or lane.dropped}
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        stuck = self._thread.is_alive() and self._running is not None
        if lost or stuck:
            what = ", ".join(f"{count} of {name}" for name, count in lost.items()) or "the last write"
            self._say(f"not everything was written to disk: {what} lost")
        return written and not lost

    @property
    def stalled_s(self) -> float:
        """For how many seconds the job that is running now has not returned; 0.0 where none is. A large number is a disk that does not
        answer.
        """
        running = self._running
        return time.monotonic() - running[1] if running else 0.0

    def _oldest_pending(self) -> int:
        """Number of the oldest job not yet done; one more than all there are where none is."""
        heads = [lane.queue[0][0] for lane in self._lanes.values() if lane.queue]
        return min([*heads, self._running[0] if self._running else self._submitted + 1, self._submitted + 1])

    def _run(self) -> None:
        while True:
            taken = self._take()
            if taken is None:
                return
            name, entry = taken
            self._settle(name, entry, self._attempt(name, entry[2]))

    def _take(self) -> tuple[str, tuple[int, Keep, Job]] | None:
        """The oldest job of those lanes that may be tried now; waits for one; None when stopping."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                ready = [(lane.queue[0][0], name) for name, lane in self._lanes.items() if lane.queue and lane.retry_at_s <= now]
                if ready:
                    number, name = min(ready)
                    entry = self._lanes[name].queue.popleft()
                    self._running = (number, now)
                    return name, entry
                waits = [lane.retry_at_s - now for lane in self._lanes.values() if lane.queue]
                self._changed.wait(min(waits) if waits else None)
            return None

    def _attempt(self, name: str, job: Job) -> OSError | None:
        """Runs the job. A mistake of ours in it is said and the job given up; trouble with the disk is returned, to be tried again."""
        try:
            job()
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the loop's boundary: one bad job must not end all writing
            self._say_once(name, type(error).__name__, f"{name}: not written, {type(error).__name__}: {str(error)[:300]}")
        return None

    def _settle(self, name: str, entry: tuple[int, Keep, Job], error: OSError | None) -> None:
        over, dropped = None, 0
        with self._changed:
            lane = self._lanes[name]
            self._running = None
            if error is not None:
                self._put_back(lane, entry)
            else:
                lane.lines -= entry[1] is Keep.LINE
                over, dropped = lane.failing_since_s, lane.dropped
                lane.failing_since_s, lane.dropped, lane.backoff_s = None, 0, _BACKOFF_S[0]
            self._changed.notify_all()
        if error is not None:
            self._say_once(name, str(error.errno), f"{name}: cannot be written ({_reason(error)}); trying again, training goes on")
        elif over is not None:
            self._say_once(name, "over", f"{name}: written again after {time.monotonic() - over:.1f} s, {dropped} lines dropped")
        elif dropped:
            self._say_once(name, "dropped", f"{name}: the disk was too slow, {dropped} lines dropped")

    def _put_back(self, lane: _Lane, entry: tuple[int, Keep, Job]) -> None:
        """The failed job is the lane's next again, unless a newer state has replaced it."""
        now = time.monotonic()
        lane.failing_since_s = lane.failing_since_s or now
        lane.retry_at_s = now + lane.backoff_s
        lane.backoff_s = min(2 * lane.backoff_s, _BACKOFF_S[1])
        if entry[1] is not Keep.NEWEST or not any(other[1] is Keep.NEWEST for other in lane.queue):
            lane.queue.appendleft(entry)

    def _say_once(self, name: str, kind: str, line: str) -> None:
        """Says the line unless the same kind of trouble of this lane was said in the last ten minutes."""
        now = time.monotonic()
        if now - self._said_at_s.get((name, kind), -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said_at_s[name, kind] = now
            self._say(line)

    def _say(self, line: str) -> None:
        with contextlib.suppress(Exception):
            self._say_to(line)


def _reason(error: OSError) -> str:
    why = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {why}" if isinstance(error.filename, str | bytes) else why
