"""Attribution inside the job machine: whom the decision about a hang names, and what it does when nobody can be named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ft_launcher.core.actions import RecordDecision
from ft_launcher.core.evidence import Hang, NodeReport, RankExit, RankProgress
from monitors.attribution import attribute
from tests.core.machines import Job

VICTIM = Hang(0, "step", 9.0, 5.0, 7, "rank 0 has been in section 'step' (iteration 7) for 9.0 s")
KILLED = {r: RankExit(r, None, 9, 1, r, ended=True) for r in range(4)}


def at(place: str, **changes: Any) -> RankProgress:
    return replace(RankProgress(7, 7, "step", 9.0, True, stepping=True, still_s=9.0, place=place), **changes)


def settled(progress: dict[int, RankProgress], exits: dict[int, RankExit], **options: Any) -> tuple[Job, RecordDecision]:
    job = Job(attribute=attribute, **options)
    job.join("n0")
    job.report("n0", cycle=0, reaped=False, standby=None, started=True)
    job.report("n0", hangs={0: VICTIM})
    actions = job.report("n0", exits=exits, progress=progress, reaped=True, standby=job.reports["n0"].standby)
    (decision,) = [a for a in actions if isinstance(a, RecordDecision)]
    return job, decision


def test_the_decision_names_the_culprit_and_not_who_was_noticed_first() -> None:
    progress = {r: at("collective:all_reduce train.py:step") for r in range(4)} | {2: at("user train.py:load")}
    job, decision = settled(progress, KILLED)
    assert decision.cause == "hang" and decision.culprit is not None and decision.culprit["rank"] == 2
    assert "rank 2 (tp=0,cp=0,dp=1,pp=0; node n0 slot 2) hangs: " in decision.reason
    assert "3 other ranks stood still because of it; first noticed: rank 0 has been in section 'step'" in decision.reason
    assert job.state.budgets.restarts == 1 and job.state.budgets.node_failures == {"n0": 1}


def test_when_it_cannot_be_told_nobody_is_named_or_charged_and_the_job_goes_on() -> None:
    job, decision = settled({r: at("collective:all_reduce train.py:step") for r in range(4)}, KILLED)
    assert decision.culprit is None and decision.decision == "restart"
    assert decision.reason.startswith("hang: the culprit cannot be told: all 4 ranks wait in all_reduce")
    assert job.state.budgets.restarts == 1 and job.state.budgets.node_failures == {}


def test_the_last_restart_without_a_culprit_is_a_verdict_without_one() -> None:
    job, _ = settled({r: at("") for r in range(4)}, KILLED, max_restarts=0)
    assert job.state.verdict is not None and job.state.verdict.exit_code == 1
    assert job.state.verdict.first_cause is None and "cannot be told" in job.state.verdict.reason


def test_ranks_whose_connection_broke_when_their_peers_were_ended_do_not_make_it_a_crash() -> None:
    broken = RankExit(3, 1, None, 5, 0, stamp="RuntimeError: Connection closed by peer [127.0.0.1]:1234")
    progress = {r: at("collective:all_reduce train.py:step") for r in range(4)} | {1: at("user train.py:load")}
    _, decision = settled(progress, {**KILLED, 3: broken})
    assert (decision.cause, decision.culprit and decision.culprit["rank"]) == ("hang", 1)


def test_a_crash_of_a_ranks_own_is_still_a_crash() -> None:
    crashed = RankExit(3, 7, None, 5, 0, stamp="ValueError: no")
    _, decision = settled({r: at("") for r in range(4)}, {**KILLED, 3: crashed})
    assert (decision.cause, decision.culprit and decision.culprit["rank"]) == ("crash", 3)


def test_progress_with_its_evidence_survives_the_report() -> None:
    full = at("collective:all_reduce@tp mappings.py:_reduce", state="D", ended=12, still_s=3.25)
    report = NodeReport("n0", 0, 0, progress={1: full})
    assert NodeReport.from_json(report.to_json()).progress == {1: full}
    assert RankProgress.from_json([7, 7, "step", 9.0, True, False]).place == "", "of an older agent"
