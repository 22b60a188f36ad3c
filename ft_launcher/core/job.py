"""The job machine: the controller's mind. `handle(now, event) -> actions` is its only mutator.

A cycle's life takes two transactions: its *end*, decided at the first fault, and the next one's *start*, decided when every node of the placement has acknowledged
that nothing is left (or is lost): only then are causes settled, budgets charged and terminal decisions taken, with all the evidence in. It knows the durable state,
the roster of nodes and when things happened to it; it never touches a process, a socket or a clock. A successor rebuilds it from the store alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ft_launcher.core.actions import Commit, JobAction, RecordRecovery, Say, SetTimer
from ft_launcher.core.causes import Evidence, some
from ft_launcher.core.decision import NOT_ENOUGH_NODES, RERUN_ELSEWHERE, RESULT_REJECTED, Decision
from ft_launcher.core.drain import Drains
from ft_launcher.core.events import JobEvent, NodeJoined, NodeLost, ProgressSeen, ReportReceived, Timer, TimerFired
from ft_launcher.core.evidence import Address, NodeReport, signal_name
from ft_launcher.core.hardware import exclusions
from ft_launcher.core.job_table import EDGES, TRANSITIONS
from ft_launcher.core.machine import IGNORE, Story
from ft_launcher.core.overrule import Overrules
from ft_launcher.core.placement import Placement, successors
from ft_launcher.core.roster import Roster, placed
from ft_launcher.core.run import Run
from ft_launcher.core.settle import rerun_changes, settle
from ft_launcher.core.state import JobState, Options, Outcome, Phase, Verdict
from ft_launcher.core.topology import Topology
from ft_launcher.core.validity import what_is_wrong

SETTLE_S = 5.0
"""Ranks that leave with 16 or 17 do so together after a checkpoint; their peers get this long to do the same before the cycle is ended."""


class JobMachine(Drains, Overrules):
    """One controller's view of one job. `state` is durable, everything else can be rebuilt from nodes and reports."""

    def __init__(self, state: JobState, topology: Topology, options: Options) -> None:
        self.state = state
        self.topology = topology
        self.options = options
        self.roster = Roster(options)
        self._now = 0.0
        self._run = Run(0.0, 0.0)
        self._outage_at: float | None = None
        self._ended_at = 0.0
        self._not_before = 0.0
        self._story = Story()
        self._wanted: set[str] = set()

    def begin(self, now: float) -> list[JobAction]:
        """What a fresh controller does first: arm the deadlines of the phase it finds."""
        self._now, self._run = now, Run(now, now)
        self._ended_at = now
        self._outage_at = now if self.state.phase in (Phase.ENDING, Phase.PAUSED) else None
        waits = {
            Phase.FORMING: (Timer.JOIN, self.options.join_wait_s),
            Phase.ENDING: (Timer.REAP, self.options.reap_s),
            Phase.DRAINING: (Timer.TERM_GRACE, self.options.term_grace_s),
            Phase.PAUSED: (Timer.SPARE_WAIT, self.options.spare_wait_s),
        }
        return [self._timer(*waits[self.state.phase])] if self.state.phase in waits else []

    def handle(self, now: float, event: JobEvent) -> list[JobAction]:
        """Take one event at time `now` (seconds, monotonic) and say what to do, in order."""
        self._now = now
        self._story.tell(now, self.state.phase, event)
        name = TRANSITIONS[(self.state.phase, type(event))]
        if name == IGNORE or self._stale(event):
            return []
        handler: Callable[[Any], list[JobAction]] = getattr(self, name)
        return handler(self._believed(event))

    def _stale(self, event: JobEvent) -> bool:
        """An event of an old cycle, an old generation or an overtaken report changes nothing."""
        if isinstance(event, ReportReceived):
            return self.roster.stale(event.report, self.state)
        return isinstance(event, TimerFired | ProgressSeen) and event.cycle != self.state.cycle

    def _become(self, **changes: Any) -> None:
        """The only way the state changes; a phase that the diagram does not allow is a bug."""
        phase = changes.get("phase", self.state.phase)
        if phase is not self.state.phase and phase not in EDGES[self.state.phase]:
            raise self._story.bug(f"job {self.state.run_id}: {self.state.phase} cannot become {phase}")
        self.state = self.state.but(**changes)

    def _timer(self, timer: Timer, delay_s: float) -> SetTimer:
        return SetTimer(timer, delay_s, self.state.cycle)

    def on_joined(self, event: NodeJoined) -> list[JobAction]:
        """A node is there; it counts once it has reported that it is ready. A new agent in place of one that held ranks: those ended with it."""
        replaced = self.roster.replaced(event.node, self.state)
        lost = (
            self.on_lost(NodeLost(event.node.node_id, "its agent was started anew, and the ranks ended with the former one"))
            if replaced
            else []
        )
        self.roster.join(event.node)
        return [*lost, *(self._try_start() if self.state.phase in (Phase.FORMING, Phase.PAUSED) else [])]

    def on_lost(self, event: NodeLost) -> list[JobAction]:
        """A node is gone: nothing more will come from it. If it held ranks, the cycle ends; if a cycle is ending, it no longer has to acknowledge."""
        self.roster.leave(event.node_id, self.state)
        if event.node_id not in placed(self.state):
            return []
        lost = {**self.state.lost, event.node_id: event.reason}
        if self.state.phase is Phase.RUNNING:
            return self._end(f"node {event.node_id} is lost: {event.reason}", lost=lost)
        self._become(lost=lost)
        if self.state.phase is Phase.DRAINING and self._nobody_left():
            return self._to_ending([])
        return [Commit(self.state), *self._settle_when_acknowledged(), *(self._try_start() if self.state.phase is Phase.PAUSED else [])]

    def on_report_running(self, event: ReportReceived) -> list[JobAction]:
        """Faults end the cycle at once; stop requests drain it; when all ranks have left with 0 the job is done."""
        report = event.report
        self.roster.keep(report, self.state)
        if report.node_id not in placed(self.state):
            return self._let_wanted_go()
        fault, asked = self._fault_in(report), self._asked() if report.signals else {}
        if asked and (fault is None or self._job_is_meant(asked)):
            return self._on_stop_signals(asked)
        if fault is not None:
            return self._on_fault(fault, report)
        if self._all_left():
            return self._finish("all ranks finished")
        noted = [*self._when_started(), *self._when_first_finished()]
        return [*self._let_wanted_go(), *noted]  # a commit comes first

    def _fault_in(self, report: NodeReport) -> str | None:
        """The first fault of a report as one sentence, None when there is none."""
        failed = [e for e in report.exits.values() if e.failure]
        if failed:
            return f"{self._evidence().place(failed[0].rank)} {failed[0].describe()}"
        if report.hangs:
            first = next(iter(report.hangs.values()))
            return f"{self._evidence().place(first.rank)} hangs: {first.reason}"
        fault = report.platform_fault or report.unfit
        return f"node {report.node_id}: {fault}" if fault else None

    def _on_fault(self, fault: str, report: NodeReport) -> list[JobAction]:
        """End the cycle; ranks that leave together with 16 or 17 are given the time to."""
        codes = [e.code for r in self.roster.current(self.state) for e in r.exits.values() if e.failure]
        polite = codes and all(code in (RERUN_ELSEWHERE, RESULT_REJECTED) for code in codes)
        if not polite or report.hangs or report.platform_fault or report.unfit or self._all_left():
            return self._end(fault)
        if self._run.settling:
            return []
        self._run.settling = True
        return [self._timer(Timer.SETTLE, SETTLE_S), Say(f"cycle {self.state.cycle}: {fault}; waiting for its peers to leave too")]

    def _all_left(self) -> bool:
        return self.roster.left(self.state) == self.topology.world

    def _when_started(self) -> list[JobAction]:
        """Note when every rank has been forked; after an outage, say how long that took."""
        if self._run.all_started or not self.roster.started(self.state):
            return []
        self._run.all_started = True
        if self._outage_at is None:
            return []
        return [RecordRecovery(self.state.cycle, self._now - self._outage_at, None, complete=False)]

    def _when_first_finished(self) -> list[JobAction]:
        if self._run.exit_grace or not self.roster.finished_some(self.state):
            return []
        self._run.exit_grace = True
        return [self._timer(Timer.EXIT_GRACE, self.options.exit_grace_s)]

    def on_progress(self, event: ProgressSeen) -> list[JobAction]:
        """Note that training moves; after an outage say so once, when every rank of every node has completed a step."""
        run, seen = self._run, (event.iteration, event.min_steps)
        left_section = event.node_id in run.busy and not event.busy
        if run.seen.get(event.node_id) != seen or left_section:
            run.seen[event.node_id], run.worked_at = seen, self._now
        (run.busy.add if event.busy else run.busy.discard)(event.node_id)
        if event.min_steps > 0:
            run.stepped[event.node_id] = event.iteration
        if run.recovered or len(run.stepped) < len(placed(self.state)) or set(placed(self.state)) - set(run.stepped):
            return []
        run.recovered = True
        outage_at, self._outage_at = self._outage_at, None
        return [] if outage_at is None else [RecordRecovery(self.state.cycle, self._now - outage_at, event.iteration, complete=True)]

    # -- the end of a cycle -------------------------------------------------------------------------------------------------------------

    def _end(self, reason: str, **changes: Any) -> list[JobAction]:
        """First transaction: this cycle is over, whatever the evidence will say."""
        if self._outage_at is None or self._run.all_started:
            self._outage_at = self._now
        named = any(r.hangs for r in self.roster.current(self.state))  # a rank that hangs lives, and is not among the others
        left = self.topology.world - self.roster.left(self.state) - named
        rest = f"; ending the other {left} rank{'s' if left > 1 else ''}" if left else ""
        said = Say(f"cycle {self.state.cycle}: {reason}{rest}", "warning")
        return self._to_ending([said], reason=reason, **changes)

    def _to_ending(self, said: list[JobAction], **changes: Any) -> list[JobAction]:
        self._ended_at = self._now
        self._become(phase=Phase.ENDING, **changes)
        return [Commit(self.state), *said, self._timer(Timer.REAP, self.options.reap_s), *self._settle_when_acknowledged()]

    def _finish(self, reason: str) -> list[JobAction]:
        """Every rank that matters has left with 0: collect what is left and be done."""
        return self._to_ending([], finished=True, reason=reason)

    def on_report_ending(self, event: ReportReceived) -> list[JobAction]:
        """Collect acknowledgements. A stop request that comes now stops the job instead of starting the next cycle."""
        self.roster.keep(event.report, self.state)
        noted: list[JobAction] = []
        asked = self._asked() if event.report.signals and self.state.stop_signal is None and not self.state.finished else {}
        if asked and self._job_is_meant(asked):
            number = next(iter(asked.values()))
            self._become(stop_signal=number)
            noted = [Commit(self.state), Say(f"{signal_name(number)}: no further cycle will start", "warning")]
        return [*noted, *self._settle_when_acknowledged()]

    def _settle_when_acknowledged(self) -> list[JobAction]:
        """Second half of the end: every node of the placement has acknowledged or is lost."""
        if self.state.phase is not Phase.ENDING or self.roster.unacknowledged(self.state):
            return []
        return [*self._overrule_between(), *self._settle()]

    def _settle(self) -> list[JobAction]:
        evidence = self._evidence()
        decision, record = settle(evidence, self._now - self._ended_at)
        self._become(budgets=decision.budgets, reason=decision.reason, **rerun_changes(decision))
        if decision.verdict is not None:
            return [*self._conclude(decision.verdict), record]
        lost = dict(self.state.lost) | {n: self.state.lost.get(n) or evidence.unfit().get(n) or decision.reason for n in decision.replaced}
        barred = [n for n in decision.replaced if decision.ruled_out and n not in self.state.lost]
        ruled_out = dict(self.state.ruled_out) | {n: self.state.incarnations.get(n, "") for n in barred}
        placement = decision.placement or self.state.placement
        self._become(phase=Phase.PAUSED, restart_reason=decision.reason, lost=lost, ruled_out=ruled_out, placement=placement)
        self.roster.last_resort = False
        self._not_before = self._now + decision.delay_s
        going_on = self._try_start()
        waits = self.state.phase in (Phase.PAUSED,)  # neither running nor done
        return [*(self._pause(decision) if waits else []), *going_on, record]

    def _pause(self, decision: Decision) -> list[JobAction]:
        """Nothing can start yet: say what is waited for."""
        if decision.delay_s > 0:
            timer = self._timer(Timer.BACKOFF, decision.delay_s)
            return [Commit(self.state), timer, Say(f"{decision.reason}; next cycle in {decision.delay_s:g} s")]
        timer = self._timer(Timer.SPARE_WAIT, self.options.spare_wait_s)
        return [Commit(self.state), timer, Say(f"{decision.reason}; {self.roster.waiting_for(self.state)}", "warning")]

    def _conclude(self, verdict: Verdict) -> list[JobAction]:
        self._become(phase=Phase.DONE, verdict=verdict, reason=verdict.reason)
        level = "info" if verdict.exit_code == 0 else "error"
        return [Commit(self.state), Say(f"{verdict.outcome.value}: {verdict.reason} (exit {verdict.exit_code})", level)]

    # -- the start of a cycle -----------------------------------------------------------------------------------------------------------

    def on_report_waiting(self, event: ReportReceived) -> list[JobAction]:
        """Forming or paused: a node may have become ready, unfit, or asked to stop."""
        self.roster.keep(event.report, self.state)
        if event.report.signals and self.state.phase is Phase.FORMING:
            number = event.report.signals[0]
            return self._conclude(Verdict(Outcome.STOPPED, 128 + number, f"stopped by {signal_name(number)}"))
        noted = self._overrule_at_start() if self.state.phase is Phase.FORMING else []
        return [*noted, *self._try_start()]

    def _try_start(self) -> list[JobAction]:
        """Second transaction: the next cycle starts as soon as a placement exists, its nodes are ready and its store listens."""
        if self.state.phase is Phase.PAUSED and (asked := self._asked()):
            return self._on_stop_signals_paused(asked)
        placement = self.roster.next_placement(self.state)
        if placement is None:
            return self._give_up_if_hopeless()
        head = self.roster.reports[placement.nodes[0]]
        if head.standby is None or self._now < self._not_before:
            return []
        return self._start(placement, head.standby)

    def _start(self, placement: Placement, master: Address) -> list[JobAction]:
        cycle, former = self.state.cycle + 1, self.state.placement
        agents = [self.roster.nodes[n] for n in placement.nodes]
        self._become(
            phase=Phase.RUNNING,
            cycle=cycle,
            placement=placement,
            master=master,
            lost={},
            leaving={n: a for n, a in self.state.leaving.items() if n in self.roster.nodes and self.roster.incarnation(n) == a},
            finished=False,
            incarnations={a.node_id: a.incarnation for a in agents},
            addresses={a.node_id: a.address for a in agents},
            reason=f"cycle {cycle} runs",
        )
        self._run = Run(self._now, self._now)
        self.roster.arrivals.clear()
        why = f": {self.state.restart_reason}" if self.state.restart_reason else ""
        said = [Say(f"cycle {cycle} starts{why}{successors(former, placement)}")]
        if former is None or former.nodes != placement.nodes:
            said += self._last_resorts(placement)
        return [Commit(self.state), *said]

    def _last_resorts(self, placement: Placement) -> list[Say]:
        """Nodes that were taken although a device there is in quarantine."""
        barred = {node: sorted(self.roster.quarantined(node, self.state)) for node in placement.nodes}
        named = ", ".join(f"{node} (slot {', '.join(map(str, slots))})" for node, slots in barred.items() if slots)
        if not named:
            return []
        how = "ft-state show says why and until when; quarantine_until null in ft_state.json, while no job runs, lifts it"
        return [Say(f"node {named} holds ranks although a device there is in quarantine: there is no other hardware; {how}", "warning")]

    def _give_up_if_hopeless(self) -> list[JobAction]:
        """Where no further node can ever appear, a hole is the end."""
        holes = self.roster.holes(self.state)
        if self.options.can_join or not holes:
            return []
        reason = "not enough healthy nodes: " + "; ".join(f"node {n}: {why}" for n, why in sorted(holes.items()))
        return self._conclude(Verdict(Outcome.NOT_ENOUGH_NODES, NOT_ENOUGH_NODES, reason))

    def on_timer_running(self, event: TimerFired) -> list[JobAction]:
        """Stragglers: those still training or inside a section (a last save) are left alone, for hangs there have limits of their own; those that only hang in their own
        exit are ended and the job succeeds. The grace begins anew with the last step or section of any of them."""
        if event.timer is Timer.SETTLE:
            return self._end("ranks asked to be run again or rejected their result (exit 16 or 17)")
        if event.timer is Timer.DRAIN:
            return self._on_drain_timer()
        if event.timer is not Timer.EXIT_GRACE:
            return []
        grace_s = self.options.exit_grace_s
        idle_s = 0.0 if self._run.busy else self._now - self._run.worked_at
        if idle_s < grace_s:
            return [self._timer(Timer.EXIT_GRACE, grace_s - idle_s)]
        done = {rank for r in self.roster.current(self.state) for rank, e in r.exits.items() if e.success}
        left = [rank for rank in range(self.topology.world) if rank not in done]
        who = f"rank {left[0]}, which had" if len(left) == 1 else f"{len(left)} ranks ({some(left)}) that had"
        return self._finish(
            f"all ranks finished; {who} not left after {grace_s:g} s without a step or a section, {'was' if len(left) == 1 else 'were'} ended"
        )

    def on_timer_ending(self, event: TimerFired) -> list[JobAction]:
        """Nodes that have not acknowledged in time cannot take ranks any more."""
        if event.timer is Timer.DRAIN:
            self._run.asked = False  # who is meant is asked again once the cycle is settled
        if event.timer is not Timer.REAP:
            return []
        why = f"not cleared {self.options.reap_s:g} s after the end of cycle {self.state.cycle}"
        self._become(lost={**self.state.lost, **dict.fromkeys(self.roster.unacknowledged(self.state), why)})
        return [Commit(self.state), *self._settle_when_acknowledged()]

    def on_timer_waiting(self, event: TimerFired) -> list[JobAction]:
        """Backoff is over, or the wait for nodes is."""
        if event.timer is Timer.DRAIN:
            return self._on_drain_timer()
        if event.timer is Timer.BACKOFF:
            self._not_before = 0.0
            waiting = self._timer(Timer.SPARE_WAIT, self.options.spare_wait_s)
            return self._try_start() or [waiting]
        if event.timer not in (Timer.JOIN, Timer.SPARE_WAIT):
            return []
        waited = self.options.join_wait_s if event.timer is Timer.JOIN else self.options.spare_wait_s
        late = dict.fromkeys(self.roster.late(self.state), f"not ready {waited:g} s after the end of cycle {self.state.cycle}")
        if late and event.timer is Timer.SPARE_WAIT:
            self._become(lost={**late, **self.state.lost})
            if started := self._try_start():
                return started
        self.roster.last_resort = True  # rather hardware in doubt than none
        if started := self._try_start():
            return started
        have = sum(1 for n in self.roster.nodes if self.roster.ready(n, self.state))
        reason = f"not enough healthy nodes after {waited:g} s: {have} of {self.options.nodes_wanted} ready; {self.state.reason}"
        return self._conclude(Verdict(Outcome.NOT_ENOUGH_NODES, NOT_ENOUGH_NODES, reason, exclude=exclusions(self.state.hardware)))

    def spares(self) -> int:
        """How many nodes could take another's place now."""
        return len(self._free_spares())

    def waiting(self) -> str | None:
        """While nothing can start: who is there and who is missing, one sentence."""
        if self._run.asked:
            return None  # who is meant by a signal is still open
        return self.roster.missing(self.state) if self.state.phase in (Phase.FORMING, Phase.PAUSED) else None

    def _evidence(self) -> Evidence:
        return Evidence(
            state=self.state,
            topology=self.topology,
            options=self.options,
            reports=self.roster.current(self.state),
            arrivals=dict(self.roster.arrivals),
            lasted_s=self._ended_at - self._run.started_at,
            lost=self.state.lost,
            spares=self.roster.spares(self.state),
            devices=self.roster.devices,
            labels=self.roster.labels,
        )

    def validate(self) -> None:
        """Raise BugError unless the state makes sense; called after every event by tests and the simulator."""
        wrong = what_is_wrong(self.state, self.topology, self.options)
        if wrong is not None:
            raise self._story.bug(wrong)
