"""Records how long the sections of a real training script took, for `bench/timeouts.py` to replay.

    torchrun --nproc-per-node 4 bench/traces/record.py rank FOLDER SCRIPT [ARGUMENTS...]       each rank leaves FOLDER/<rank>.json
    python bench/traces/record.py merge FOLDER bench/traces/NAME.json "what was run, on what, under which load"

A rank's `monitors.client.attach` is replaced by a stopwatch that notes every section's duration; the script itself is unchanged. Merging takes, for each occurrence,
the longest duration over all ranks, as the launcher does. A trace file is JSON: `about`, and per section the durations in units of 0.1 ms, in order.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNIT_S = 1e-4


class Stopwatch:
    """What a script uses of a monitor: sections; commits are always allowed."""

    def __init__(self) -> None:
        self.durations: dict[str, list[float]] = {}

    @contextmanager
    def section(self, name: str, iteration: int | None = None) -> Iterator[None]:
        """Times its body."""
        began = time.monotonic()
        yield
        self.durations.setdefault(name, []).append(time.monotonic() - began)

    def commit_allowed(self) -> bool:
        """As outside the launcher."""
        return True


def record(folder: Path, script: str, arguments: list[str]) -> None:
    """Run the script in this process as `__main__`; its durations are written when it ends."""
    import monitors.client

    watch = Stopwatch()
    monitors.client.attach = lambda: watch  # type: ignore[assignment, return-value]
    folder.mkdir(parents=True, exist_ok=True)
    atexit.register(lambda: (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(watch.durations)))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path.insert(1, str(ROOT))
    runpy.run_path(script, run_name="__main__")


def merge(folder: Path, trace: Path, about: str) -> None:
    """One file from all ranks' files."""
    ranks: list[dict[str, list[float]]] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sections: dict[str, Any] = {}
    for name in ranks[0]:
        columns = zip(*(rank[name] for rank in ranks), strict=True)
        sections[name] = [round(max(column) / UNIT_S) for column in columns]
    lines = [f" {json.dumps(name)}: {json.dumps(values, separators=(',', ':'))}" for name, values in sections.items()]
    trace.write_text(
        '{"about": ' + json.dumps(about) + f', "ranks": {len(ranks)}, "unit_s": {UNIT_S},\n"sections": {{\n' + ",\n".join(lines) + "\n}}\n"
    )


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        record(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        merge(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
