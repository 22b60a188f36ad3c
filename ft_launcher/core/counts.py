"""What the reports of one cycle add up to, kept up to date report by report: at 10,000 ranks nobody walks over all nodes for each of them.

It counts and compares; what follows from a count is the job machine's. A twin that walks over everything is in its tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_launcher.core.evidence import NodeReport
from ft_launcher.core.placement import Placement


class CycleCounts:
    """Of the placed nodes' reports of `cycle`: how many have `started` all their ranks, which have `cleared` them; how many ranks have `left`, and how many `succeeded`."""

    def __init__(self, cycle: int, placement: Placement | None, reports: Mapping[str, NodeReport]) -> None:
        self.cycle = cycle
        self.placement = placement
        self.members = frozenset(placement.nodes if placement is not None else ())
        self.started = self.left = self.succeeded = 0
        self.cleared: set[str] = set()
        for name in self.members:
            self.change(None, reports.get(name))

    def change(self, old: NodeReport | None, new: NodeReport | None) -> None:
        """A node's report was replaced by another."""
        if old is not None and self._counts(old):
            self._add(old, -1)
            self.cleared.discard(old.node_id)
        if new is not None and self._counts(new):
            self._add(new, 1)
            if new.reaped:
                self.cleared.add(new.node_id)

    def _counts(self, report: NodeReport) -> bool:
        return report.cycle == self.cycle and report.node_id in self.members

    def _add(self, report: NodeReport, sign: int) -> None:
        self.started += sign * report.started
        self.left += sign * len(report.exits)
        self.succeeded += sign * sum(e.success for e in report.exits.values())
