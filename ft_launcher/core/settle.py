"""Settling a cycle: all the evidence in, one decision and its record out.

What the policy decides is said once, here, in the form that journal, incident folder, ft_state and console share. It adds what follows from any replacement (a node that was replaced has
failed) and nothing else; it never changes a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ft_launcher.core.actions import RecordDecision
from ft_launcher.core.causes import Evidence
from ft_launcher.core.decision import Decision
from ft_launcher.core.policy import DRAINED, decide


def settle(evidence: Evidence, settled_s: float) -> tuple[Decision, RecordDecision]:
    """Decide, `settled_s` seconds after the cycle was ended."""
    decision = _with_failed_nodes(decide(evidence))
    record = RecordDecision(
        cycle=evidence.state.cycle,
        cause=decision.cause,
        rule=decision.rule,
        reason=decision.reason,
        decision=decision.do.value,
        culprit=decision.culprit.to_json() if decision.culprit else None,
        ranks=_ranks(evidence),
        fault_to_settled_s=settled_s,
        reap_s=max((r.reap_s for r in evidence.reports), default=0.0),
    )
    return decision, record


def _ranks(evidence: Evidence) -> dict[int, Mapping[str, Any]]:
    """Where every rank was, and how it ended."""
    progress, exits = evidence.progress(), evidence.exits()
    ranks: dict[int, Mapping[str, Any]] = {}
    for rank in range(evidence.topology.world):
        p, e = progress.get(rank), exits.get(rank)
        ranks[rank] = {
            "iteration": p.iteration if p else None,
            "section": p.section if p else None,
            "since_s": p.since_s if p else None,
            "exit": e.number if e else None,
            "ended": e.ended if e else False,
            "steps": p.steps if p else 0,
            "state": p.state if p else "",
            "place": p.place if p else "",
        }
    return ranks


def _with_failed_nodes(decision: Decision) -> Decision:
    """A node that was replaced has failed, unless it only was asked to leave: should it come back, it is the spare of last resort."""
    if not decision.replaced or decision.cause == DRAINED:
        return decision
    failures = dict(decision.budgets.node_failures)
    failures |= {node: failures.get(node, 0) + 1 for node in decision.replaced}
    return replace(decision, budgets=replace(decision.budgets, node_failures=failures))


def rerun_changes(decision: Decision) -> dict[str, Any]:
    """The rerun's part of the state, where a decision is about wrong numbers."""
    change = decision.rerun
    return {} if change is None else {"hardware": change.hardware, "rerun": change.dispute, "rerun_verdict": change.verdict}
