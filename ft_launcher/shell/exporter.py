"""Keeps ft_state.json true: folds commits, decisions and progress into the document and hands copies to the writer thread.

The store knows the truth; this is its export for people (and, with the embedded store, the durable copy). It never blocks and never fails a job: trouble with the
disk is said by the writer. Wall-clock times are added here, for people only.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from ft_launcher import __version__
from ft_launcher.config import Config
from ft_launcher.core.actions import RecordDecision, RecordRecovery
from ft_launcher.core.events import ProgressSeen
from ft_launcher.core.evidence import NO_CYCLE
from ft_launcher.core.hardware import Ledger
from ft_launcher.core.state import JobState, Options, Phase
from ft_launcher.shell.journal import utc_now
from ft_launcher.shell.ledger import exported, ledger_in
from ft_launcher.shell.writer import Keep, Writer
from ft_launcher.state import document as doc
from ft_launcher.state.file import FtStateFile, Saved
from ft_launcher.state.run_folder import RunFolder
from monitors.timeouts import Timeout

LANE = "ft_state"
PROGRESS_EVERY_S = 2.0
SAVE_AFTER_S = 0.4
REFUSALS = 4
"""So many saves in a row that a newer file refuses are said, once."""


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


class Exporter:
    """One run's document. Only the controller's agent has one."""

    def __init__(self, config: Config, options: Options, folder: RunFolder, writer: Writer, say: Callable[[str], None]) -> None:
        self._config = config
        self._options = options
        self._writer = writer
        self._say = say
        self._file = FtStateFile(config.ft_state)
        self._cycles: dict[int, doc.CycleRecord] = {}
        self._iteration: int | None = None
        self._exported_at_s = 0.0
        self._refused = 0
        self._told_of_another = False
        self._client_known = False
        self._restarted = (-1, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._stated_at_s = float("-inf")
        self._generation = folder.generation
        loaded = self._file.load()
        for note in loaded.notes:
            say(note)
        self._found = loaded.document
        self.document = doc.begin_run(loaded.document, self._run_info(folder))
        self._ledger: Ledger = ledger_in(self.document, utc_now())
        self.document = doc.with_timeouts(self.document, self._fixed_timeouts(), utc_now())

    def _run_info(self, folder: RunFolder) -> doc.RunInfo:
        config, topology = self._config, self._config.topology
        degrees = {name: getattr(topology, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
        return doc.RunInfo(
            id=config.run_id,
            generation=folder.generation,
            started=utc_now(),
            script=" ".join(config.command.target),
            args=config.command.args,
            world_size=topology.world,
            nodes=config.nnodes,
            nproc_per_node=config.nproc,
            topology={**degrees, "order": topology.order},
            log_dir=str(folder.path),
            launcher=f"ft-launcher {__version__} (Python {sys.version.split()[0]})",
        )

    def _fixed_timeouts(self) -> dict[str, doc.SectionTimeout]:
        limits = {**self._config.timeouts.sections, doc.OUT_OF_SECTION: self._config.timeouts.out_of_section_s}
        return {name: doc.SectionTimeout(hard_s=s, soft_s=s * 2 / 3, why="fixed by the user or the default") for name, s in limits.items()}

    def learned(
        self, timeouts: Mapping[str, Timeout], distributions: Mapping[str, Mapping[str, object]], records: Mapping[str, object]
    ) -> None:
        """The sections' timeouts with their reasons and distributions, and everything that the next run of the same script starts with."""
        sections = {
            name: doc.SectionTimeout(
                hard_s=_finite(t.hard_s), soft_s=_finite(t.soft_s), why=t.reason, learned=t.learned, distribution=distributions.get(name)
            )
            for name, t in timeouts.items()
        }
        outside = self._fixed_timeouts()[doc.OUT_OF_SECTION]
        self.document = doc.with_timeouts(
            {**self.document, "learning": dict(records)}, {**sections, doc.OUT_OF_SECTION: outside}, utc_now()
        )
        self.save()

    def learned_before(self) -> object:
        """What an earlier run has left."""
        return self.document.get("learning")

    def restore_if_torn(self) -> None:
        """Before each cycle: what a foreign writer tore would kill every rank that reads it."""
        document = self.document
        self._writer.submit(LANE, lambda: self._noted(self._file.restore_if_torn(document)), Keep.ALWAYS)

    def save(self) -> None:
        """Queue the newest document soon: a recovery changes it five times within milliseconds, and disks are slow."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAVE_AFTER_S, self.flush)

    def flush(self) -> None:
        """Queue the newest document now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        document = self.document
        self._writer.submit(LANE, lambda: self._noted(self._file.save(document)), Keep.NEWEST)

    def _noted(self, saved: Saved) -> None:
        """A former controller's last words may be newer than our first ones: only what stays so is worth saying. Called on the writer thread alone."""
        self._refused = self._refused + 1 if saved.newer_there else 0
        for note in saved.notes if self._refused in (0, REFUSALS) else ():
            self._say(note)
        other = doc.still_written(saved.replaced, self._config.run_id, utc_now())
        if other is not None and not self._told_of_another:
            self._told_of_another = True
            self._say(
                f"{self._config.ft_state}: run {other} has written here within the last {2 * doc.STATED_EVERY_S:.0f} s and has not ended: "
                "if it goes on, each overwrites the other's state; give each a --log-dir or --ft-state of its own"
            )

    def committed(self, job: JobState, revision: int) -> None:
        """Phase, cycle and budgets as they now are."""
        now = utc_now()
        found, self._found = self._found, None
        if found is not None and (job.cycle != NO_CYCLE or job.phase is not Phase.FORMING):
            self._take_over(found)
        verdict = job.verdict
        run = self.document["run"] or {}
        since = run.get("since", now) if run.get("phase") == job.phase.value else now
        position = {"cycle": max(job.cycle, 0), "phase": job.phase.value, "since": since, "revision": revision, "reason": job.reason}
        if verdict is not None:
            position |= {"outcome": verdict.outcome.value, "exit_code": verdict.exit_code}
        self._state(now, **position)
        self._count(job)
        self._client_known = job.budgets.client_known
        self.document = exported(self.document, self._ledger, job, now, self._config.quarantine_days)
        self._ledger = job.hardware
        if job.phase is Phase.RUNNING and job.cycle not in self._cycles:
            self._cycles[job.cycle] = doc.CycleRecord(n=job.cycle, generation=self._generation, start=now, iteration_start=self._iteration)
            self.document = doc.with_cycle(self.document, self._cycles[job.cycle])
        self.save()

    def _take_over(self, found: doc.Document) -> None:
        """A former controller has written when the run began, where it is, and which cycles it has had; where that cannot be read, all this begins now."""
        self.document = doc.taken_over(self.document, found)
        iteration = (self.document["run"] or {}).get("iteration")
        self._iteration = iteration if isinstance(iteration, int) else None
        self._cycles = doc.cycles_in(self.document, self._generation)

    def _count(self, job: JobState) -> None:
        budgets, options = job.budgets, self._options
        for kind, used, limit in (
            ("restarts", budgets.restarts, options.max_restarts),
            ("platform_faults", budgets.platform, options.max_platform_faults),
            ("stuck_cycles", budgets.stuck_cycles, options.no_progress_cycles),
            ("reruns", budgets.reruns, options.max_reruns),
        ):
            self.document = doc.with_budget(self.document, kind, used, limit)

    def decided(self, decision: RecordDecision) -> None:
        """The settled cycle's row is complete."""
        known = self._cycles.get(decision.cycle)
        if known is None:
            return
        found = decision.culprit
        culprit = None
        if found is not None:
            culprit = doc.Culprit(found["rank"], doc.coords_of(found["coords"]), found["node"], found["slot"], found["why"])
        iterations = [r["iteration"] for r in decision.ranks.values() if r["iteration"] is not None]
        if known.recovery_s is None and decision.cause == "finished" and self._restarted[0] == decision.cycle:
            known = replace(known, recovery_s=round(self._restarted[1], 4))  # it was over before its first steps were seen
        self._cycles[decision.cycle] = replace(
            known,
            end=utc_now(),
            reason=decision.reason,
            cause=decision.cause,
            decision=decision.decision,
            culprit=culprit,
            reap_s=round(decision.reap_s, 4),
            iteration_end=max(iterations, default=None),
        )
        self.document = doc.with_cycle(self.document, self._cycles[decision.cycle])
        if iterations:
            self._iteration = max(iterations)
            self._state(utc_now(), iteration=self._iteration)
        self.save()

    def spares(self, count: int) -> None:
        """How many nodes could take another's place."""
        if (self.document["run"] or {}).get("spares") != count:
            self._state(utc_now(), spares=count)
            self.save()

    def recovered(self, recovery: RecordRecovery) -> None:
        """How long the outage before this cycle lasted."""
        known = self._cycles.get(recovery.cycle)
        if known is None:
            return
        if not recovery.complete and self._client_known:
            self._restarted = (recovery.cycle, recovery.seconds)  # the first steps are still to come
            return
        start = recovery.iteration if recovery.complete else known.iteration_start
        self._cycles[recovery.cycle] = replace(known, recovery_s=round(recovery.seconds, 4), iteration_start=start)
        self.document = doc.with_cycle(self.document, self._cycles[recovery.cycle])
        self.save()

    def progressed(self, progress: ProgressSeen, now_s: float) -> None:
        """Where training is, every couple of seconds."""
        if progress.iteration is None or progress.iteration == self._iteration:
            return
        known = self._cycles.get(progress.cycle)
        if known is not None and known.iteration_start is None:  # the first cycle has no recovery that would tell
            self._cycles[progress.cycle] = replace(known, iteration_start=progress.iteration)
            self.document = doc.with_cycle(self.document, self._cycles[progress.cycle])
        self._iteration = progress.iteration
        if now_s - self._exported_at_s >= PROGRESS_EVERY_S:
            self._exported_at_s = now_s
            self._state(utc_now(), iteration=progress.iteration)
            self.save()

    def alive(self) -> None:
        """Nothing has happened, and somebody is there who would have said so: readers can tell a quiet run from a launcher that is gone."""
        if asyncio.get_running_loop().time() - self._stated_at_s >= doc.STATED_EVERY_S:
            self._state(utc_now())
            self.save()

    def _state(self, now: str, **position: object) -> None:
        self._stated_at_s = asyncio.get_running_loop().time()
        self.document = doc.at_position(self.document, now, **position)
