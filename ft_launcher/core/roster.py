"""The roster: which nodes there are, what each last reported, and which of them the next cycle can use.

It answers questions about the present (who has acknowledged, who is ready, who could take whose place) and remembers reports; it decides nothing. Everything in it
can be rebuilt from the store's `nodes/` and `reports/`. A job has thousands of nodes and each of them reports, so what every report asks is counted, not searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ft_launcher.core.counts import CycleCounts
from ft_launcher.core.evidence import NodeInfo, NodeReport
from ft_launcher.core.hardware import kept_off, off_limits, quarantined_slots
from ft_launcher.core.placement import Placement, Spare, choose_spare, order_nodes
from ft_launcher.core.state import JobState, Options


def placed(state: JobState) -> tuple[str, ...]:
    """The nodes that hold ranks, in rank order."""
    return state.placement.nodes if state.placement else ()


MOST_NAMED = 8


class Roster:
    """Nodes and their latest reports. `arrivals`: the order in which nodes first reported a failure of the current cycle. `last_resort`: nothing better came in time, so nodes with
    devices in quarantine are taken, too.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.nodes: dict[str, NodeInfo] = {}
        self.reports: dict[str, NodeReport] = {}
        self.arrivals: dict[str, int] = {}
        self.labels: dict[str, Mapping[str, str]] = {}
        self.devices: dict[str, tuple[str, ...]] = {}
        self._counted: CycleCounts | None = None
        self._unfit: dict[str, str] = {}
        self._warm: set[str] = set()
        self.last_resort = False

    def join(self, node: NodeInfo) -> None:
        """Note a node; it counts once it has reported. What a predecessor under the same id reported counts no more."""
        known = self.reports.get(node.node_id)
        if known is not None and known.incarnation != node.incarnation:
            self._put(node.node_id, None)
        self.nodes[node.node_id] = node
        self.labels[node.node_id] = node.labels
        self.devices[node.node_id] = node.devices

    def replaced(self, node: NodeInfo, state: JobState) -> bool:
        """True when this agent is not the one that was given ranks: those ended with the former."""
        given = state.incarnations.get(node.node_id)
        return given is not None and node.node_id in self._holders(state) and node.node_id not in state.lost and given != node.incarnation

    def leave(self, node_id: str, state: JobState) -> None:
        """Forget a node. What it has reported stays: evidence of a placed one, and should the same agent come back, it will not say it again."""
        self.nodes.pop(node_id, None)

    def stale(self, report: NodeReport, state: JobState) -> bool:
        """True for a report of another generation, an overtaken one, or one of an old cycle from a node that holds ranks."""
        known, node = self.reports.get(report.node_id), self.nodes.get(report.node_id)
        if report.generation != state.generation or (node is not None and report.incarnation != node.incarnation):
            return True
        if known is not None and known.incarnation == report.incarnation and report.sequence <= known.sequence:
            return True
        return report.node_id in self._holders(state) and report.node_id not in state.lost and report.cycle != state.cycle

    def keep(self, report: NodeReport, state: JobState) -> None:
        """Remember a report, and when its node first told of a failure."""
        self._put(report.node_id, report)
        failed = report.hangs or report.platform_fault or any(e.failure for e in report.exits.values())
        if failed and report.cycle == state.cycle:
            self.arrivals.setdefault(report.node_id, len(self.arrivals))

    def _put(self, node_id: str, report: NodeReport | None) -> None:
        """The only way reports change: what is counted of them changes with them."""
        if self._counted is not None:
            self._counted.change(self.reports.get(node_id), report)
        self._unfit.pop(node_id, None)
        self._warm.discard(node_id)
        if report is None:
            del self.reports[node_id]
            return
        self.reports[node_id] = report
        if report.devices:
            self.devices[node_id] = report.devices
        if report.unfit:
            self._unfit[node_id] = report.unfit
        elif report.reaped and report.standby is not None:
            self._warm.add(node_id)

    def _counts(self, state: JobState) -> CycleCounts:
        """Of this cycle in this placement; counted anew when either is another one."""
        if self._counted is None or self._counted.cycle != state.cycle or self._counted.placement is not state.placement:
            self._counted = CycleCounts(state.cycle, state.placement, self.reports)
        return self._counted

    def _holders(self, state: JobState) -> frozenset[str]:
        """The nodes that hold ranks."""
        return self._counts(state).members

    def incarnation(self, node_id: str) -> str:
        """Which agent the node has now."""
        node = self.nodes.get(node_id)
        return node.incarnation if node is not None else ""

    def current(self, state: JobState) -> list[NodeReport]:
        """The placed nodes' reports of this cycle, in rank order."""
        found = (self.reports.get(n) for n in placed(state))
        return [r for r in found if r is not None and r.cycle == state.cycle]

    def left(self, state: JobState) -> int:
        """How many ranks of this cycle have ended, however."""
        return self._counts(state).left

    def started(self, state: JobState) -> bool:
        """Every rank of this cycle has been forked."""
        return self._counts(state).started == len(placed(state))

    def finished_some(self, state: JobState) -> bool:
        """A rank of this cycle has left with 0."""
        return self._counts(state).succeeded > 0

    def unacknowledged(self, state: JobState) -> list[str]:
        """Placed nodes that have neither cleared this cycle nor been declared lost."""
        cleared = self._counts(state).cleared
        return [n for n in placed(state) if n not in cleared and n not in state.lost]

    def holes(self, state: JobState) -> dict[str, str]:
        """Nodes that cannot take ranks, and why: lost placed ones, and any that says it is unfit."""
        holders = self._holders(state)
        unfit = {n: why for n, why in self._unfit.items() if n in self.nodes or n in holders}
        return unfit | {n: why for n, why in state.lost.items() if n in holders and not self.ready(n, state)}

    def ready(self, node_id: str, state: JobState) -> bool:
        """Cleared, fit and warm. A node that has run nothing yet is warm once its store listens: its zygote has finished importing by then.

        A lost node is ready again once it is registered again and has cleared its ranks, or once a new agent of its id is warm.
        """
        report = self.reports.get(node_id)
        if report is None or not report.reaped or report.unfit is not None or node_id not in self.nodes:
            return False
        if report.incarnation in (state.ruled_out.get(node_id), state.leaving.get(node_id)):
            return False
        same_agent = report.incarnation == state.incarnations.get(node_id)
        if node_id in state.lost and same_agent and report.cycle != state.cycle:
            return False
        return report.standby is not None or report.cycle == state.cycle >= 0

    def next_placement(self, state: JobState) -> Placement | None:
        """The same places for everybody who is still there, spares in exactly the holes; None while nodes are missing."""
        found = self._first_placement(state) if state.placement is None else self._next_placement(state, state.placement)
        if found is None:
            return None
        return kept_off(found, off_limits(state.hardware, state.rerun), self.devices) or found

    def _next_placement(self, state: JobState, placement: Placement) -> Placement | None:
        known = self.holes(state)
        holes = [n for n in placed(state) if n in state.lost or not self.ready(n, state)]
        if any(n not in known and n not in state.lost for n in holes):
            return None
        return self._filled(placement, holes, state)

    def _filled(self, placement: Placement, holes: list[str], state: JobState) -> Placement | None:
        """Spares in the holes. Where they are too few, nodes that have come back keep their own: the spares of last resort."""
        spares = [s for s in self.spares(state) if not s.quarantined_slots]
        if self.last_resort and len(spares) < len(holes):
            spares += [replace(s, quarantined_slots=frozenset()) for s in self.spares(state) if s.quarantined_slots]
        returned = [n for n in holes if self.ready(n, state)]
        kept = returned[: max(0, len(holes) - len(spares))]
        for hole in (n for n in holes if n not in kept):
            chosen = choose_spare(self.labels.get(hole, {}), spares).node
            if chosen is None:
                return None
            placement = placement.replace(hole, chosen)
            spares = [s for s in spares if s.node != chosen]
        return placement

    def late(self, state: JobState) -> list[str]:
        """Placed nodes that keep the next cycle waiting: not ready, or the first one, whose store does not listen yet."""
        known = placed(state)
        return [
            n for n in known if n not in state.lost and (not self.ready(n, state) or (n == known[0] and self.reports[n].standby is None))
        ]

    def _first_placement(self, state: JobState) -> Placement | None:
        """Without nodes that have a device in quarantine, unless no other can ever join."""
        if len(self._warm) < self.options.nodes_wanted:
            return None  # nobody is ready who is not warm: while thousands of nodes come, most reports end here
        ready = [n for n in self.nodes.values() if self.ready(n.node_id, state)]
        if self.options.can_join:
            sound = [n for n in ready if not self.quarantined(n.node_id, state)]
            ready = sound if len(sound) >= self.options.nodes_wanted or not self.last_resort else ready
        if len(ready) < self.options.nodes_wanted:
            return None
        names = order_nodes((n.node_id, n.order) for n in ready)
        return Placement(nodes=tuple(names[: self.options.nodes_wanted]), nproc=self.options.nproc)

    def spares(self, state: JobState) -> list[Spare]:
        """Who could take a hole now; nobody who has been told to stop."""
        holders = self._holders(state)
        free = [n for n in self.nodes.values() if n.node_id not in holders and self.ready(n.node_id, state)]
        free = [n for n in free if not self.reports[n.node_id].signals]
        failures = state.budgets.node_failures
        return [Spare(n.node_id, n.labels, bool(failures.get(n.node_id)), self.quarantined(n.node_id, state)) for n in free]

    def coming(self, state: JobState) -> list[str]:
        """Nodes without ranks that are spares, or will be once they are ready."""
        holders = self._holders(state)
        free = [n for n in self.nodes.values() if n.node_id not in holders and state.leaving.get(n.node_id) != n.incarnation]
        told = {n for n, report in self.reports.items() if report.signals or report.unfit}
        return [n.node_id for n in free if n.node_id not in told and not self.quarantined(n.node_id, state)]

    def quarantined(self, node_id: str, state: JobState) -> frozenset[int]:
        """The slots of a node that no rank may use."""
        return quarantined_slots(state.hardware, self.devices, node_id, self.options.nproc)

    def missing(self, state: JobState) -> str:
        """Who is there and who is not, for people who wait."""
        ready = [n for n in self.nodes if self.ready(n, state)]
        unfit = {n: why for n, why in sorted(self._unfit.items()) if n in self.nodes}
        why_not = "".join(f"; {n} is unfit: {why}" for n, why in list(unfit.items())[:MOST_NAMED])
        if state.placement is not None:
            return f"still {self.waiting_for(state)}; {_listed('ready', ready)}{why_not}"
        barred = [n for n in ready if self.quarantined(n, state)] if self.options.can_join else []
        ready = [n for n in ready if n not in barred]
        preparing = [n for n in self.nodes if n not in ready and n not in barred and n not in unfit]
        wanted = self.options.nodes_wanted - len(self.nodes)
        parts = [
            _listed("ready", ready),
            _listed("preparing", preparing) if preparing else "",
            _listed("with devices in quarantine", barred) if barred else "",
            f"{wanted} more to come" if wanted > 0 else "",
        ]
        return (
            f"still waiting for nodes: {len(ready)} of {self.options.nodes_wanted} are ready ({'; '.join(p for p in parts if p)}){why_not}"
        )

    def waiting_for(self, state: JobState) -> str:
        """What the next cycle still needs, for people."""
        missing = [n for n in placed(state) if not self.ready(n, state)]
        gone = [n for n in missing if n in state.lost]
        if gone:
            return f"waiting up to {self.options.spare_wait_s:g} s for a spare in place of {', '.join(gone)}"
        return f"waiting for {', '.join(missing) or 'the next store'} to be ready again"


def _listed(what: str, nodes: list[str]) -> str:
    """`ready: a, b`; the first few of many."""
    names = sorted(nodes)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{what}: {', '.join(names[:MOST_NAMED]) or 'none'}{more}"
