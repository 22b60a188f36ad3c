"""One look at a run's files for those who look often: what changed since the last look is read, the rest is remembered.

`watch` and `serve` share this. A look never raises: a file that is missing, torn or deleted leaves the last good document in place and says so in `notes`, with `up` False where
nothing usable is on the disk now. Nobody looking costs nothing: there is no thread here, and two looks within a moment are one.

Everything derived is computed here, under one lock, so that a `Snapshot` is a value that any number of threads may read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_launcher.dashboard.board import Board, Found
from ft_launcher.dashboard.find import Seen, expected_path, json_object, other_launch, run_folder
from ft_launcher.dashboard.losses import Losses, losses
from ft_launcher.dashboard.moment import Latest, Moment, latest_incident, moment_of, rank_states
from ft_launcher.dashboard.tail import JournalTail
from ft_launcher.shell.incident import incident_folders
from ft_launcher.state.document import Document, empty
from ft_launcher.state.file import FtStateFile
from ft_launcher.state.reading import Signature, signature_of

INCIDENTS_KEPT = 50
AGAIN_S = 0.2
"""Looks closer together than this are one."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was found. `up`: a usable document is on the disk now. `document` is the last good one, None before the first. `incidents`: (folder name, summary), newest last."""

    path: Path
    up: bool
    notes: tuple[str, ...]
    document: Document | None
    run_folder: Path | None
    verdict: Mapping[str, Any] | None
    incidents: tuple[tuple[str, dict[str, Any]], ...]
    incident_count: int
    moment: Moment
    latest: Latest | None
    states: str
    findings: Mapping[int, Found]
    seen: Mapping[int, str]
    placement: Mapping[str, Any] | None
    overshoot_s: Mapping[int, float]
    recoveries: Mapping[int, tuple[float, bool]]
    losses: Losses

    def as_seen(self) -> Seen | None:
        """For the tables of `show`."""
        if self.document is None:
            return None
        verdict = dict(self.verdict) if self.verdict is not None else None
        return Seen(self.path, self.document, self.notes, self.run_folder, verdict, self.incidents[-5:], self.incident_count)


@dataclass(slots=True)
class _Memory:
    """What was read before, and from which version of the files."""

    path: Path | None = None
    signatures: tuple[Signature | None, Signature | None] | None = None
    document: Document | None = None
    up: bool = False
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    tail: JournalTail | None = None
    board: Board = field(default_factory=Board)
    incidents: tuple[tuple[str, dict[str, Any]], ...] = ()
    incident_count: int = 0
    incident_signatures: dict[str, Signature | None] = field(default_factory=dict)
    verdict_signature: Signature | None = None
    verdict: dict[str, Any] | None = None


class Source:
    """The files that `given` means, looked at again and again. Safe to use from any thread."""

    def __init__(self, given: Path) -> None:
        self.given = given
        self.failures = 0
        self._lock = threading.Lock()
        self._memory = _Memory()
        self._last: Snapshot | None = None
        self._looked_at = float("-inf")

    def look(self) -> Snapshot:
        """What the files say now. The same object as before where nothing has changed."""
        with self._lock:
            if self._last is not None and time.monotonic() - self._looked_at < AGAIN_S:
                return self._last
            changed = self._read()
            if self._last is None or changed:
                self._last = self._snapshot()
            self._looked_at = time.monotonic()
            return self._last

    def _read(self) -> bool:
        document = self._read_document()
        folder = self._read_folder()
        return document or folder

    def _read_document(self) -> bool:
        known = self._memory
        path = expected_path(self.given)
        signatures = (signature_of(path), signature_of(path.with_name(path.name + ".bak")))
        if path == known.path and signatures == known.signatures:
            return False
        loaded = FtStateFile(path).load()
        known.path, known.signatures, known.up = path, signatures, loaded.document is not None
        known.document = loaded.document or known.document
        known.notes = loaded.notes or (() if known.up else (f"{path}: no such file yet",))
        self.failures += not known.up
        if not known.up:
            known.signatures = None  # look again next time: it may have been torn for longer than a load waits
        return True

    def _read_folder(self) -> bool:
        known = self._memory
        folder = run_folder(self.given, known.path or self.given, known.document or empty())
        moved = folder != known.folder
        if moved:
            known.folder, known.tail, known.board = folder, JournalTail(folder) if folder is not None else None, Board()
            known.incidents, known.incident_count, known.incident_signatures = (), 0, {}
            known.verdict, known.verdict_signature = None, None
        if folder is None or known.tail is None:
            return moved
        anew, lines = known.tail.poll()
        if anew:
            known.board = Board()
        known.board.fold(lines)
        incidents, verdict = self._read_incidents(folder), self._read_verdict(folder)
        return moved or anew or bool(lines) or incidents or verdict

    def _read_incidents(self, folder: Path) -> bool:
        """Summaries never change once written: each is read once."""
        known = self._memory
        folders = incident_folders(folder)
        newest = folders[-INCIDENTS_KEPT:]
        signatures = {one.name: signature_of(one / "summary.json") for one in newest}
        if signatures == known.incident_signatures and len(folders) == known.incident_count:
            return False
        before = dict(known.incidents)
        kept = {name for name, signature in signatures.items() if name in before and known.incident_signatures.get(name) == signature}
        known.incidents = tuple(
            (one.name, before[one.name] if one.name in kept else _without_ranks(json_object(one / "summary.json") or {})) for one in newest
        )
        known.incident_count, known.incident_signatures = len(folders), signatures
        return True

    def _read_verdict(self, folder: Path) -> bool:
        known = self._memory
        signature = signature_of(folder / "verdict.json")
        if signature == known.verdict_signature:
            return False
        known.verdict_signature = signature
        known.verdict = json_object(folder / "verdict.json") if signature is not None else None
        return True

    def _snapshot(self) -> Snapshot:
        known = self._memory
        document = known.document or empty()
        path = known.path or self.given
        strange = other_launch(path, document, known.folder) if known.folder is not None else []
        board = Board() if strange else known.board
        moment = moment_of(document, board)
        latest = latest_incident(document, board)
        ranks = board.ranks_of(moment.cycle)
        placement = board.job.get("placement") if board.job is not None else None
        return Snapshot(
            path=path,
            up=known.up,
            notes=(*known.notes, *strange),
            document=known.document,
            run_folder=known.folder,
            verdict=known.verdict,
            incidents=known.incidents,
            incident_count=known.incident_count,
            moment=moment,
            latest=latest,
            states=rank_states(document, board, moment, latest),
            findings=dict(ranks.findings),
            seen=dict(ranks.seen),
            placement=placement if isinstance(placement, dict) else None,
            overshoot_s=dict(board.overshoot_s),
            recoveries=dict(board.recoveries),
            losses=losses(document["cycles"], document["run"]),
        )


def _without_ranks(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without what ten thousand ranks say: that is read again for who asks for the one incident."""
    return {key: value for key, value in summary.items() if key != "ranks"}
