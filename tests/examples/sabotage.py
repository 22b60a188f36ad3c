"""`sabotage.py POINT SCRIPT ARGUMENTS`: run an example that kills itself, with SIGKILL, at one exact point of a save.

A point is `what@n`: the n-th time rank 0 (rank 3 for `write`) gets there. `refuse` makes the launcher's
hint say no instead; `imports` kills nobody and says what was imported after the fork.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monitors import client
from monitors.fence import CheckpointFence

BEFORE = set(sys.modules)
IMPORTED_LATE = "imported late: "


def dying(original: Callable[..., Any], at: int, after: bool = False) -> Callable[..., Any]:
    """The function, fatal at its n-th call: before it has done anything, or right after."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def arm(point: str) -> None:
    what, _, at = point.partition("@")
    n = int(at or 1)
    if what == "refuse":
        original = client.attach

        def attach() -> Any:
            mon = original()

            class Refusing:
                section = staticmethod(mon.section)
                commit_allowed = staticmethod(lambda: False)

            return Refusing()

        client.attach = attach
    elif what == "write":  # the last pipeline stage's shards are half there
        if os.environ["RANK"] == "3":
            import torch.distributed.checkpoint as torch_checkpoint

            writer = torch_checkpoint.FileSystemWriter
            writer.write_data = dying(writer.write_data, n, after=True)
    elif os.environ["RANK"] == "0":
        if what == "seal":
            storage = importlib.import_module("storage")
            storage.seal = dying(storage.seal, n)
        elif what == "rename":
            Path.rename = dying(Path.rename, n)
        elif what == "commit":
            CheckpointFence.commit = dying(CheckpointFence.commit, n)
        elif what == "committed":
            CheckpointFence.commit = dying(CheckpointFence.commit, n, after=True)
        elif what == "fsync":
            os.fsync = dying(os.fsync, n)
        else:
            raise SystemExit(f"no such point: {what}")


if __name__ == "__main__":
    script = Path(sys.argv[2])
    sys.path.insert(0, str(script.parent))
    point = sys.argv[1]
    if point != "imports":
        arm(point)
    sys.argv = sys.argv[2:]
    importlib.import_module(script.stem).main()
    if "imports" in point:
        sys.stdout.write(IMPORTED_LATE + " ".join(sorted(set(sys.modules) - BEFORE)) + "\n")
