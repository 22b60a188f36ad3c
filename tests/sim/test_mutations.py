"""Rules of the core, broken on purpose: which invariant sees it, and after how many seeds at most.

An invariant that no broken rule can trip is decoration. Each case replaces one rule and counts seeds until the expected invariant speaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core import policy, rerun_policy, roster, verdict_policy
from ft_launcher.core import settle as settle_module
from ft_launcher.core.actions import Commit, Leave
from ft_launcher.core.causes import Evidence, Failure
from ft_launcher.core.decision import Do
from ft_launcher.core.evidence import Blame
from ft_launcher.core.hardware import DeviceRecord, quarantined
from ft_launcher.core.job import JobMachine
from ft_launcher.core.membership import Membership, Reply
from ft_launcher.core.node import NodeMachine
from ft_launcher.core.placement import Placement
from ft_launcher.core.roster import Roster
from ft_launcher.core.state import Budgets, JobState, Outcome, Phase
from ft_launcher.sim import world
from ft_launcher.sim.controller import Controller
from ft_launcher.sim.storage import Storage
from monitors.detect import HangDetector
from monitors.timeouts import TimeoutLearner
from tests.sim.worlds import corrupt, ran, rough, small

Patch = pytest.MonkeyPatch


def judges_too_early(patch: Patch) -> None:
    patch.setattr(Roster, "unacknowledged", lambda self, state: [])


def starts_without_acknowledgement(patch: Patch) -> None:
    judges_too_early(patch)
    patch.setattr(Roster, "ready", lambda self, node_id, state: node_id in self.reports and node_id in self.nodes)
    others = tuple(check for check in world.JOB_CHECKS if check.__name__ != "settling_waits_for_every_node")
    patch.setattr(world, "JOB_CHECKS", others)


def heeds_old_reports(patch: Patch) -> None:
    patch.setattr(Roster, "stale", lambda self, report, state: False)


def heeds_reports_of_old_cycles(patch: Patch) -> None:
    true = Roster.stale
    patch.setattr(Roster, "stale", lambda self, report, state: true(self, report, state.but(placement=None)))


def heeds_old_timers(patch: Patch) -> None:
    patch.setattr(JobMachine, "_stale", lambda self, event: False)


def restarts_for_ever(patch: Patch) -> None:
    def crash(evidence: Any, budgets: Budgets) -> policy.Decision | None:
        found = policy._failure(evidence)
        if found is None:
            return None
        used = replace(budgets, restarts=budgets.restarts + 1)
        return policy.Decision(Do.RESTART, 10, "crash", f"{found[1]} (1)", used, culprit=found[2])

    patch.setattr(policy, "RULES", (*policy.RULES[:-1], crash) if policy.RULES[-1] is policy.crash else policy.RULES)


def commits_last(patch: Patch) -> None:
    true = JobMachine._to_ending

    def late(self: JobMachine, said: Any, **changes: Any) -> Any:
        return sorted(true(self, said, **changes), key=lambda action: isinstance(action, Commit))

    patch.setattr(JobMachine, "_to_ending", late)


def blames_victims(patch: Patch) -> None:
    patch.setattr(Failure, "victim", property(lambda self: False))
    patch.setattr(Failure, "precedence", property(lambda self: (-self.arrival, -self.exit.failed_ns)))


def forgets_spares(patch: Patch) -> None:
    patch.setattr(Roster, "spares", lambda self, state: [])


def moves_survivors(patch: Patch) -> None:
    def replace_at_the_end(self: Placement, lost: str, spare: str) -> Placement:
        return Placement((*(node for node in self.nodes if node != lost), spare), self.nproc)

    patch.setattr(Placement, "replace", replace_at_the_end)


def forgets_a_field(patch: Patch) -> None:
    true = JobState.to_json
    patch.setattr(JobState, "to_json", lambda self: {**true(self), "restart_reason": ""})


def leaves_its_ranks(patch: Patch) -> None:
    true = NodeMachine._follow_running

    def leave(self: NodeMachine, job: JobState) -> Any:
        return [Leave(1)] if job.phase is Phase.ENDING else true(self, job)

    patch.setattr(NodeMachine, "_follow_running", leave)


def acknowledges_too_early(patch: Patch) -> None:
    true = NodeMachine._stop

    def stop(self: NodeMachine) -> Any:
        return [*true(self), *self._say(reaped=True)]

    patch.setattr(NodeMachine, "_stop", stop)


def acknowledges_before_all_is_read(patch: Patch) -> None:
    true = NodeMachine.on_reaped

    def on_reaped(self: NodeMachine, event: Any) -> Any:
        actions = true(self, event)
        self.report = replace(self.report, reaped=True)
        return actions

    patch.setattr(NodeMachine, "on_reaped", on_reaped)


def kills_on_its_own(patch: Patch) -> None:
    true = NodeMachine.on_ended

    def on_ended(self: NodeMachine, event: Any) -> Any:
        return [*true(self, event), *(self._kill(self.alive) if event.code else [])]

    patch.setattr(NodeMachine, "on_ended", on_ended)


def calls_everything_finished(patch: Patch) -> None:
    true = settle_module.decide

    def decide(evidence: Any) -> policy.Decision:
        decision = true(evidence)
        verdict = decision.verdict
        if verdict is None or verdict.outcome is not Outcome.FAILED:
            return decision
        return replace(decision, verdict=replace(verdict, outcome=Outcome.FINISHED, exit_code=0))

    patch.setattr(settle_module, "decide", decide)


def forgets_what_it_knew(patch: Patch) -> None:
    """A decision that depends on something outside events and state cannot be replayed."""
    true, calls = JobMachine._pause, [0]

    def pause(self: JobMachine, decision: Any) -> Any:
        calls[0] += 1
        self.state = self.state.but(reason=f"{self.state.reason} ({calls[0]})")
        return true(self, decision)

    patch.setattr(JobMachine, "_pause", pause)


def suspects_are_lost(patch: Patch) -> None:
    """A missing lease alone would be enough."""
    true = Membership.lease_gone

    def lease_gone(self: Membership, now: float, node_id: str) -> Any:
        return self._lose(node_id, "its lease ended") if true(self, now, node_id) else []

    patch.setattr(Membership, "lease_gone", lease_gone)


def answers_do_not_count(patch: Patch) -> None:
    true = Membership.replied
    patch.setattr(Membership, "replied", lambda self, now, n, reply, witness="self": true(self, now, n, silenced(reply), witness))


def silenced(reply: Reply) -> Reply:
    return Reply.SILENT if reply is Reply.ANSWERED else reply


def steps_do_not_count(patch: Patch) -> None:
    patch.setattr(Membership, "stepped", lambda self, began_at: None)


def silence_is_borne_for_ever(patch: Patch) -> None:
    patch.setattr(Membership, "_weigh", lambda self, now, node_id, member: [])


def takes_new_agents_for_old(patch: Patch) -> None:
    patch.setattr(Roster, "replaced", lambda self, node, state: False)
    patch.setattr(Controller, "look_for_missing", lambda self, registered: None)


def successors_ask_for_nobody(patch: Patch) -> None:
    patch.setattr(Controller, "look_for_missing", lambda self, registered: None)


def successors_start_over(patch: Patch) -> None:
    true = JobMachine.begin

    def begin(self: JobMachine, now: float) -> Any:
        armed = true(self, now)
        return self._end("another controller has taken over") if self.state.phase is Phase.RUNNING else armed

    patch.setattr(JobMachine, "begin", begin)


def successors_set_no_deadline(patch: Patch) -> None:
    true = JobMachine.begin
    patch.setattr(JobMachine, "begin", lambda self, now: true(self, now) if self.state.phase is Phase.FORMING else (true(self, now), [])[1])


def writes_without_the_office(patch: Patch) -> None:
    patch.setattr(Controller, "_write", unfenced_write)


def unfenced_write(self: Controller, job: JobState, durable: Any) -> int:
    durable()
    revision = self._desk.store.put("job", job)
    self._desk.committed(self, job)
    return revision


def storage_knows_no_owner(patch: Patch) -> None:
    def commit(self: Storage, number: int, saved: int) -> bool:
        if saved > self.latest.get(number, 0):
            self.latest[number] = saved
            self._accept(number, saved)
        return True

    patch.setattr(Storage, "commit", commit)


def timeouts_are_too_tight(patch: Patch) -> None:
    true = TimeoutLearner.decide

    def decide(self: TimeoutLearner) -> Any:
        timeout = true(self)
        return replace(timeout, soft_s=timeout.soft_s / 30, hard_s=timeout.hard_s / 30) if timeout.learned else timeout

    patch.setattr(TimeoutLearner, "decide", decide)


def hangs_are_not_found(patch: Patch) -> None:
    patch.setattr(HangDetector, "_verdict", lambda self, clock, sample, soft, hard: None)


def blames_whoever_is_first(patch: Patch) -> None:
    patch.setattr(Evidence, "blame", lambda self: Blame(0, "rank 0 was looked at first"))


def quarantines_the_judge(patch: Patch) -> None:
    def persistent(evidence: Evidence, ledger: Any, rank: int) -> Any:
        node, slot = evidence.state.placement.place(rank)  # type: ignore[union-attr]
        record = DeviceRecord(node, slot, rank=rank, why="persistent fault")
        device = verdict_policy._here(evidence, rank)
        return quarantined(ledger, device, record), device, "persistent fault of device 1"

    patch.setattr(verdict_policy, "_persistent", persistent)


def bears_a_bad_device_for_ever(patch: Patch) -> None:
    patch.setattr(verdict_policy, "_again", lambda *args: "")


def suspects_stay_where_they_are(patch: Patch) -> None:
    patch.setattr(rerun_policy, "_by_spare", lambda evidence, dispute: None)
    patch.setattr(rerun_policy, "_by_slot", lambda evidence, dispute, placement: ((), placement, "all stay in slot 0"))
    patch.setattr(roster, "kept_off", lambda placement, doubtful, devices: placement)


def gives_up_at_the_first_wrong_number(patch: Patch) -> None:
    patch.setattr(rerun_policy, "_by_spare", lambda evidence, dispute: None)
    patch.setattr(rerun_policy, "_by_slot", lambda evidence, dispute, placement: None)


def _with_rules(patch: Patch, wrap: Any) -> None:
    """Rules 3 and 4, wrapped."""
    wrong = (rerun_policy.rerun_elsewhere, verdict_policy.result_rejected)
    patch.setattr(policy, "RULES", tuple(wrap(rule) if rule in wrong else rule for rule in policy.RULES))


def reruns_for_ever(patch: Patch) -> None:
    def unbounded(rule: Any) -> Any:
        return lambda evidence, budgets: rule(replace(evidence, options=replace(evidence.options, max_reruns=10**9)), budgets)

    _with_rules(patch, unbounded)


def charges_restarts_for_wrong_numbers(patch: Patch) -> None:
    def charging(rule: Any) -> Any:
        return lambda evidence, budgets: rule(evidence, replace(budgets, restarts=budgets.restarts + 1))

    _with_rules(patch, charging)


def ignores_what_ranks_found(patch: Patch) -> None:
    patch.setattr(Evidence, "reruns", lambda self: {})


def one_suspicion_is_enough(patch: Patch) -> None:
    true = verdict_policy.suspected
    patch.setattr(verdict_policy, "suspected", lambda ledger, device, record, limit: true(ledger, device, record, 1))


def nobody_is_asked_to_leave(patch: Patch) -> None:
    patch.setattr(JobMachine, "_asked", lambda self: {})


MUTATIONS: tuple[tuple[Any, ...], ...] = (
    (judges_too_early, "settling_waits_for_every_node", 20),
    (starts_without_acknowledgement, "a_start_waits_for_every_node", 20),
    (heeds_old_reports, "an_old_cycle_has_no_effect", 20),
    (heeds_reports_of_old_cycles, "an_old_cycle_has_no_effect", 120),
    (heeds_old_timers, "an_old_cycle_has_no_effect", 20),
    (restarts_for_ever, "budgets_hold", 20),
    (commits_last, "durable_before_acting", 20),
    (blames_victims, "the_guilty_are_blamed", 20),
    (forgets_spares, "healthy_hardware_is_enough", 20),
    (moves_survivors, "placement_is_a_bijection", 20),
    (forgets_a_field, "the_state_survives_json", 20),
    (leaves_its_ranks, "nobody_leaves_living_ranks", 20),
    (acknowledges_too_early, "acknowledgements_are_true", 20),
    (acknowledges_before_all_is_read, "acknowledgements_are_final", 60),
    (kills_on_its_own, "kills_are_decided", 20),
    (calls_everything_finished, "the_verdict_is_true", 20),
    (forgets_what_it_knew, "the_journal_replays", 40),
    (suspects_are_lost, "the_lost_are_gone", 20, rough),
    (answers_do_not_count, "the_lost_are_gone", 20, rough),
    (steps_do_not_count, "the_lost_are_gone", 40, rough),
    (silence_is_borne_for_ever, "the_gone_are_noticed", 20, rough),
    (takes_new_agents_for_old, "the_gone_are_noticed", 60, rough),
    (successors_ask_for_nobody, "the_gone_are_noticed", 60, rough),
    (successors_start_over, "a_successor_changes_nothing", 40, rough),
    (successors_set_no_deadline, "healthy_or_done", 60, rough),
    (writes_without_the_office, "a_deposed_controller_writes_nothing", 40, rough),
    (storage_knows_no_owner, "commits_are_fenced", 60, rough),
    (timeouts_are_too_tight, "hangs_are_real", 20, rough),
    (hangs_are_not_found, "hangs_are_ended", 20, rough),
    (blames_whoever_is_first, "the_hanging_are_blamed", 20, rough),
    (quarantines_the_judge, "healthy_devices_are_not_quarantined", 20, corrupt),
    (one_suspicion_is_enough, "healthy_devices_are_not_quarantined", 20, corrupt),
    (suspects_stay_where_they_are, "suspects_get_new_devices", 20, corrupt),
    (gives_up_at_the_first_wrong_number, "elsewhere_is_asked_only_when_there_is_none", 20, corrupt),
    (reruns_for_ever, "wrong_numbers_are_bounded", 20, corrupt),
    (charges_restarts_for_wrong_numbers, "wrong_numbers_are_bounded", 20, corrupt),
    (bears_a_bad_device_for_ever, "a_second_chance_is_the_last", 20, corrupt),
    (ignores_what_ranks_found, "faulty_hardware_does_not_end_the_job", 20, corrupt),
    (nobody_is_asked_to_leave, "a_stop_is_heard", 40),
)


@pytest.mark.parametrize("case", MUTATIONS, ids=[case[0].__name__ for case in MUTATIONS])
def test_a_broken_rule_is_seen(monkeypatch: Patch, case: tuple[Any, ...]) -> None:
    mutate, invariant, seeds, *make = case
    mutate(monkeypatch)
    seen: list[str] = []
    for seed in range(seeds):
        seen += [violation.name for violation in ran((make[0] if make else small)(seed)).violations]
        if invariant in seen:
            return
    pytest.fail(f"{seeds} seeds without {invariant}; seen: {sorted(set(seen))}")
