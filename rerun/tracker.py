"""Megatron's file of rejected results (`--result-rejected-tracker-filename`), written and read.

All ranks of a job append to one file, one line an event:

    ts=2026-11-30 10:00:00.123456 node=n1 device=0 jobID=77 rank=3 iteration=41 status=RerunValidationStatus.INITIAL_RUN result=nan message='loss is NaN'

Reading is tolerant, because the file is other people's: torn by kills, written to by several nodes at once, with statuses in two spellings (Python 3.11 prints the
class before the member, 3.10 did not) and results that are printed over several lines. What cannot be understood is no entry, never an error. An iteration is what
its writer counted: Megatron's second-rerun lines carry one less than the first-rerun lines of the same step, so match by rank and order.

It knows the format and RerunStatus. It must never import torch (the agent reads it), and never decide anything.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ft_launcher.core.rerun_report import RerunFinding, RerunStatus

FLAG = "--result-rejected-tracker-filename"
MAX_READ_BYTES = 8 << 20
"""At most so much of the file's end is read: some 40,000 events; a file that has grown further since is noise."""

MAX_EVENT_CHARACTERS = 100_000
"""A longer event is no event."""

_BEGINNING = re.compile(r"(?=ts=\d{4}-\d\d-\d\d )")
_LINE = re.compile(
    r"ts=(?P<ts>.{1,40}?) node=(?P<node>\S+) device=(?P<device>.{1,80}?) jobID=(?P<job>\S*) rank=(?P<rank>\d{1,9}) iteration=(?P<iteration>-?\d{1,18}) "
    r"status=(?:\w+\.)*(?P<status>\w+) result=(?P<result>.*) message='(?P<message>.*)'[ \t]*(?:\r?\n|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class TrackerEntry:
    """One event. `result` and `message` as they were printed, on one line; `ts` and `job` as text, for they are for people."""

    rank: int
    iteration: int
    status: RerunStatus
    node: str
    device: str
    message: str
    result: str = ""
    ts: str = ""
    job: str = "N/A"

    @property
    def finding(self) -> RerunFinding:
        """The same as the launcher's policy takes it."""
        return RerunFinding(self.rank, self.status, self.iteration, self.text)

    @property
    def text(self) -> str:
        """What happened where, on one line."""
        return f"node={self.node} device={self.device} result={self.result} message='{self.message}'"

    @property
    def line(self) -> str:
        """The line as Megatron writes it, with its end. Line breaks inside become blanks: Megatron's own reader goes line by line."""
        words = f"ts={self.ts} node={self.node} device={self.device} jobID={self.job} rank={self.rank} iteration={self.iteration} "
        words += f"status=RerunValidationStatus.{self.status.name} result={self.result} message='{self.message}'"
        return _one_line(words) + "\n"


def parse(text: str) -> list[TrackerEntry]:
    """The entries of a piece of the file, in order. Pure. A line that a kill has cut short is left out, the one written behind it is not."""
    found = (_entry(piece) for piece in _BEGINNING.split(text))
    return [entry for entry in found if entry is not None]


def read(path: str, from_offset: int = 0) -> list[TrackerEntry]:
    """The entries from byte `from_offset` on (see `size`), in order; of a file that is shorter by now (replaced), all of them. Never raises, never waits for a writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return []
    try:
        return parse(_content(fd, from_offset).decode(errors="replace"))
    except OSError:
        return []
    finally:
        os.close(fd)


def size(path: str) -> int:
    """The file's size in bytes: what to remember before a cycle, so that `read` finds only that cycle's events. 0 where there is no file."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except (OSError, ValueError):
        return 0


def append(path: str, entry: TrackerEntry) -> None:
    """Adds one line by one write, so that ranks on one machine never mix theirs. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, entry.line.encode(errors="replace"))
    finally:
        os.close(fd)


def now() -> str:
    """The time as Megatron writes it."""
    return str(datetime.now())


def tracker_path(script_args: Sequence[str]) -> str | None:
    """The file that a script's own arguments name: as argparse reads them, so the last one counts, and nothing behind `--` does."""
    found = None
    for at, arg in enumerate(script_args):
        if arg == "--":
            break
        flag, equals, text = arg.partition("=")
        if flag == FLAG:
            found = (text if equals else "".join(script_args[at + 1 : at + 2])) or None
    return found


def iterations_to_skip(entries: Iterable[TrackerEntry]) -> list[int]:
    """Iterations that keep failing on one rank alone: rejected there twice or more by results that came out the same (or with reruns disabled), and by no second rank
    of the same job. Megatron's rule (`get_skipped_iterations_from_tracker_file`)."""
    seen: set[tuple[int, int]] = set()
    twice: set[int] = set()
    ranks: dict[tuple[str, int], set[int]] = {}
    for entry in (e for e in entries if e.status in _LASTING):
        if (entry.rank, entry.iteration) in seen:
            twice.add(entry.iteration)
        seen.add((entry.rank, entry.iteration))
        ranks.setdefault((entry.job, entry.iteration), set()).add(entry.rank)
    return sorted(twice - {iteration for (_, iteration), found in ranks.items() if len(found) > 1})


_LASTING = (RerunStatus.RERUN_DISABLED, RerunStatus.FIRST_RERUN_REPRODUCIBLE, RerunStatus.SECOND_RERUN_REPRODUCIBLE)


def _entry(piece: str) -> TrackerEntry | None:
    match = _LINE.match(piece[:MAX_EVENT_CHARACTERS])
    if match is None or match["status"].upper() not in RerunStatus.__members__:
        return None
    words = {name: _one_line(match[name]) for name in ("node", "device", "message", "result", "ts", "job")}
    return TrackerEntry(int(match["rank"]), int(match["iteration"]), RerunStatus[match["status"].upper()], **words)


def _content(fd: int, from_offset: int) -> bytes:
    """From the offset to the end, but no more than `MAX_READ_BYTES`; nothing of what is no regular file."""
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        return b""
    start = from_offset if 0 <= from_offset <= about.st_size else 0
    start = max(start, about.st_size - MAX_READ_BYTES)
    return os.pread(fd, about.st_size - start, start)


def _one_line(text: str) -> str:
    return " ".join(text.split())
