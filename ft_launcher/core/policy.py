"""What to do about it: ordered rules, the first that matches decides (docs/design.md section 8).

A rule is a pure function of the evidence of one settled cycle; it returns a Decision with its number and one sentence of reason, or None to pass. Rules never start
or kill anything and never look at a clock. To change the policy, change the list.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ft_launcher.core.causes import (
    Evidence,
    Failure,
    cause_word,
    describe_failure,
    describe_leaver,
    describe_leavers,
    error_place,
    exit_code_of,
)
from ft_launcher.core.decision import NO_PROGRESS, RERUN_ELSEWHERE, RESULT_REJECTED, Decision, Do, Rule, first_cause
from ft_launcher.core.evidence import signal_name
from ft_launcher.core.rerun_policy import rerun_elsewhere
from ft_launcher.core.state import Budgets, Culprit, Outcome, Verdict
from ft_launcher.core.verdict_policy import found_meanwhile, result_rejected

DRAINED = "node drain"
_FENCE_LOST = re.compile(r"^\W*(?:[\w.]+\.)?FenceLost\b.*\bsuperseded by fence \d+ of run (\S+): ")
"""As monitors/fence.py says it; the group is the run that has the folder now."""

_BAD_START = re.compile(
    r"^\W*(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|FileNotFoundError)\b|can't open file|No module named"
)


def charge_progress(evidence: Evidence) -> Budgets:
    """Fold this cycle's progress into the budgets: further than ever before clears what counts failures in a row."""
    budgets, progress = evidence.state.budgets, evidence.progress()
    known = budgets.client_known or any(p.client for p in progress.values())
    attached = sum(p.client for p in progress.values())
    whole = attached >= budgets.clients  # some had not attached yet when it ended: what the others reached is not what all did
    iteration, steps = (evidence.iteration(), evidence.steps()) if whole else (None, 0)
    further = steps > budgets.best_steps or any(p.saved for p in progress.values())
    if iteration is not None:
        further = budgets.best_iteration is None or iteration > budgets.best_iteration
    judged = known or not (iteration is None and budgets.best_iteration is None)  # a client or a progress file has told where the script is
    earned = _earned(evidence, further if judged else True)
    best = max((i for i in (iteration, budgets.best_iteration) if i is not None), default=None)
    healthy = further if judged else evidence.lasted_s >= 10.0
    again = any(f.exit.code in (RERUN_ELSEWHERE, RESULT_REJECTED) for f in evidence.failures())
    told = evidence.state.leaving or any(r.signals for r in evidence.reports)
    replay = 0 if again or told else 1  # a step that is run again, or a node that had to go, is no lack of progress
    return replace(
        budgets,
        restarts=max(0, budgets.restarts - earned),
        reruns=0 if further and known else max(0, budgets.reruns - earned),
        client_known=known,
        clients=max(attached, budgets.clients),
        best_iteration=best,
        best_steps=max(steps, budgets.best_steps),
        stuck_cycles=0 if further or not judged else budgets.stuck_cycles + replay,
        failures_in_a_row=0 if healthy else budgets.failures_in_a_row + replay,
    )


def _earned(evidence: Evidence, further: bool) -> int:
    """How many restarts a healthy stretch has given back."""
    stretch_s = evidence.options.healthy_stretch_s
    return int(evidence.lasted_s // stretch_s) if further and stretch_s > 0 else 0


def _failure(evidence: Evidence) -> tuple[Failure, str, Culprit | None] | None:
    """The first failure, its sentence, and its rank as the culprit; or a rank that left early, where all failures are because of that; or nobody, where that may be."""
    failures = evidence.failures()
    if not failures:
        return None
    first, left = failures[0], evidence.left_early()
    if left is not None:
        said = describe_leaver(evidence, left, first, len(failures))
        return first, said, evidence.culprit(left.rank, said)
    if gone := evidence.deserters():
        return first, describe_leavers(evidence, gone, first, len(failures)), None
    said = describe_failure(evidence, first, len(failures) - 1)
    return first, said, evidence.culprit(first.exit.rank, said)


def drained(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 1: somebody asked for the end."""
    number = evidence.state.stop_signal
    if number is None:
        return None
    reason = f"stopped by {signal_name(number)}"
    return Decision(Do.STOP, 1, "drain", reason, budgets, Verdict(Outcome.STOPPED, 128 + number, reason))


def node_drained(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 2: nodes that were asked to leave have left; whatever their ranks ended with, they have left and not finished."""
    holders = evidence.state.placement.nodes if evidence.state.placement else ()
    leaving = tuple(sorted(n for n in evidence.state.leaving if n in holders and evidence.state.leaves(n)))
    if not leaving:
        return None
    reason = f"node {', '.join(leaving)} was asked to leave"
    others = {n: why for n, why in {**evidence.unfit(), **evidence.lost}.items() if n in holders and n not in leaving}
    reason += "".join(f"; node {node}: {why}" for node, why in sorted(others.items()))
    return Decision(Do.REPLACE, 2, DRAINED, reason, budgets, replaced=(*leaving, *sorted(others)))


def told_to_stop(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 2: a signal that told an agent to stop reached its ranks by another way, and they left first. Who is meant is settled before anything starts (core/drain.py)."""
    found = _failure(evidence)
    if found is None or not any(r.signals for r in evidence.reports if r.node_id == found[0].node_id):
        return None
    return Decision(Do.RESTART, 2, DRAINED, f"{found[1]}; node {found[0].node_id} had been told to stop", budgets)


def node_gone(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 5: nodes lost or unfit; spares take exactly their holes."""
    placed = evidence.state.placement.nodes if evidence.state.placement else ()
    gone = {n: why for n, why in {**evidence.unfit(), **evidence.lost}.items() if n in placed}
    if not gone:
        return None
    reason = "; ".join(f"node {node}: {why}" for node, why in sorted(gone.items()))
    return Decision(Do.REPLACE, 5, "node", reason, budgets, replaced=tuple(sorted(gone)))


def finished(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 6: every rank has exited 0, or the stragglers among them have had their time."""
    if not evidence.state.finished:
        return None
    return Decision(Do.FINISH, 6, "finished", evidence.state.reason, budgets, Verdict(Outcome.FINISHED, 0, evidence.state.reason))


def platform(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """The launcher's own processes failed while no rank had: restart, within a bound of its own; beyond it the node counts as unfit."""
    faults = evidence.platform_faults()
    if not faults or any(not f.victim for f in evidence.failures()) or evidence.hangs():
        return None
    node, why = min(faults.items())
    used = budgets.platform + 1
    limit = evidence.options.max_platform_faults
    if used > limit:
        reason = f"node {node}: {why} ({used} times, {limit} allowed): it counts as unfit"
        return Decision(Do.REPLACE, 5, "platform", reason, replace(budgets, platform=used), replaced=tuple(sorted(faults)))
    reason = f"node {node}: {why} (platform fault {used} of {limit}; no restart is charged)"
    return Decision(Do.RESTART, 5, "platform", reason, replace(budgets, platform=used), delay_s=_backoff_s(evidence, budgets))


def no_progress(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 7: several cycles in a row that went no further: more of the same is waste, and requeueing would be, too."""
    limit = evidence.options.no_progress_cycles
    if limit <= 0 or budgets.stuck_cycles < limit:
        return None
    best = f"iteration {budgets.best_iteration}" if budgets.best_iteration is not None else f"{budgets.best_steps} steps"
    said, cause, culprit, found = "", "hang", None, _failure(evidence)
    if found is not None:
        first, last, culprit = found
        said, cause = f"; last: {last}", cause_word(first)
    elif evidence.hangs():
        hung, culprit = describe_hang(evidence)
        said = f"; last: {hung}"
    reason = f"no progress: {budgets.stuck_cycles} cycles in a row without going beyond {best}{said}"
    record = first_cause(evidence, found[0] if found else None, cause, culprit)
    return Decision(Do.STOP, 7, "no progress", reason, budgets, Verdict(Outcome.NO_PROGRESS, NO_PROGRESS, reason, record), culprit)


def bad_start(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 8: the first cycle ends before its first step with an error that no restart can cure."""
    found = _failure(evidence)
    if found is None or evidence.state.cycle != 0 or evidence.steps() > 0:
        return None
    first, said, culprit = found
    text = first.exit.stamp or (first.exit.error.message if first.exit.error else "")
    if first.exit.signal is not None or not (first.exit.code == 2 or _BAD_START.search(text)):
        return None
    reason = f"bad start: {said}; a restart cannot cure that"
    verdict = Verdict(Outcome.FAILED, exit_code_of(first.exit), reason, first_cause(evidence, first, "bad start", culprit))
    return Decision(Do.STOP, 8, "bad start", reason, budgets, verdict, culprit)


def superseded(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 8b: another run has claimed the checkpoint folder. A restart would take it back, and so on in turn until one of the two is out of restarts.

    A fence lost to this very run is no such thing: a rank of an older cycle may have slept through its replacement and have claimed last; restarting mends that.
    """
    found = _failure(evidence)
    lost = found and _FENCE_LOST.search(found[0].exit.stamp or (found[0].exit.error.message if found[0].exit.error else ""))
    if not found or not lost or lost[1] == evidence.state.run_id:
        return None
    first, said, culprit = found
    reason = f"{said}; run {lost[1]} has taken the checkpoint folder: restarting would take it back, so this one ends"
    verdict = Verdict(Outcome.FAILED, exit_code_of(first.exit), reason, first_cause(evidence, first, "superseded", culprit))
    return Decision(Do.STOP, 8, "superseded", reason, budgets, verdict, culprit)


def _charged(evidence: Evidence, budgets: Budgets, cause: str, rule: int, found: tuple[Failure | None, str, Culprit | None]) -> Decision:
    """Restart in place, or stop when `--max-restarts` is used up."""
    failure, said, culprit = found
    used, limit = budgets.restarts + 1, evidence.options.max_restarts
    error = error_place(failure.exit) if failure is not None else ""
    again = bool(error) and error == budgets.last_error
    if again:
        said += "; the same error at the same place as the time before"
    budgets = replace(budgets, last_error=error)
    leaves = None if again else _node_to_leave(evidence, budgets, culprit)
    if culprit is not None and leaves is None:
        by_node = {**budgets.node_failures, culprit.node: budgets.node_failures.get(culprit.node, 0) + 1}
        budgets = replace(budgets, node_failures=by_node)
    if used > limit:
        bound = f"{limit} {'is' if limit == 1 else 'are'} used up" if limit else "0 allows no restart"
        reason = f"{said}; --max-restarts {bound}"
        code = exit_code_of(failure.exit) if failure else 1
        verdict = Verdict(Outcome.FAILED, code, reason, first_cause(evidence, failure, cause, culprit))
        return Decision(Do.STOP, rule, cause, reason, budgets, verdict, culprit)
    budgets, delay_s = replace(budgets, restarts=used), _backoff_s(evidence, budgets)
    reason = f"{said} (restart {used} of {limit})"
    if leaves is not None:
        reason += f"; it is failure {budgets.node_failures.get(leaves, 0) + 1} of node {leaves}, so a spare takes its place"
        return Decision(Do.REPLACE, rule, cause, reason, budgets, None, culprit, (leaves,), delay_s, ruled_out=False)
    return Decision(Do.RESTART, rule, cause, reason, budgets, culprit=culprit, delay_s=delay_s)


def _node_to_leave(evidence: Evidence, budgets: Budgets, culprit: Culprit | None) -> str | None:
    """A node that has failed before is left for a spare, though it works: what is wrong with it may be more than one process. Not for a spare that failed as well."""
    if culprit is None or not budgets.node_failures.get(culprit.node):
        return None
    fresh = [s for s in evidence.spares if not s.quarantined_slots and not s.failed_before]
    return culprit.node if fresh else None


def hang(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 9: a confirmed hang, unless a rank had failed by itself; ranks that failed because their peers were ended are its victims."""
    if not evidence.hangs() or any(not f.victim for f in evidence.failures()):
        return None
    said, culprit = describe_hang(evidence)
    return _charged(evidence, budgets, "hang", 9, (None, said, culprit))


def describe_hang(evidence: Evidence) -> tuple[str, Culprit | None]:
    """The hang in one sentence, and whose it is, where that can be told."""
    found, blame = evidence.hangs(), evidence.blame()
    _, first = found[0]
    if blame.rank is None:
        return f"hang: {blame.why}; first noticed: {first.reason}", None
    noticed = "" if blame.why == first.reason else f"; first noticed: {first.reason}"
    waiting = f"; {len(blame.victims)} other rank{'s' if len(blame.victims) > 1 else ''} stood still because of it" if blame.victims else ""
    return f"{evidence.place(blame.rank)} hangs: {blame.why}{waiting}{noticed}", evidence.culprit(blame.rank, blame.why)


def crash(evidence: Evidence, budgets: Budgets) -> Decision | None:
    """Rule 10: any other failure."""
    found = _failure(evidence)
    return None if found is None else _charged(evidence, budgets, "crash", 10, found)


def _backoff_s(evidence: Evidence, budgets: Budgets) -> float:
    """Nothing after the first failure; then 1, 2, 4 ... seconds for failures in a row that brought no progress."""
    repeats = budgets.failures_in_a_row - 2
    return 0.0 if repeats < 0 else float(min(2**repeats, evidence.options.backoff_max_s))


RULES: tuple[Rule, ...] = (
    drained,
    node_drained,
    told_to_stop,
    rerun_elsewhere,
    result_rejected,
    finished,
    node_gone,
    platform,
    no_progress,
    bad_start,
    superseded,
    hang,
    crash,
)


def decide(evidence: Evidence) -> Decision:
    """The first rule that matches. A cycle that ended without any evidence restarts, uncharged but bounded as a platform fault."""
    budgets = charge_progress(evidence)
    for rule in RULES:
        decision = rule(evidence, budgets)
        if decision is not None:
            return decision if decision.rerun is not None else replace(decision, rerun=found_meanwhile(evidence, budgets))
    used = replace(budgets, platform=budgets.platform + 1)
    reason = f"cycle {evidence.state.cycle} ended without a failed rank: {evidence.state.reason}"
    if used.platform > evidence.options.max_platform_faults:
        return Decision(Do.STOP, 5, "platform", reason, used, Verdict(Outcome.FAILED, 1, reason))
    return Decision(Do.RESTART, 5, "platform", reason, used, delay_s=_backoff_s(evidence, budgets))
