"""Finding what a person means by a path: an ft_state.json, a log-dir, a run's folder, or a copy of one of these anywhere.

Reads only. Knows where the launcher puts its files; must never need all of them: a state without journal, incidents or verdict is shown
as far as it goes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_launcher.errors import ConfigError
from ft_launcher.shell.incident import incident_folders
from ft_launcher.state.document import Document
from ft_launcher.state.file import FtStateFile
from ft_launcher.state.history import run_id
from ft_launcher.state.reading import BadJsonError, parse, read_start
from ft_launcher.state.run_folder import folder_name, parse_folder_name

STATE_NAME = "ft_state.json"
_INCIDENTS_SHOWN = 5
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A state and what lies around it; `notes` are lines about what was missing or damaged."""

    path: Path
    document: Document
    notes: tuple[str, ...] = ()
    run_folder: Path | None = None
    verdict: dict[str, Any] | None = None
    incidents: tuple[tuple[str, dict[str, Any]], ...] = ()
    incident_count: int = field(default=0)

    @property
    def other(self) -> str | None:
        """The folder's name where it is of another launch than the state: then incidents and verdict are, too."""
        strange = self.run_folder is not None and other_launch(self.path, self.document, self.run_folder)
        return self.run_folder.resolve().name if strange and self.run_folder is not None else None


def state_path(given: Path) -> Path:
    """The ft_state.json that `given` means. Raises `ConfigError`, one line, where there is none."""
    if _is_dir(given):
        places = [given / STATE_NAME, *([given.parent / STATE_NAME] if parse_folder_name(given.resolve().name) else [])]
        for place in places:
            if _exists(place) or _exists(place.with_name(place.name + ".bak")):
                return place
        raise ConfigError(f"{given}: no {STATE_NAME} here; name the file, a --log-dir or a run's folder in it")
    if not _exists(given) and not _exists(given.with_name(given.name + ".bak")):
        raise ConfigError(f"{given}: no such file; name an {STATE_NAME}, a --log-dir or a run's folder in it")
    return given


def see(given: Path) -> Seen:
    """Everything that can be shown for `given`. Raises `ConfigError`, one line, where no state can be read at all."""
    path = state_path(given)
    loaded = FtStateFile(path).load()
    if loaded.document is None:
        raise ConfigError(loaded.notes[0] if loaded.notes else f"{path}: cannot be read")
    folder = run_folder(given, path, loaded.document)
    notes = list(loaded.notes)
    if folder is None:
        return Seen(path, loaded.document, tuple(notes))
    notes += other_launch(path, loaded.document, folder)
    folders = incident_folders(folder)
    incidents = tuple((one.name, json_object(one / "summary.json") or {}) for one in folders[-_INCIDENTS_SHOWN:])
    return Seen(path, loaded.document, tuple(notes), folder, json_object(folder / "verdict.json"), incidents, len(folders))


def expected_path(given: Path) -> Path:
    """The ft_state.json that `given` means or will mean: like `state_path` where there is one, else where it would appear. For those who wait for it."""
    try:
        return state_path(given)
    except ConfigError:
        if _is_dir(given):
            return (given.parent if parse_folder_name(given.resolve().name) and _exists(given.parent / STATE_NAME) else given) / STATE_NAME
        return given


def run_folder(given: Path, path: Path, document: Document) -> Path | None:
    """The folder of the launch: the one that was named, else the state's own beside it or where the state says."""
    if _is_dir(given) and parse_folder_name(given.resolve().name) and not _exists(given / STATE_NAME):  # a log-dir may be called so, too
        return given
    launch = _launch(document)
    if launch is None:
        return None
    name, log_dir = folder_name(*launch), (document["run"] or {}).get("log_dir")
    said = Path(log_dir) if isinstance(log_dir, str) and log_dir else None
    places = [path.parent / name, *([said / name, *([said] if said.name == name else [])] if said is not None else [])]
    return next((place for place in places if _is_dir(place)), None)


def other_launch(path: Path, document: Document, folder: Path) -> list[str]:
    """A note where the folder is of another launch than the state; empty where they belong together."""
    own = parse_folder_name(folder.resolve().name)
    if own is None or own == _launch(document):
        return []
    return [f"{path} is the state of {_said(_launch(document))}; incidents and verdict are of {_said(own)}"]


def _launch(document: Document) -> tuple[str, int] | None:
    name = run_id(document)
    generation = (document["run"] or {}).get("generation")
    return (name, generation) if name is not None and isinstance(generation, int) and "/" not in name and "\0" not in name else None


def _said(launch: tuple[str, int] | None) -> str:
    return "no run" if launch is None else f"run {launch[0]!a} generation {launch[1]}"


def json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where it is missing, torn or anything else."""
    try:
        value = parse(read_start(path, _MAX_BYTES))
    except (OSError, BadJsonError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
