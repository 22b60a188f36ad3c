"""Where decisions become lines and files: console, journal, incident folders, ft_state.json, verdict.json.

The controller's `Record`. Everything that touches a disk is handed to the writer thread; nothing here blocks or decides. The same sentence appears everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher.core.actions import RecordDecision, RecordRecovery, Say
from ft_launcher.core.events import ProgressSeen
from ft_launcher.core.state import JobState, Phase, Verdict
from ft_launcher.core.topology import Topology
from ft_launcher.report import nodes_text
from ft_launcher.shell import incident
from ft_launcher.shell.console import Console
from ft_launcher.shell.exporter import Exporter
from ft_launcher.shell.journal import Journal
from ft_launcher.shell.stack_files import IncidentWithStacks, StackFiles, remove_empty
from ft_launcher.shell.writer import Keep, Writer
from ft_launcher.state.document import Culprit, coords_of
from ft_launcher.state.run_folder import RunFolder
from monitors.timeouts import Timeout

AFTERWARDS_S = 0.5


@dataclass(frozen=True, slots=True)
class Files:
    """The places a record writes to."""

    folder: RunFolder
    writer: Writer
    journal: Journal
    console: Console

    def stacks(self, cycle: int, rank: int) -> Path:
        """Where `rank` dumps its stacks in `cycle`."""
        return self.folder.rank_log(cycle, rank).with_suffix(".stacks")

    def drop_empty_stacks(self, cycle: int, ranks: Iterable[int]) -> None:
        """Remove the files of ranks that were never asked."""
        paths = [self.stacks(cycle, rank) for rank in ranks]
        self.writer.submit("stacks", lambda: remove_empty(paths), Keep.ALWAYS)


class RunRecord:
    """See controller.Record. `stacks` yields what was gathered of the ranks' stacks by the time an incident is written."""

    def __init__(
        self, files: Files, exporter: Exporter, stacks: Callable[[int], Mapping[int, str]] | None = None, topology: Topology | None = None
    ) -> None:
        self._files = files
        self._exporter = exporter
        self._stacks = stacks
        self._topology = topology
        self._limits: dict[str, float] = {}
        self._later: list[Callable[[], None]] = []
        self._job: JobState | None = None
        self._revision: int | None = None
        self._placed = False

    def say(self, say: Say) -> None:
        """One line for console and journal."""
        self._files.console.say(say.text, say.level)
        self._files.journal.record("said", self._cycle(), self._revision, text=say.text, level=say.level)

    def _cycle(self) -> int | None:
        return self._job.cycle if self._job is not None else None

    def committed(self, job: JobState, revision: int) -> None:
        """The job as it now is: journal, ft_state, and the verdict once there is one."""
        self._job, self._revision = job, revision
        self._files.journal.record("job", job.cycle, revision, job=job.to_json())
        if job.phase is Phase.ENDING:
            self._exporter.restore_if_torn()
        self._exporter.committed(job, revision)
        self._say_places(job)
        if job.verdict is not None:
            self.flush()
            incident.submit_verdict(self._files.writer, self._files.folder.path, final(job, job.verdict))

    def _say_places(self, job: JobState) -> None:
        """Once a controller, of several nodes: who holds which ranks. Whoever takes a place afterwards is named with it."""
        if self._placed or job.phase is not Phase.RUNNING or job.placement is None:
            return
        self._placed = True
        if len(job.placement.nodes) > 1:
            self._files.console.say(f"cycle {job.cycle}: ranks are on {nodes_text(job.placement)}")

    def decided(self, decision: RecordDecision) -> None:
        """A settled cycle: journal, ft_state, and an incident folder unless it simply finished."""
        fields = {name: getattr(decision, name) for name in ("cause", "rule", "reason", "decision", "culprit", "reap_s")}
        self._files.journal.record("decision", decision.cycle, self._revision, **fields)
        self._exporter.decided(decision)
        if decision.cause not in ("finished", "drain"):
            found = self._incident(decision)
            job = IncidentWithStacks(self._files.folder.path / "incidents", found, self._topology)
            self._postpone(lambda: self._write(job))

    def _postpone(self, write: Callable[[], None]) -> None:
        """Out of the way of a recovery, and not lost when the job ends meanwhile."""
        self._later.append(write)
        if self._job is not None and self._job.verdict is not None:
            self.flush()
        else:
            asyncio.get_running_loop().call_later(AFTERWARDS_S, self.flush)

    def _write(self, job: IncidentWithStacks) -> None:
        self._files.writer.submit(incident.LANE, job, Keep.ALWAYS)

    def spares(self, count: int) -> None:
        """How many nodes could take another's place."""
        self._exporter.spares(count)

    def alive(self) -> None:
        """Every few seconds, for ft_state; and for whoever was cut off alone and has concluded for all."""
        self._exporter.alive()
        if self._job is not None and self._job.phase is Phase.RUNNING:
            incident.withdraw_verdict(self._files.writer, self._files.folder.path)

    def flush(self) -> None:
        """Write now what was postponed."""
        while self._later:
            self._later.pop(0)()
        self._exporter.flush()

    def _incident(self, decision: RecordDecision) -> incident.Incident:
        found = decision.culprit
        culprit = None
        if found is not None:
            culprit = Culprit(found["rank"], coords_of(found["coords"]), found["node"], found["slot"], found["why"])
        ranks = {
            rank: incident.RankAtIncident(r["iteration"], r["section"], r["since_s"], None if r["ended"] else r["exit"])
            for rank, r in decision.ranks.items()
        }
        return incident.Incident(
            cycle=decision.cycle,
            cause=decision.cause,
            reason=decision.reason,
            decision=decision.decision,
            culprit=culprit,
            ranks=ranks,
            progress=decision.ranks,
            stacks=self._stacks_of(decision),
            logs={rank: self._files.folder.rank_log(decision.cycle, rank) for rank in decision.ranks},
            extra={"rule": decision.rule, "reap_s": round(decision.reap_s, 4), "settle_s": round(decision.fault_to_settled_s, 4)},
        )

    def _stacks_of(self, decision: RecordDecision) -> Mapping[int, str]:
        if self._stacks is not None:
            return self._stacks(decision.cycle)
        return StackFiles(len(decision.ranks), lambda rank: self._files.stacks(decision.cycle, rank))

    def recovered(self, recovery: RecordRecovery) -> None:
        """Say how long the outage was: first until all ranks run, then until all have made a step."""
        at = f" at iteration {recovery.iteration}" if recovery.iteration is not None else ""
        what = f"training again{at}, every rank has completed a step" if recovery.complete else "all ranks started"
        self._files.console.say(f"cycle {recovery.cycle}: {what}, {recovery.seconds:.2f} s after the fault")
        kind = "recovered" if recovery.complete else "restarted"
        self._files.journal.record(kind, recovery.cycle, self._revision, seconds=round(recovery.seconds, 4), iteration=recovery.iteration)
        self._exporter.recovered(recovery)

    def learned(
        self, timeouts: Mapping[str, Timeout], distributions: Mapping[str, Mapping[str, object]], records: Mapping[str, object]
    ) -> None:
        """Limits as they are now; every changed one is in the journal with its reason."""
        for name, timeout in timeouts.items():
            if self._limits.get(name) != timeout.hard_s and (name in self._limits or timeout.learned):
                fields = {
                    "section": name,
                    "hard_s": timeout.hard_s,
                    "soft_s": timeout.soft_s,
                    "learned": timeout.learned,
                    "reason": timeout.reason,
                }
                self._files.journal.record("timeout", self._cycle(), self._revision, **fields)
            self._limits[name] = timeout.hard_s
        self._exporter.learned(timeouts, distributions, records)

    def learned_before(self) -> object:
        """What an earlier run has left in ft_state.json."""
        return self._exporter.learned_before()

    def progressed(self, progress: ProgressSeen) -> None:
        """Where training is, for ft_state."""
        self._exporter.progressed(progress, asyncio.get_running_loop().time())


def final(job: JobState, verdict: Verdict) -> incident.Verdict:
    """verdict.json of a job that is over."""
    cause = _first_cause(verdict.first_cause) if verdict.first_cause else None
    return incident.Verdict(verdict.outcome.value, verdict.exit_code, verdict.reason, job.cycle + 1, cause, verdict.exclude)


def _first_cause(found: Mapping[str, Any]) -> incident.FirstCause:
    error = found.get("error") or {}
    return incident.FirstCause(
        rank=found["rank"],
        coords=coords_of(found["coords"]),
        node=found["node"],
        slot=found["slot"],
        cause=found["cause"],
        exit=found["exit"],
        error_message=error.get("message"),
        error_traceback=error.get("traceback"),
    )
