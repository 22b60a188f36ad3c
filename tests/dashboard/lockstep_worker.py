"""Ranks in lock-step without torch: each step ends when all ranks of the cycle have touched its file. argv[1] is the folder they meet in; a file `finish` there ends them."""

import os
import sys
import time
from pathlib import Path

from monitors.client import attach

FOLDER, RANK, WORLD, CYCLE = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["FT_CYCLE"])


def at(rank: int) -> int:
    """How many steps a rank has begun in this cycle."""
    try:
        return (FOLDER / f"stepped.{CYCLE}.{rank}").stat().st_size
    except OSError:
        return 0


def reduce_gradients(step: int) -> None:
    """Waits until everybody is here."""
    while any(at(rank) < step for rank in range(WORLD)):
        time.sleep(0.005)


def is_last(step: int) -> bool:
    """Rank 0 alone decides which step is the last, before it takes it: nobody completes that one without being able to read of it here."""
    path = FOLDER / f"last.{CYCLE}"
    if RANK == 0 and (FOLDER / "finish").exists() and not path.exists():
        (FOLDER / "last.tmp").write_text(str(step + 1))
        (FOLDER / "last.tmp").rename(path)
    return path.exists() and int(path.read_text()) == step


def main() -> None:
    mon = attach()
    with mon.section("setup"):
        mine = (FOLDER / f"stepped.{CYCLE}.{RANK}").open("ab", buffering=0)
    step = 0
    while not is_last(step):
        step += 1
        with mon.section("step", iteration=step):
            mine.write(b".")
            reduce_gradients(step)
        time.sleep(0.05)


main()
