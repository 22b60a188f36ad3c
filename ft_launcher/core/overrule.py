"""The part of the job machine that stops believing a health check: where it fails on all nodes at once, it is at fault itself (core/fitness.py says when).

What it said of a node is taken out of the reports as they come, so that nothing else in the machine has to know; that it is not believed is durable, for a successor must not believe
it again, and the agents must not run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ft_launcher.core.actions import Commit, JobAction, Say
from ft_launcher.core.events import JobEvent, ReportReceived
from ft_launcher.core.fitness import by_check, overruled
from ft_launcher.core.roster import Roster, placed
from ft_launcher.core.state import JobState, Options


class Overrules(ABC):
    """See the module."""

    state: JobState
    options: Options
    roster: Roster

    @abstractmethod
    def _become(self, **changes: Any) -> None: ...

    def _believed(self, event: JobEvent) -> JobEvent:
        """A report without what an overruled check says of its node; everything else as it is."""
        if isinstance(event, ReportReceived) and self.state.check_overruled and by_check(event.report.unfit):
            return ReportReceived(replace(event.report, unfit=None))
        return event

    def _overrule_at_start(self) -> list[JobAction]:
        """All nodes are there, every one of them has been checked, and every one fails."""
        nodes = self.roster.nodes
        whole = len(nodes) >= self.options.nodes_wanted and all(node in self.roster.reports for node in nodes)
        return self._overrule(nodes) if whole else []

    def _overrule_between(self) -> list[JobAction]:
        """All nodes that held ranks and are not lost have been checked after the cycle, and every one fails."""
        return self._overrule(node for node in placed(self.state) if node not in self.state.lost)

    def _overrule(self, nodes: Iterable[str]) -> list[JobAction]:
        if self.state.check_overruled:
            return []
        reports = [report for node in nodes if (report := self.roster.reports.get(node)) is not None]
        said = overruled({report.node_id: report.unfit for report in reports})
        if said is None:
            return []
        self._become(check_overruled=said)
        for report in reports:
            self.roster.keep(replace(report, unfit=None), self.state)
        return [Commit(self.state), Say(said, "error")]
