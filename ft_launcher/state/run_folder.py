"""The run's folder: `<log-dir>/<run id>.<generation>/`, where everything that one launch writes lies together.

Knows how the folder is named and how a generation is chosen: given by the store where there is a distributed one, else the highest that
exists plus one. Two launchers of the same run id started together never share a generation, because `mkdir` gives each number to one of
them. Must never know what is written inside.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.errors import ConfigError
from ft_launcher.state.names import checked_run_id

FIRST_GENERATION = 0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An existing, writable folder of one generation of a run."""

    path: Path
    run_id: str
    generation: int

    def cycle_folder(self, cycle: int) -> Path:
        """Where the ranks of `cycle` write their logs."""
        return self.path / f"cycle_{cycle:04d}"

    def rank_log(self, cycle: int, rank: int) -> Path:
        """The file that is stdout and stderr of `rank` in `cycle`."""
        return self.cycle_folder(cycle) / f"rank_{rank:05d}.log"

    def journal(self, node_id: str) -> Path:
        """The journal of one node."""
        return self.path / f"journal.{node_id}.jsonl"


def folder_name(run_id: str, generation: int) -> str:
    """The folder's name below the log-dir."""
    return f"{run_id}.{generation}"


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """(run id, generation) of a folder's name, or None where it is none."""
    run_id, dot, number = name.rpartition(".")
    if not dot or not run_id or not number.isascii() or not number.isdigit() or (len(number) > 1 and number[0] == "0"):
        return None
    return run_id, int(number)


def generations(log_dir: Path, run_id: str) -> list[int]:
    """Generations of `run_id` that have a folder, ascending; none where the log-dir does not exist. Raises `OSError` where it cannot be
    read.
    """
    try:
        names = os.listdir(log_dir)
    except FileNotFoundError:
        return []
    parsed = (parse_folder_name(name) for name in names)
    return sorted(found[1] for found in parsed if found is not None and found[0] == run_id)


def create_run_folder(log_dir: Path, run_id: str, generation: int | None = None) -> RunFolder:
    """Creates the folder of a launch and proves that it can be written.

    `generation` is the store's; with None (embedded store) the next free one is taken, exclusively. Raises `ConfigError`, one line, for
    an unfit run id or a log-dir that cannot be created or written.
    """
    checked_run_id(run_id)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        if generation is None:
            return _take_next(log_dir, run_id)
        path = log_dir / folder_name(run_id, generation)
        path.mkdir(exist_ok=True)
        _prove_writable(path)
        return RunFolder(path, run_id, generation)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"--log-dir {log_dir}: cannot be written ({why}); logs, journal and verdict go there, name a writable directory"
        ) from error


def _take_next(log_dir: Path, run_id: str) -> RunFolder:
    existing = generations(log_dir, run_id)
    candidate = existing[-1] + 1 if existing else FIRST_GENERATION
    while True:
        path = log_dir / folder_name(run_id, candidate)
        try:
            path.mkdir()
        except FileExistsError:
            candidate += 1
            continue
        _prove_writable(path)
        return RunFolder(path, run_id, candidate)


def _prove_writable(path: Path) -> None:
    probe = path / f".probe.{os.getpid()}"
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    probe.unlink(missing_ok=True)
