"""Run folders as a launcher leaves them, made without one: ft_state.json, journal, incidents with stacks, verdict.

The state file and the incident folders are written by the launcher's own code; the journal lines have the form of a real run's (the live test compares with one). `Run` is a run of any
size in the middle of its life; what happens next is told to it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ft_launcher.core.topology import Topology
from ft_launcher.shell.incident import FirstCause, Incident, RankAtIncident, Verdict, write_verdict
from ft_launcher.shell.stack_files import IncidentWithStacks
from ft_launcher.state import document as doc
from ft_launcher.state.file import FtStateFile
from ft_launcher.state.run_folder import RunFolder, create_run_folder
from monitors.timeouts import TimeoutLearner

START = datetime(2026, 3, 1, 8, 0, 0, tzinfo=UTC)

WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000000 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/job/train/parallel.py", line 211 in reduce_gradients
  File "/job/train/loop.py", line 88 in step
  File "/job/train/main.py", line 41 in main
  File "/job/train/main.py", line 60 in <module>
"""
READING = """Current thread 0x00007f0000000000 (most recent call first):
  File "/job/train/data.py", line 132 in read_shard
  File "/job/train/data.py", line 97 in batches
  File "/job/train/loop.py", line 71 in step
  File "/job/train/main.py", line 41 in main
  File "/job/train/main.py", line 60 in <module>
"""


@dataclass
class Run:
    """One launch of `tp` x `dp` x `pp` ranks on nodes of `nproc` slots, whose clock is `now`."""

    log_dir: Path
    tp: int = 2
    dp: int = 2
    pp: int = 2
    nproc: int = 8
    run_id: str = "gpt-8b"
    now: datetime = START
    cycle: int = -1
    revision: int = 5
    iteration: int = 0
    folder: RunFolder = field(init=False)
    document: dict[str, Any] = field(init=False)
    nodes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.topology = Topology.build(world=self.tp * self.dp * self.pp, tp=self.tp, pp=self.pp)
        self.world = self.topology.world
        self.nproc = min(self.nproc, self.world)
        self.nodes = [f"node{i:03d}" for i in range(self.world // self.nproc)]
        self.folder = create_run_folder(self.log_dir, self.run_id)
        self.file = FtStateFile(self.log_dir / "ft_state.json")
        degrees: dict[str, int | str] = {name: getattr(self.topology, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
        info = doc.RunInfo(
            self.run_id, self.folder.generation, self.t, "pretrain_gpt.py", ("--num-layers", "32"), self.world, len(self.nodes), self.nproc,
            {**degrees, "order": self.topology.order}, str(self.folder.path), "ft-launcher 0.1.0 (Python 3.11.7)",
        )  # fmt: skip
        self.document = doc.begin_run(self.file.load().document, info)
        self.rows: dict[int, doc.CycleRecord] = {}
        self.job("forming", "waiting for nodes")

    @property
    def t(self) -> str:
        return self.now.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def line(self, kind: str, cycle: int | None, rev: int | None = None, node: str | None = None, **fields: Any) -> None:
        """One line in a node's journal (the first node is the controller's)."""
        own = {
            "t": self.t,
            "mono_ns": int(self.now.timestamp() * 1e9),
            "node": node or self.nodes[0],
            "rev": rev,
            "cycle": cycle,
            "kind": kind,
        }
        with self.folder.journal(own["node"]).open("a") as file:
            file.write(json.dumps({**own, **fields}, separators=(",", ":")) + "\n")

    def job(self, phase: str, reason: str, verdict: dict[str, Any] | None = None) -> None:
        """A commit of the job."""
        self.revision += 1
        placement = {"nodes": self.nodes, "nproc": self.nproc, "slots": {}} if self.cycle >= 0 else None
        job = {"run_id": self.run_id, "phase": phase, "cycle": self.cycle, "placement": placement, "reason": reason, "verdict": verdict}
        self.line("job", self.cycle, self.revision, job=job)
        ended = {} if verdict is None else {"outcome": verdict["outcome"], "exit_code": verdict["exit_code"]}
        at = {"cycle": max(0, self.cycle), "phase": phase, "since": self.t, "revision": self.revision, "reason": reason, **ended}
        self.document = doc.at_position(self.document, self.t, **at)

    def start_cycle(self, iteration: int | None = None, recovery_s: float | None = None, forked: bool = True) -> None:
        """The next cycle; its ranks are forked unless told otherwise."""
        self.cycle += 1
        self.job("running", f"cycle {self.cycle} runs")
        began = self.iteration if iteration is None else iteration
        row = doc.CycleRecord(self.cycle, self.folder.generation, self.t, iteration_start=began, recovery_s=recovery_s)
        self._row(row)
        if iteration is not None:
            self.iteration = iteration
        if forked:
            self.fork(range(self.world))
        if recovery_s is not None:
            self.line("recovered", self.cycle, self.revision, seconds=recovery_s, iteration=iteration)

    def fork(self, ranks: range) -> None:
        for i, node in enumerate(self.nodes):
            own = range(max(ranks.start, i * self.nproc), min(ranks.stop, (i + 1) * self.nproc))
            if own:
                self.line("forked", self.cycle, node=node, pids={str(r): 1000 + r for r in own})

    def _row(self, row: doc.CycleRecord) -> None:
        self.rows[row.n] = row
        self.document = doc.with_cycle(self.document, row)

    def progress(self, iteration: int, seconds: float = 60.0) -> None:
        self.later(seconds)
        self.iteration = iteration
        self.document = doc.at_position(self.document, self.t, iteration=iteration)

    def find(self, kind: str, rank: int, since_s: float, limit_s: float, section: str | None = "step") -> None:
        reason = f"rank {rank} has been in section '{section}' (iteration {self.iteration}) for {since_s:.1f} s; its limit is {limit_s:g} s"
        fields = {"rank": rank, "section": section, "since_s": since_s, "limit_s": limit_s, "reason": reason}
        self.line(f"finding-{kind}", self.cycle, node=self.nodes[rank // self.nproc], **fields)

    def culprit(self, rank: int, why: str) -> doc.Culprit:
        at = self.topology.coords(rank)
        coords = {name: getattr(at, name) for name in ("tp", "cp", "dp", "pp")}
        return doc.Culprit(rank, coords, self.nodes[rank // self.nproc], rank % self.nproc, why)

    def end_cycle(self, cause: str, rank: int | None, why: str, decision: str = "restart", reap_s: float = 0.02) -> None:
        """The decision: journal and the row of ft_state."""
        who = self.culprit(rank, why) if rank is not None else None
        place = f"rank {rank} ({self.topology.coords(rank)}; node {who.node} slot {who.slot})" if who and rank is not None else "the job"
        reason = (
            f"{place} {'hangs' if cause == 'hang' else 'failed'}: {why} (restart {self.cycle + 1} of 3)" if cause != "finished" else why
        )
        said = (
            {"rank": rank, "coords": str(self.topology.coords(rank)), "node": who.node, "slot": who.slot, "why": why}
            if who and rank is not None
            else None
        )
        self.line("decision", self.cycle, self.revision, cause=cause, rule=9, reason=reason, decision=decision, culprit=said, reap_s=reap_s)
        row = self.rows[self.cycle]
        ended = {
            "end": self.t,
            "reason": reason,
            "cause": cause,
            "decision": decision,
            "culprit": who,
            "reap_s": reap_s,
            "iteration_end": self.iteration,
        }
        self._row(doc.CycleRecord(**{**{f: getattr(row, f) for f in row.__slots__}, **ended}))

    def incident(self, cause: str, rank: int, why: str, stacks: int | None = None) -> None:
        """The folder, with stacks of the first `stacks` ranks (all unless given): everybody waits, the culprit reads."""
        ranks = {r: RankAtIncident(self.iteration, "step", 9.6, None) for r in range(self.world)}
        texts = {r: READING if r == rank else WAITING for r in range(self.world if stacks is None else stacks)}
        progress = {
            r: {"state": "S", "place": "collective:all_reduce parallel.py:reduce_gradients", "steps": 12} for r in range(self.world)
        }
        log = self.folder.rank_log(self.cycle, rank)
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"iteration {self.iteration}: loss 2.31\nopening shard 00412 <b>&amp;</b>\n")
        found = Incident(
            self.cycle, cause, why, "restart", self.culprit(rank, why), ranks, progress, texts, {rank: log}, {"rule": 9, "settle_s": 0.04}
        )
        IncidentWithStacks(self.folder.path / "incidents", found, self.topology)()

    def sections(self, seed: int = 1) -> None:
        """Timeouts of a run that has learned them."""
        dice = random.Random(seed)
        timeouts = {}
        for name, usual_s, ceiling_s, count in (("setup", 14.0, 600.0, 3), ("step", 1.4, 180.0, 4000), ("checkpointing", 9.0, 420.0, 90)):
            learner = TimeoutLearner(ceiling_s)
            for _ in range(count):
                learner.observe(usual_s * dice.lognormvariate(0, 0.18))
            t = learner.decide()
            timeouts[name] = doc.SectionTimeout(t.hard_s, t.reason, t.soft_s, t.learned, learner.distribution())
        outside = doc.SectionTimeout(300.0, "fixed by the user or the default", 200.0)
        self.document = doc.with_timeouts(self.document, {**timeouts, doc.OUT_OF_SECTION: outside}, self.t)

    def hardware(self) -> None:
        soon = (self.now + timedelta(hours=20)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found = {"at": self.t, "verdict": "persistent"}
        self.document = doc.with_device(
            self.document, f"{self.nodes[-1]}/{self.nproc - 1}", suspicions=3, verdict=found, quarantine_until=soon
        )
        self.document = doc.with_device(self.document, f"{self.nodes[0]}/0", suspicions=1, verdict={"at": self.t, "verdict": "transient"})

    def budgets(self, used: int = 1) -> None:
        for kind, count, limit in (("restarts", used, 3), ("platform_faults", 0, 3), ("stuck_cycles", 0, None)):
            self.document = doc.with_budget(self.document, kind, count, limit)

    def conclude(self, outcome: str, exit_code: int, reason: str) -> None:
        verdict = {"outcome": outcome, "exit_code": exit_code, "reason": reason}
        self.job("done", reason, verdict)
        row = next((c["culprit"] for c in reversed(self.document["cycles"]) if c["culprit"]), None)
        cause = FirstCause(row["rank"], row["coords"], row["node"], row["slot"], "hang", None) if row is not None and exit_code else None
        write_verdict(self.folder.path, Verdict(outcome, exit_code, reason, self.cycle + 1, cause))

    def save(self) -> None:
        self.file.save(self.document)


def storied(log_dir: Path, *, culprit: int = 5, stacks: int | None = None, **shape: int) -> Run:
    """A run with a history: a crash, later a hang that was restarted 0.3 s ago, training again."""
    run = Run(log_dir, **shape)  # type: ignore[arg-type]
    run.later(2)
    run.start_cycle(iteration=0)
    run.budgets(0)
    run.sections()
    run.hardware()
    run.progress(840, 1500)
    run.end_cycle("crash", 1, "it was killed by SIGKILL (9)")
    run.incident("crash", 1, "it was killed by SIGKILL (9)", stacks=0)
    run.start_cycle(iteration=800, recovery_s=0.41)
    run.progress(4100, 5200)
    standing(run, culprit)
    run.end_cycle(
        "hang",
        culprit,
        f"it is in user code (data.py:read_shard) in section 'step' of iteration {run.iteration}, for 9.6 s; the others wait in all_reduce",
    )
    run.incident(
        "hang", culprit, f"it is in user code (data.py:read_shard) in section 'step' of iteration {run.iteration}, for 9.6 s", stacks=stacks
    )
    run.start_cycle(iteration=4000, recovery_s=0.63)
    run.budgets(2)
    run.progress(4120, 170)
    run.sections(2)
    run.save()
    return run


def standing(run: Run, culprit: int) -> None:
    """Everybody is suspect, then past the limit."""
    ranks = [*range(min(run.world, 64)), culprit]
    for rank in ranks:
        run.find("suspect", rank, 6.2, 9.3)
    run.later(3.4)
    for rank in ranks:
        run.find("hung", rank, 9.62, 9.3)
