"""Builders for core tests: a job machine with its nodes, and reports made tersely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ft_launcher.core.actions import Commit, JobAction, RecordDecision, Say, SetTimer
from ft_launcher.core.events import NodeJoined, ReportReceived, Timer
from ft_launcher.core.evidence import Address, NodeInfo, NodeReport, RankExit, RankProgress
from ft_launcher.core.job import JobMachine
from ft_launcher.core.state import JobState, Options
from ft_launcher.core.topology import Topology

EMPTY_REPORT: dict[str, Any] = {}


class Job:
    """A job machine and the latest report of each of its nodes; every action it ever returned is kept."""

    def __init__(self, nodes: int = 1, nproc: int = 4, **options: Any) -> None:
        self.now = 100.0
        world = nodes * nproc
        self.options = Options(nodes_wanted=nodes, nproc=nproc, **options)
        self.machine = JobMachine(JobState("job", 0), Topology.build(world=world, tp=2 if world % 2 == 0 else 1), self.options)
        self.names = [f"n{i}" for i in range(nodes)]
        self.reports: dict[str, NodeReport] = {}
        self.actions: list[JobAction] = list(self.machine.begin(self.now))

    @property
    def state(self) -> JobState:
        return self.machine.state

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def send(self, event: Any) -> list[JobAction]:
        before = self.machine.state
        actions = self.machine.handle(self.now, event)
        self.machine.validate()
        commits = [i for i, a in enumerate(actions) if isinstance(a, Commit)]
        if self.machine.state != before:
            assert commits, f"state changed without a commit: {event}"
            assert actions[commits[-1]].job == self.machine.state  # type: ignore[union-attr]
        if commits:
            assert commits[0] == 0, "durable before acting: the commit comes first"
        self.actions += actions
        return actions

    def report(self, node: str, **changes: Any) -> list[JobAction]:
        """Send a further cumulative report of `node` for the cycle it is in."""
        old = self.reports.get(node, NodeReport(node, 0, -1))
        new = replace(old, **{"sequence": old.sequence + 1, **changes})
        self.reports[node] = new
        return self.send(ReportReceived(new))

    def join(self, node: str, port: int = 1000) -> list[JobAction]:
        actions = self.send(NodeJoined(NodeInfo(node, "127.0.0.1:1", self.options.nproc, 0)))
        return actions + self.report(node, reaped=True, standby=Address("127.0.0.1", port))

    def start(self) -> None:
        """All nodes join; cycle 0 runs; all ranks are forked."""
        for name in self.names:
            self.join(name)
        self.forked()

    def forked(self) -> None:
        """Every node reports that it started the current cycle."""
        for name in self.names:
            self.reports[name] = NodeReport(name, 0, self.state.cycle, sequence=self.reports[name].sequence)
            self.report(name, started=True)

    def exit(self, node: str, rank: int, code: int | None = None, signal: int | None = None, **more: Any) -> list[JobAction]:
        exits = dict(self.reports[node].exits)
        exits[rank] = RankExit(rank, code, signal, failed_ns=more.pop("failed_ns", int(self.now * 1e9)), order=len(exits), **more)
        return self.report(node, exits=exits)

    def clear(self, node: str, iteration: int | None = None, client: bool = False, **more: Any) -> list[JobAction]:
        """The node kills what is left and acknowledges."""
        exits = dict(self.reports[node].exits)
        ranks = self.state.placement.ranks_on(node) if self.state.placement else ()
        for rank in ranks:
            exits.setdefault(rank, RankExit(rank, None, 9, int(self.now * 1e9), len(exits), ended=True))
        steps = more.pop("steps", 0)
        progress = {rank: RankProgress(iteration, steps, "step", 0.5, client) for rank in ranks}
        port = 1001 + self.state.cycle
        return self.report(node, **{"exits": exits, "progress": progress, "reaped": True, "standby": Address("127.0.0.1", port), **more})

    def timers(self) -> list[Timer]:
        return [a.timer for a in self.actions if isinstance(a, SetTimer)]

    def said(self) -> str:
        return "\n".join(a.text for a in self.actions if isinstance(a, Say))

    def decisions(self) -> list[RecordDecision]:
        return [a for a in self.actions if isinstance(a, RecordDecision)]
