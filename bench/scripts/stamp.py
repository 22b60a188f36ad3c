"""Writes one moment of this rank where the benchmark looks (see `_common/stamps.py`); a single append, so that a kill never tears a line. Imports
nothing of weight."""

from __future__ import annotations

import os
import time

_file = os.open(
    os.path.join(os.environ["BENCH_STAMPS"], "rank" + os.environ["RANK"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
)


def stamp(kind: str, at_ns: int | None = None) -> None:
    """`kind` happened at `at_ns` (CLOCK_MONOTONIC), or now."""
    os.write(_file, f"{kind} {os.getpid()} {time.monotonic_ns() if at_ns is None else at_ns}\n".encode())
