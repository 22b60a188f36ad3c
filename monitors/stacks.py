"""Python stacks as ranks dump them (faulthandler): read, normalised, grouped.

A hung job of a thousand ranks has a handful of different stacks: most ranks wait for somebody, and the odd one out is where to look. So a stack is reduced to what is
comparable between ranks and machines (files from the package on, functions, no line numbers), equal ones are put together, and each group is described by the
coordinates that its ranks share: "ranks 1,3 = tp 1".

Pure: text in, values out. It does not know what a stack means (`monitors.attribution_places`) nor who is at fault (`monitors.attribution`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ft_launcher.core.topology import Topology

SEPARATOR = "-- ft-launch: "
"""Begins each line that the launcher itself adds to a file of stacks; it also ends the dump before it."""

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+|lib/python3\.\d+t)/")
_ENTRY = frozenset({"<module>", "_run_module_as_main", "_run_module_code", "run_path", "main"})
_THREAD_ENTRY = frozenset({"_bootstrap", "_bootstrap_inner"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One call; `file` as the interpreter knows it, `line` 0 where unknown."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The file from its package on: `torch/distributed/distributed_c10d.py`; of other files the last two parts."""
        cut = _PACKAGES.sub("", self.file)
        return cut if cut != self.file else "/".join(self.file.split("/")[-2:])

    @property
    def name(self) -> str:
        """`file:function`: the same on every machine and at every line."""
        return f"{self.short}:{self.function}"

    @property
    def brief(self) -> str:
        """`train.py:step`: enough for a sentence."""
        return f"{self.file.rpartition('/')[2]}:{self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a dump, innermost frame first. `current`: the one that the signal interrupted. `cut`: faulthandler left out the outermost frames."""

    ident: int
    current: bool
    frames: tuple[Frame, ...]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that stand at the same place: equal `names` (innermost first)."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def parse(text: str) -> tuple[Thread, ...]:
    """The threads of the last dump in `text`, in its order; empty when there is none. Anything else in the text is passed over; never raises."""
    dump: list[Thread] = []
    sealed = False
    for line in text.splitlines():
        if (found := _THREAD.match(line)) is not None:
            ident = int(found[2], 16)
            if sealed or any(t.ident == ident for t in dump):  # a further dump begins
                dump, sealed = [], False
            dump.append(Thread(ident, found[1] == "Current thread", ()))
        elif line.startswith(SEPARATOR):
            sealed = bool(dump)
        elif dump and not sealed:
            dump[-1] = _with(dump[-1], line)
    return tuple(dump)


def _with(thread: Thread, line: str) -> Thread:
    """The thread and one more line of its dump."""
    if line.startswith("  ..."):
        return replace(thread, cut=True)
    found = _FRAME.match(line)
    if found is None:
        return thread
    return replace(thread, frames=(*thread.frames, Frame(found[1], int(found[2]) if found[2].isdigit() else 0, found[3])))


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that runs the script: the one that began with a module; else the last (the interpreter lists the oldest last) that is no `threading.Thread`."""
    whole = [t for t in threads if t.frames and not t.cut]
    begun = [t for t in whole if t.frames[-1].function in _ENTRY]
    if begun:
        return begun[-1]
    own = [t for t in threads if not (t.frames and not t.cut and t.frames[-1].function in _THREAD_ENTRY)]
    return own[-1] if own else (threads[-1] if threads else None)


def names(thread: Thread) -> tuple[str, ...]:
    """The thread's stack in a form that can be compared, innermost first."""
    return tuple(frame.name for frame in thread.frames)


def group(stacks: Mapping[int, tuple[str, ...]]) -> list[StackGroup]:
    """Ranks with equal stacks together, the largest group first, then by lowest rank."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(stacks):
        found.setdefault(stacks[rank], []).append(rank)
    return sorted((StackGroup(tuple(ranks), key) for key, ranks in found.items()), key=lambda g: (-len(g.ranks), g.ranks))


def outliers(groups: Sequence[StackGroup]) -> tuple[int, ...]:
    """The ranks outside the largest group when that holds more than half of all; else none: without a majority nobody is odd."""
    total = sum(len(g.ranks) for g in groups)
    if not groups or 2 * len(groups[0].ranks) <= total:
        return ()
    return tuple(sorted(rank for g in groups[1:] for rank in g.ranks))


def shared(ranks: Sequence[int], topology: Topology) -> str | None:
    """What these ranks are in coordinates when they are *all* ranks with them: `tp 1`, `dp 0, pp 2-3`, `all ranks`; None when no such description exists."""
    chosen = set(ranks)
    if len(chosen) == topology.world:
        return "all ranks"
    coords = [topology.coords(rank) for rank in chosen]
    size, parts = 1, []
    for axis in ("tp", "cp", "dp", "pp"):
        values = sorted({int(getattr(c, axis)) for c in coords})
        size *= len(values)
        if len(values) < getattr(topology, axis):
            parts.append(f"{axis} {spans(values)}")
    return ", ".join(parts) if coords and size == len(chosen) else None


def spans(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def ranks_text(ranks: Sequence[int], topology: Topology | None = None) -> str:
    """`rank 3`, `ranks 1,3 = tp 1`: for people."""
    said = f"rank{'s' if len(ranks) != 1 else ''} {spans(ranks)}"
    common = shared(ranks, topology) if topology is not None and len(ranks) > 1 else None
    return f"{said} = {common}" if common else said


def summary(texts: Mapping[int, str], topology: Topology, described: Callable[[tuple[Thread, ...]], str]) -> str:
    """The grouped view of many dumps, for a person: each group's ranks, coordinates, place (`described`) and stack; outliers and missing ranks by name."""
    dumps = {rank: parse(text) for rank, text in texts.items()}
    mains = {rank: main for rank, threads in dumps.items() if (main := main_thread(threads)) is not None}
    groups = group({rank: names(main) for rank, main in mains.items()})
    lines = [f"{len(mains)} of {topology.world} ranks dumped their stacks; {len(groups)} different one{'s' if len(groups) != 1 else ''}"]
    if odd := outliers(groups):
        lines.append(f"outliers: {ranks_text(odd, topology)}")
    silent = [rank for rank in range(topology.world) if rank not in mains]
    if silent:
        lines.append(f"without stacks: {ranks_text(silent, topology)}")
    for found in groups:
        first = found.ranks[0]
        lines += ["", f"{ranks_text(found.ranks, topology)} ({len(found.ranks)}): {described(dumps[first])}"]
        lines += [f"    {name}" for name in found.names] or ["    (no Python frame)"]
    return "\n".join(lines) + "\n"
