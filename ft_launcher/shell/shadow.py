"""`--hang-action log`: what would have been done about a hang, in the sentence that a decision would have had; nothing is ended.

A node that holds all ranks of the job names the culprit as a decision would. Of several nodes each speaks of its own ranks and names nobody: the culprit may be elsewhere, and where all
ranks stand is gathered only when a cycle ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from ft_launcher.core.causes import Evidence
from ft_launcher.core.evidence import Hang, NodeReport, RankProgress
from ft_launcher.core.policy import describe_hang
from ft_launcher.core.state import JobState, Options
from ft_launcher.core.topology import Topology
from monitors.attribution import attribute
from monitors.detect import Finding


class Shadow:
    """One node's. `knows()`: the job and this node's report; `progress()`: where its ranks are; `say` takes a line."""

    def __init__(
        self,
        topology: Topology,
        knows: Callable[[], tuple[JobState | None, NodeReport]],
        progress: Callable[[], Mapping[int, RankProgress]],
        say: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._knows = knows
        self._progress = progress
        self._say = say
        self._hangs: dict[int, Hang] = {}
        self._said: set[tuple[int, int, int]] = set()

    def found(self, finding: Finding) -> None:
        """A rank has stood still beyond its limit. Told at once, with whatever else the same look at the ranks finds; those that follow because of it are not told again."""
        if not self._hangs:
            asyncio.get_running_loop().call_soon(self._tell)
        self._hangs[finding.rank] = Hang(finding.rank, finding.section, finding.since_s, finding.limit_s, finding.iteration, finding.reason)

    def _tell(self) -> None:
        hangs, self._hangs = self._hangs, {}
        job, report = self._knows()
        where = self._progress()
        if job is None or not where or report.cycle != job.cycle:
            return  # the cycle has ended meanwhile
        options = Options(nodes_wanted=1, nproc=len(where), attribute=attribute)
        evidence = Evidence(job, self._topology, options, [replace(report, hangs=hangs, progress=where)], {}, 0.0)
        said, rank = self._sentence(evidence, all_here=len(where) == self._topology.world)
        once = (job.cycle, rank, where[rank].ended if rank in where else -1)
        if once not in self._said:
            self._said.add(once)
            self._say(f"{said} (only said, --hang-action log)")

    @staticmethod
    def _sentence(evidence: Evidence, all_here: bool) -> tuple[str, int]:
        """What is said, and of which rank (-1: nobody was named)."""
        if all_here:
            said, culprit = describe_hang(evidence)
            return said, culprit.rank if culprit is not None else -1
        first = evidence.hangs()[0][1]
        return f"{evidence.place(first.rank)} hangs: {first.reason}; whose hang it is would be told from the ranks of all nodes", first.rank
