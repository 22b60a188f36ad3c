"""Rules of the core, broken on purpose: which invariant sees it, and after how many seeds at most.

An invariant that no broken rule can trip is decoration. Each case replaces one rule and counts seeds until the expected invariant speaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core import policy
from ft_launcher.core import settle as settle_module
from ft_launcher.core.actions import Commit, Leave
from ft_launcher.core.causes import Failure
from ft_launcher.core.job import JobMachine
from ft_launcher.core.node import NodeMachine
from ft_launcher.core.placement import Placement
from ft_launcher.core.policy import Do
from ft_launcher.core.roster import Roster
from ft_launcher.core.state import Budgets, JobState, Outcome, Phase
from ft_launcher.sim import world
from tests.sim.worlds import calm, ran, small

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
    patch.setattr(Roster, "_spares", lambda self, state: [])


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


MUTATIONS = (
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
    (kills_on_its_own, "kills_are_decided", 20),
    (calls_everything_finished, "the_verdict_is_true", 20),
    (forgets_what_it_knew, "the_journal_replays", 40),
)


@pytest.mark.parametrize(("mutate", "invariant", "seeds"), MUTATIONS, ids=[case[0].__name__ for case in MUTATIONS])
def test_a_broken_rule_is_seen(monkeypatch: Patch, mutate: Any, invariant: str, seeds: int) -> None:
    mutate(monkeypatch)
    seen: list[str] = []
    for seed in range(seeds):
        seen += [violation.name for violation in ran(calm(small(seed))).violations]
        if invariant in seen:
            return
    pytest.fail(f"{seeds} seeds without {invariant}; seen: {sorted(set(seen))}")
