"""verdict.json where no controller has written it: because the store is out of reach, or because the controller did not live to do it.

A node knows the job as it last heard of it, and its own ranks; that is what is written. Nothing is decided here, and what a controller wrote stands.
"""

from __future__ import annotations

from ft_launcher.core.causes import Failure
from ft_launcher.core.evidence import NodeReport
from ft_launcher.core.state import JobState, Outcome
from ft_launcher.errors import FTError, PlatformError, ReplacedError
from ft_launcher.shell import incident
from ft_launcher.shell.record import Files, final
from ft_launcher.shell.writer import Keep


def failed(files: Files, error: Exception, job: JobState | None, report: NodeReport | None) -> FTError:
    """The launcher itself cannot go on: the verdict, unless there is one, with what this node knows; returns the one line that stands in for a traceback."""
    known = error if isinstance(error, FTError) else PlatformError(f"the launcher cannot go on: {type(error).__name__}: {error}")
    outcome = Outcome.STORE_UNREACHABLE if known.exit_code == 69 else Outcome.FAILED
    cycles = job.cycle + 1 if job is not None else 0
    verdict = incident.Verdict(outcome.value, known.exit_code, f"{known}{_story(report)}", cycles)
    files.journal.record("failed", None, text=verdict.reason)
    if not isinstance(known, ReplacedError):
        _write_if_missing(files, verdict)
    return known


def concluded(files: Files, node_id: str, job: JobState | None) -> None:
    """A job that is over: the node of its rank 0 makes sure that its verdict is there."""
    if job is not None and job.verdict is not None and job.placement is not None and job.placement.nodes[0] == node_id:
        _write_if_missing(files, final(job, job.verdict))


def _write_if_missing(files: Files, verdict: incident.Verdict) -> None:
    folder = files.folder.path

    def write() -> None:
        if not (folder / incident.VERDICT_NAME).exists():
            incident.write_verdict(folder, verdict)

    files.writer.submit(incident.VERDICT_LANE, write, Keep.ALWAYS)


def _story(report: NodeReport | None) -> str:
    """What became of this node's ranks while nobody could be told."""
    exits = list(report.exits.values()) if report is not None else []
    failures = [Failure(report.node_id, 0, exit_) for exit_ in exits if report is not None and exit_.failure]
    left = [exit_.rank for exit_ in exits if exit_.success]
    said = []
    if failures:
        first = min(failures, key=lambda failure: failure.precedence).exit
        said.append(f"rank {first.rank} {first.describe()}")
    if left:
        said.append(f"{len(left)} rank{'s' if len(left) > 1 else ''} had left with exit 0")
    return f"; on this node {', '.join(said)}" if said else ""
