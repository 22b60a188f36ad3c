"""Start real ranks of the examples, watch them, kill them; nothing is left when a test ends.

One forking parent (`nursery.py`) per test session has imported everything once. `Run` is one start of a script: its pids, its logs, its ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
TRAIN = EXAMPLES / "megatron_gpt" / "train.py"
TOY = EXAMPLES / "toy_train.py"
DEADLINE_S = 120.0


class Nursery:
    """The forking parent; `start` forks the ranks of one run."""

    def __init__(self, preload: list[str]) -> None:
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py"), *preload], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ends: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        self.threads = int(self._await("threads"))

    def start(self, argv: list[Any], logs: Path, world: int = 4, **env: str) -> Run:
        logs.mkdir(parents=True, exist_ok=True)
        self.request(argv=[str(a) for a in argv], env=_clean_env(env), world=world, logs=str(logs))
        return Run(self, self._await("pids"), logs)

    def request(self, **what: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ended(self, pid: int) -> int | None:
        """Exit status (negative: signal), or None while it runs."""
        return self._ends.get(pid)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            if "pid" in answer:
                self._ends[answer["pid"]] = answer["status"]
            else:
                self._answers.put(answer)

    def _await(self, key: str) -> Any:
        return self._answers.get(timeout=DEADLINE_S)[key]


@dataclass
class Run:
    """Ranks of one start, rank r at `pids[r]`."""

    nursery: Nursery
    pids: list[int]
    logs: Path
    statuses: list[int] = field(default_factory=list)

    def wait(self) -> list[int]:
        """Exit statuses by rank, once all have ended."""
        until(lambda: all(self.nursery.ended(pid) is not None for pid in self.pids), lambda: f"ranks still run: {self.output()}")
        self.statuses = [status for pid in self.pids if (status := self.nursery.ended(pid)) is not None]
        return self.statuses

    def succeed(self) -> str:
        """Wait for a good end; everything that was printed."""
        assert self.wait() == [0] * len(self.pids), self.output()
        return self.output()

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        self.nursery.request(signal=int(number), to=[self.pids[rank] for rank in (range(len(self.pids)) if ranks is None else ranks)])

    def kill(self, ranks: list[int] | None = None) -> None:
        """SIGKILL `ranks` first, then, as a launcher does, the rest."""
        self.signal(signal.SIGKILL, ranks)
        self.signal(signal.SIGKILL)
        self.wait()

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("rank_*.log")))


def _clean_env(more: dict[str, str]) -> dict[str, str]:
    """The test's environment without what a launcher may have put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("FT_", "TORCHELASTIC_"))} | more


def until(condition: Callable[[], bool], story: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition, with a deadline that only a hang meets."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.002)


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """The run, killed at the end whatever happens."""
    try:
        yield run
    finally:
        run.signal(signal.SIGCONT)
        run.kill()


def losses(log: Path) -> dict[int, str]:
    """Iteration -> exact loss; an iteration that was done again after a resume must have had the same loss every time."""
    found: dict[int, str] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if "loss_hex" in entry:
            before = found.setdefault(entry["iteration"], entry["loss_hex"])
            assert before == entry["loss_hex"], f"iteration {entry['iteration']} changed its loss: {before} then {entry['loss_hex']}"
    return found


def reached(log: Path, iteration: int) -> Callable[[], bool]:
    """Condition: the log holds that iteration."""
    return lambda: log.exists() and any(f'"iteration": {n},' in log.read_text() for n in (iteration, iteration + 1))
