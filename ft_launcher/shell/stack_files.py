"""Stacks that ranks have dumped, as an incident needs them: read from their files, grouped, put beside the rest.

All of this runs on the writer thread: constructing these objects touches no storage, using them does. The files lie in the run's folder, so that a controller sees those of other nodes
as well where the folder is shared.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ft_launcher.core.topology import Topology
from ft_launcher.shell import incident
from ft_launcher.shell.dumps import TEXT_BYTES, read_from, size_of
from monitors.attribution_places import place_of
from monitors.stacks import Thread, summary


class StackFiles(Mapping[int, str]):
    """The files of stacks of one cycle as rank -> text, read when asked for: the writer thread's business, not the event loop's. `path_of` names a rank's file."""

    def __init__(self, world: int, path_of: Callable[[int], Path]) -> None:
        self._world = world
        self._path_of = path_of
        self._texts: dict[int, str] | None = None

    def _read(self) -> dict[int, str]:
        if self._texts is None:
            sizes = {rank: size_of(self._path_of(rank)) for rank in range(self._world)}
            self._texts = {r: read_from(self._path_of(r), max(0, size - TEXT_BYTES)) for r, size in sizes.items() if size}
        return self._texts

    def __getitem__(self, rank: int) -> str:
        return self._read()[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class IncidentWithStacks:
    """Writes an incident's files, and a grouped view of its stacks where there are any. May be called again after an `OSError`."""

    def __init__(self, folder: Path, found: incident.Incident, topology: Topology | None) -> None:
        self._job = incident.IncidentJob(folder, found)
        self._incident = found
        self._topology = topology or Topology.build(world=max(1, len(found.ranks)))

    def __call__(self) -> None:
        self._job()
        texts = {rank: text for rank, text in self._incident.stacks.items() if rank < self._topology.world}
        if texts and self._job.folder is not None:
            view = summary(texts, self._topology, _described)
            (self._job.folder / "stacks" / "summary.txt").write_text(view, encoding="utf-8", errors="backslashreplace")


def _described(threads: tuple[Thread, ...]) -> str:
    place = place_of(threads, linecache.getline)
    return place.words() if place is not None else "no main thread"


def remove_empty(paths: Iterable[Path]) -> None:
    """Remove those of the files that are empty."""
    for path in paths:
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
