"""What is kept of a fault, and of the run's end: `incidents/0001/` and `verdict.json`.

These are written by the writer thread and never dropped; every write is whole or absent, and a job that failed half way (a full disk)
goes on where it stopped when it is tried again, in the same folder. The numbering goes on over restarts of the launcher, and two
controllers that meet never share a number. Knows the shape of the files (DESIGN.md section 10) and nothing of how a cause is found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ft_launcher.core.state import Outcome
from ft_launcher.shell.logs import last_lines
from ft_launcher.shell.writer import Keep, Writer
from ft_launcher.state.atomic import write_atomic
from ft_launcher.state.document import Culprit

LANE = "incidents"
VERDICT_LANE = "verdict"
VERDICT_NAME = "verdict.json"
_LAST_LINES = 50


@dataclass(frozen=True, slots=True)
class RankAtIncident:
    """One rank when it happened: `since_s` in `section` (None: outside any), `exit` its code, negative for a signal, None while it lived."""

    iteration: int | None
    section: str | None
    since_s: float | None
    exit: int | None


@dataclass(frozen=True, slots=True)
class Incident:
    """All of one incident. `progress` and `stacks` are by rank; of each of `logs` the last lines are kept; `extra` goes into summary.json
    beside the rest.
    """

    cycle: int
    cause: str
    reason: str
    decision: str
    culprit: Culprit | None
    ranks: Mapping[int, RankAtIncident]
    progress: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    logs: Mapping[int, Path] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        named = {"cycle": self.cycle, "cause": self.cause, "reason": self.reason, "decision": self.decision}
        culprit = asdict(self.culprit) if self.culprit else None
        return {
            **self.extra,
            **named,
            "culprit": culprit,
            "ranks": {str(rank): asdict(state) for rank, state in sorted(self.ranks.items())},
        }


@dataclass(frozen=True, slots=True)
class FirstCause:
    """The fault that the outcome is owed to. `error_message` and `error_traceback` come from the rank's error file."""

    rank: int | None
    coords: Mapping[str, int] | None
    node: str | None
    slot: int | None
    cause: str
    exit: int | None
    error_message: str | None = None
    error_traceback: str | None = None

    def as_json(self) -> dict[str, Any]:
        """verdict.json's `first_cause`."""
        known = {key: getattr(self, key) for key in ("rank", "coords", "node", "slot", "cause", "exit")}
        known["coords"] = dict(self.coords) if self.coords is not None else None
        error = None if self.error_message is None else {"message": self.error_message, "traceback": self.error_traceback or ""}
        return {**known, "error": error}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the whole run concluded; `cycles` is how many were started in this generation."""

    outcome: str
    exit_code: int
    reason: str
    cycles: int
    first_cause: FirstCause | None = None
    exclude: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """verdict.json: exactly these keys, and `exclude` (devices that the next launch should stay away from) where there are any."""
        cause = self.first_cause.as_json() if self.first_cause else None
        named = {"outcome": self.outcome, "exit_code": self.exit_code, "reason": self.reason, "cycles": self.cycles}
        exclude = {"exclude": [dict(device) for device in self.exclude]} if self.exclude else {}
        return {**named, "first_cause": cause, **exclude}


class IncidentJob:
    """Writes one incident into a folder of its own; may be called again after an `OSError` and then completes the same folder."""

    def __init__(self, folder: Path, incident: Incident) -> None:
        self._parent = folder
        self._incident = incident
        self.folder: Path | None = None

    def __call__(self) -> None:
        if self.folder is None or not self.folder.is_dir():
            self.folder = _next_folder(self._parent)
        incident = self._incident
        _write_json(self.folder / "summary.json", incident.summary())
        _write_json(self.folder / "progress.json", {str(rank): dict(state) for rank, state in sorted(incident.progress.items())})
        for rank, text in sorted(incident.stacks.items()):
            _write_text(self.folder / "stacks" / f"rank_{rank:05d}.txt", text)
        for rank, path in sorted(incident.logs.items()):
            _write_text(self.folder / "last_lines" / f"rank_{rank:05d}.txt", _joined(last_lines(path, _LAST_LINES)))


def write_verdict(folder: Path, verdict: Verdict) -> Path:
    """Writes `verdict.json` into the run's folder, whole or not at all. Raises `OSError`."""
    path = folder / VERDICT_NAME
    _write_json(path, verdict.as_json())
    return path


def submit_verdict(writer: Writer, folder: Path, verdict: Verdict) -> None:
    """Queues the verdict; it is tried until it is written or the writer is closed."""
    writer.submit(VERDICT_LANE, lambda: write_verdict(folder, verdict), Keep.ALWAYS)


def withdraw_verdict(writer: Writer, folder: Path) -> None:
    """Queues the removal of a verdict that says that the store is out of reach: whoever wrote it was cut off alone, for the job goes on."""

    def withdraw() -> None:
        path = folder / VERDICT_NAME
        with suppress(FileNotFoundError, ValueError):
            said = json.loads(path.read_bytes())
            if isinstance(said, dict) and said.get("outcome") == Outcome.STORE_UNREACHABLE.value:
                path.unlink()

    writer.submit(VERDICT_LANE, withdraw, Keep.NEWEST)


def incident_folders(run_folder: Path) -> list[Path]:
    """The incidents' folders in order; none where there are none or they cannot be read."""
    parent = run_folder / "incidents"
    return [parent / name for name in sorted(_numbers(parent), key=int)]


def _next_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = max((int(name) for name in _numbers(parent)), default=0) + 1
    while True:
        folder = parent / f"{number:04d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _numbers(parent: Path) -> list[str]:
    try:
        return [name for name in os.listdir(parent) if name.isascii() and name.isdigit()]
    except OSError:
        return []


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(value, indent=1, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(value), indent=1, default=str)
    write_atomic(path, text.encode("ascii") + b"\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(entry) for key, entry in value.items()}
    return [_without_nan(entry) for entry in value] if isinstance(value, list | tuple) else value


def _write_text(path: Path, text: str) -> None:
    """Not atomic and not fsynced: there may be ten thousand of these, and half a stack is better than none."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
