"""The ledger of devices between the core, which has no clock, and ft_state.json, where a quarantine has an end.

Read at the start of a run: what has not ended counts. Written whenever the job's ledger changes: who is suspected, what was found, until when no rank may go there.
Entries are named "node/slot" as everywhere in the file; `device` is the stable name (a GPU's UUID) by which the hardware is known again under another node id.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ft_launcher.core.hardware import DeviceRecord, Dispute, Ledger
from ft_launcher.core.state import JobState
from ft_launcher.state import document as doc

RERUN = "rerun"
"""Top-level key of ft_state.json: the dispute and the verdict that the next generation of this run goes on with."""


def ledger_in(document: doc.Document, now: str) -> dict[str, DeviceRecord]:
    """What earlier runs hold against devices. Entries that make no sense are left out."""
    found = {}
    for place, entry in document["hardware"].items():
        node, slash, slot = place.rpartition("/")
        if not slash or not slot.isdigit():
            continue
        until, rank, count = entry.get("quarantine_until"), entry.get("rank"), entry.get("suspicions")
        device = entry.get("device")
        found[device if isinstance(device, str) and device else place] = DeviceRecord(
            node=node,
            slot=int(slot),
            suspicions=count if isinstance(count, int) and count >= 0 else 0,
            quarantined=isinstance(until, str) and until > now,
            rank=rank if isinstance(rank, int) and rank >= 0 else None,
            why=str(entry.get("why", "")),
        )
    return found


def carried_in(document: doc.Document) -> tuple[Dispute | None, str]:
    """The dispute and the verdict that an earlier generation of the same run has left."""
    entry = document.get(RERUN)
    if not isinstance(entry, dict):
        return None, ""
    verdict = entry.get("verdict")
    try:
        dispute = Dispute.from_json(entry["dispute"]) if entry.get("dispute") else None
    except (ValueError, KeyError, TypeError, AttributeError):
        dispute = None
    return dispute, verdict if isinstance(verdict, str) else ""


def inherited(fresh: JobState, document: doc.Document, now: str, world: int) -> JobState:
    """A generation that has not begun, with what ft_state knows of devices and of a rerun that was under way.

    Where both know a device, ft_state's word counts, for only there a quarantine ends. A dispute among another number of ranks than `world` is over.
    """
    ledger: Ledger = {**fresh.hardware, **ledger_in(document, now)}
    dispute, verdict = fresh.rerun, fresh.rerun_verdict
    if dispute is None and not verdict:
        dispute, verdict = carried_in(document)
    if dispute is not None and (dispute.origin.world != world or not dispute.suspects):
        dispute = None  # whose result it is nobody knew, and where everybody was is no more
    return fresh.but(hardware=ledger, rerun=dispute, rerun_verdict=verdict)


def exported(document: doc.Document, before: Ledger, job: JobState, now: str, quarantine_days: float) -> doc.Document:
    """The document with whatever changed in the job's ledger and rerun since `before`."""
    for device, record in job.hardware.items():
        if record != before.get(device):
            document = _with_record(document, device, record, now, quarantine_days)
    dispute = job.rerun.to_json() if job.rerun is not None else None
    if dispute is None and not job.rerun_verdict and not document.get(RERUN):
        return document
    return {**document, RERUN: {"dispute": dispute, "verdict": job.rerun_verdict}}


def _with_record(document: doc.Document, device: str, record: DeviceRecord, now: str, quarantine_days: float) -> doc.Document:
    place = f"{record.node}/{record.slot}"
    known: Mapping[str, Any] = document["hardware"].get(place, {})
    until = known.get("quarantine_until")
    if record.quarantined and not (isinstance(until, str) and until > now):
        until = _later(now, quarantine_days)
    verdict = {"at": now, "verdict": doc.short(record.why)} if record.why else None
    return doc.with_device(
        document,
        place,
        suspicions=record.suspicions,
        quarantine_until=until if record.quarantined else None,
        verdict=verdict,
        device=device,
        rank=record.rank,
        why=doc.short(record.why),
    )


def _later(now: str, days: float) -> str:
    at = datetime.fromisoformat(now) + timedelta(days=days)
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
