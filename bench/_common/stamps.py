"""What the ranks of a contestant wrote: one line `kind pid nanoseconds` for each moment worth knowing (CLOCK_MONOTONIC, one clock for the whole
machine).

line    the script's first statement, before any import of weight
torch   torch is imported
group   init_process_group has returned
step    a training step is complete
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENV = "BENCH_STAMPS"


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of one rank."""

    kind: str
    pid: int
    at_ns: int


class Stamps:
    """The stamp files of the `world` ranks of one job, in `folder`."""

    def __init__(self, folder: Path, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.world = world

    def read(self) -> dict[int, list[Moment]]:
        """Rank -> its moments in order; ranks that have written nothing have an empty list."""
        return {rank: self._of(rank) for rank in range(self.world)}

    def _of(self, rank: int) -> list[Moment]:
        try:
            text = (self.folder / f"rank{rank}").read_text()
        except FileNotFoundError:
            return []
        return [parse(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def pids(self) -> dict[int, int]:
        """Rank -> the process that wrote last."""
        return {rank: moments[-1].pid for rank, moments in self.read().items() if moments}

    def first_on_all(self, kind: str, after_ns: int = 0, but: frozenset[int] = frozenset()) -> int | None:
        """When the slowest rank reached its first `kind` after `after_ns`, in a process not in `but`; None while some rank has not."""
        firsts = self.firsts(kind, after_ns, but)
        return max(firsts.values()) if len(firsts) == self.world else None

    def firsts(self, kind: str, after_ns: int = 0, but: frozenset[int] = frozenset()) -> dict[int, int]:
        """Rank -> its first `kind` after `after_ns` in a process not in `but`."""
        found: dict[int, int] = {}
        for rank, moments in self.read().items():
            times = [m.at_ns for m in moments if m.kind == kind and m.at_ns > after_ns and m.pid not in but]
            if times:
                found[rank] = min(times)
        return found

    def fewest(self, kind: str, pids: Mapping[int, int]) -> int:
        """How many `kind` the rank with the fewest has written, of the processes in `pids` (rank -> pid)."""
        read = self.read()
        return min(sum(m.kind == kind and m.pid == pids.get(rank) for m in moments) for rank, moments in read.items())


def parse(line: str) -> Moment:
    """One stamp line. Raises ValueError for anything else."""
    kind, pid, at_ns = line.split()
    return Moment(kind, int(pid), int(at_ns))
