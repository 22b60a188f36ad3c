"""Leaving politely: the whole job, or some nodes while the rest goes on with spares. Rules 1 and 2 of the policy, as far as they are a matter of time.

A stop signal reaches agents, not the job. One node's alone may mean that the node shall go (a scheduler takes it back) or that the job shall stop and the others' signals are still
under way; two seconds tell. The job is meant where there is only one node, where every node that holds ranks was told, or where there are too few spares. Otherwise the
ranks of those nodes get the signal and leave (with whatever code: they have left, not finished), and spares take their places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ft_launcher.core.actions import Commit, JobAction, Say, SetTimer
from ft_launcher.core.events import DrainAsked, ReportReceived, Timer, TimerFired
from ft_launcher.core.evidence import NodeReport, signal_name
from ft_launcher.core.roster import Roster, placed
from ft_launcher.core.run import Run
from ft_launcher.core.state import JobState, Options, Outcome, Phase, Verdict

TOGETHER_S = 2.0
"""Signals that reach all nodes within this time mean the job."""
FOLLOW_S = 5.0
"""Once the leaving nodes' ranks are gone, the others, who may be leaving with them after a common checkpoint, get this long."""
SIGTERM = 15


class Drains(ABC):
    """The part of the job machine that lets ranks leave."""

    state: JobState
    options: Options
    roster: Roster
    _run: Run
    _wanted: set[str]

    @abstractmethod
    def _become(self, **changes: Any) -> None: ...

    @abstractmethod
    def _timer(self, timer: Timer, delay_s: float) -> SetTimer: ...

    @abstractmethod
    def _to_ending(self, said: list[JobAction], **changes: Any) -> list[JobAction]: ...

    @abstractmethod
    def _conclude(self, verdict: Verdict) -> list[JobAction]: ...

    @abstractmethod
    def _try_start(self) -> list[JobAction]: ...

    @abstractmethod
    def _all_left(self) -> bool: ...

    # -- who is meant? ------------------------------------------------------------------------------------------------------------------

    def _asked(self) -> dict[str, int]:
        """Nodes with ranks whose agents have got a stop signal, and which; those that leave already do not count."""
        told = {r.node_id: r.signals[0] for r in self.roster.current(self.state) if r.signals}
        return {n: number for n, number in told.items() if not self.state.leaves(n) and n not in self.state.lost}

    def _job_is_meant(self, asked: Mapping[str, int]) -> bool:
        holders = [n for n in placed(self.state) if n not in self.state.lost]
        gone = set(asked) | {n for n in holders if self.state.leaves(n)}
        return len(holders) <= 1 or gone >= set(holders) or len(gone) > len(self.roster.coming(self.state))

    def _free_spares(self) -> list[str]:
        return [s.node for s in self.roster.spares(self.state) if not s.quarantined_slots]

    def _on_stop_signals(self, asked: Mapping[str, int]) -> list[JobAction]:
        """While ranks run."""
        if self._job_is_meant(asked):
            return self._drain(next(iter(asked.values())))
        if self._run.asked:
            return []
        self._run.asked = True
        names = ", ".join(sorted(asked))
        said = f"{signal_name(next(iter(asked.values())))} to node {names}: if the others are not told within {TOGETHER_S:g} s, spares take its place"
        return [self._timer(Timer.DRAIN, TOGETHER_S), Say(said, "warning")]

    def _on_stop_signals_paused(self, asked: Mapping[str, int]) -> list[JobAction]:
        """Between two cycles: nothing starts before it is clear who is meant."""
        number = next(iter(asked.values()))
        if self._job_is_meant(asked):
            return self._conclude(Verdict(Outcome.STOPPED, 128 + number, f"stopped by {signal_name(number)}"))
        if self._run.asked:
            return []
        self._run.asked = True
        return [self._timer(Timer.DRAIN, TOGETHER_S)]

    def _on_drain_timer(self) -> list[JobAction]:
        """Two seconds after the first signal: who else was told?"""
        self._run.asked = False
        asked = self._asked()
        if not asked:
            return []
        if self.state.phase is Phase.RUNNING:
            return self._drain(next(iter(asked.values()))) if self._job_is_meant(asked) else self._drain_nodes(asked)
        if self._job_is_meant(asked):
            return self._on_stop_signals_paused(asked)
        return self._lost_to_drain(asked)

    # -- the job leaves -----------------------------------------------------------------------------------------------------------------

    def _drain(self, number: int) -> list[JobAction]:
        self._become(phase=Phase.DRAINING, stop_signal=number, leaving={}, reason=f"stopped by {signal_name(number)}")
        grace_s = self.options.term_grace_s
        asked = set(self._asked())
        others = set(placed(self.state)) - asked - set(self.state.lost)
        why = f" (no spare could take the place of node {', '.join(sorted(asked))})" if others and asked else ""
        said = Say(
            f"{signal_name(number)}{why}: passed on to all ranks, which have {grace_s:g} s to leave (a second signal ends them at once)",
            "warning",
        )
        begun: list[JobAction] = [Commit(self.state), said, self._timer(Timer.TERM_GRACE, grace_s)]
        return [*begun, *(self._to_ending([]) if self._nobody_left() else [])]

    # -- nodes leave --------------------------------------------------------------------------------------------------------------------

    def _drain_nodes(self, asked: Mapping[str, int]) -> list[JobAction]:
        number = next(iter(asked.values()))
        self._become(phase=Phase.DRAINING, reason=f"node {', '.join(sorted(asked))} leaves", **self._also_leaving(asked))
        grace_s = self.options.term_grace_s
        said = f"node {', '.join(sorted(asked))} leaves: {signal_name(number)} is passed on to its ranks, which have {grace_s:g} s; a spare takes its place"
        return [Commit(self.state), Say(said, "warning"), self._timer(Timer.TERM_GRACE, grace_s), *self._when_leavers_left()]

    def _also_leaving(self, asked: Mapping[str, int]) -> dict[str, Any]:
        agents = {n: self.roster.incarnation(n) for n in asked}
        return {"leaving": {**self.state.leaving, **agents}, "leave_signal": next(iter(asked.values()))}

    def _lost_to_drain(self, asked: Mapping[str, int]) -> list[JobAction]:
        """Between two cycles these nodes have nothing to hand over: their places are free."""
        lost = {**self.state.lost, **dict.fromkeys(asked, "it was asked to leave")}
        self._become(lost=lost, **self._also_leaving(asked))
        return [Commit(self.state), Say(f"node {', '.join(sorted(asked))} leaves; a spare takes its place"), *self._try_start()]

    def on_drain_asked(self, event: DrainAsked) -> list[JobAction]:
        """Somebody wants this node out (`ft-launch drain`). Without a spare it stays until there is one: nobody has asked for the end of the job."""
        node = event.node_id
        if node not in self.roster.nodes or self.state.leaving.get(node) == self.roster.incarnation(node):
            return []
        if node not in placed(self.state):
            self._become(**self._also_leaving({node: SIGTERM}))
            return [Commit(self.state), Say(f"node {node} holds no ranks and leaves")]
        self._wanted.add(node)
        going = self._let_wanted_go()
        said = f"node {node} is to be drained: it goes as soon as a spare can take its place"
        return [*going, *([Say(said, "warning")] if node in self._wanted else [])]

    def _let_wanted_go(self) -> list[JobAction]:
        """Nodes that are to be drained go as soon as ranks run everywhere and there are spares for them."""
        wanted = sorted(n for n in self._wanted if n in placed(self.state) and not self.state.leaves(n))
        if not wanted or self.state.phase is not Phase.RUNNING or not self._run.all_started:
            return []
        going = wanted[: len(self._free_spares())]
        self._wanted = set(wanted) - set(going)
        return self._drain_nodes(dict.fromkeys(going, SIGTERM)) if going else []

    # -- while they leave ---------------------------------------------------------------------------------------------------------------

    def on_report_draining(self, event: ReportReceived) -> list[JobAction]:
        """Wait until every rank has left, or somebody loses patience."""
        self.roster.keep(event.report, self.state)
        impatient = len(event.report.signals) > 1 or event.report.platform_fault
        if impatient or self._all_left() or (event.report.reaped and self._nobody_left()):
            return self._to_ending([])
        return [] if self.state.stop_signal is not None else self._on_report_leaving(event.report)

    def _on_report_leaving(self, report: NodeReport) -> list[JobAction]:
        """Some nodes leave; a fault elsewhere ends the cycle at once, and more signals may turn it into the end of the job."""
        asked = self._asked()
        if asked and self._job_is_meant(asked):
            number = next(iter(asked.values()))
            self._become(stop_signal=number, leaving={}, reason=f"stopped by {signal_name(number)}")
            return [Commit(self.state), Say(f"{signal_name(number)} to the other nodes, too: the job stops", "warning")]
        if asked:
            self._become(**self._also_leaving(asked))
            return [Commit(self.state), Say(f"node {', '.join(sorted(asked))} leaves, too", "warning")]
        if not self.state.leaves(report.node_id) and any(e.failure for e in report.exits.values()):
            return self._to_ending([])
        return self._when_leavers_left()

    def _when_leavers_left(self) -> list[JobAction]:
        """Their ranks may have gone before it was known that they should: a signal often reaches every process of a machine."""
        if self._run.settling or not self._have_left(n for n in placed(self.state) if self.state.leaves(n)):
            return []
        self._run.settling = True
        return [self._timer(Timer.SETTLE, FOLLOW_S)]

    def _nobody_left(self) -> bool:
        """No rank is left anywhere: all have ended, were never started, or their node is lost."""
        return self._all_left() or self._have_left(n for n in placed(self.state) if n not in self.state.lost)

    def _have_left(self, nodes: Iterable[str]) -> bool:
        current = {r.node_id: r for r in self.roster.current(self.state)}
        reports = [current.get(n) for n in nodes]
        return all(r is not None and (r.reaped or len(r.exits) == self.options.nproc) for r in reports)

    def on_timer_draining(self, event: TimerFired) -> list[JobAction]:
        """The grace is over."""
        if event.timer is Timer.DRAIN:
            self._run.asked = False  # who is meant is asked again once the cycle is settled
        if event.timer is Timer.SETTLE:
            return self._to_ending([])
        if event.timer is not Timer.TERM_GRACE:
            return []
        said = f"ranks still running {self.options.term_grace_s:g} s after {signal_name(self.state.stop_signal or self.state.leave_signal)} are ended"
        return self._to_ending([Say(said, "warning")])
