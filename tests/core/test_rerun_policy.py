"""Rules 3 and 4: wrong numbers. Each story on the job machine, from exit 16 to the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.core.events import NodeJoined, NodeLost, Timer, TimerFired
from ft_launcher.core.evidence import Address, NodeInfo
from ft_launcher.core.hardware import DeviceRecord, Dispute, device_of, kept_off
from ft_launcher.core.job import JobMachine
from ft_launcher.core.placement import Placement
from ft_launcher.core.rerun_report import RerunFinding, RerunStatus
from ft_launcher.core.state import JobState, Outcome, Phase
from tests.core.machines import Job

S = RerunStatus


def leave(job: Job, code: int, *found: tuple[int, RerunStatus], iteration: int = 7) -> None:
    """Every rank leaves with `code`; the findings are reported by the nodes of their ranks when they clear the cycle."""
    assert job.state.placement is not None
    nodes = job.state.placement.nodes
    for node in nodes:
        for rank in job.state.placement.ranks_on(node):
            job.exit(node, rank, code=code)
    for node in nodes:
        own = job.state.placement.ranks_on(node)
        reruns = {rank: RerunFinding(rank, status, iteration, "unexpected loss") for rank, status in found if rank in own}
        job.clear(node, iteration=iteration, client=True, reruns=reruns)


def restarted(job: Job) -> Placement:
    """The next cycle has started; its ranks are forked."""
    assert job.state.phase is Phase.RUNNING, job.state.reason
    assert job.state.placement is not None
    job.names = list(job.state.placement.nodes)
    job.forked()
    return job.state.placement


def cluster(nodes: int, nproc: int = 2, spares: int = 0, **options: Any) -> Job:
    job = Job(nodes=nodes, nproc=nproc, can_join=True, **options)
    job.start()
    for i in range(spares):
        job.join(f"s{i}", port=7000 + i)
    return job


def test_suspect_goes_to_a_spare_and_everybody_else_stays() -> None:
    job = cluster(2, spares=1)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE))
    placement = restarted(job)
    assert placement.nodes == ("n0", "s0")
    assert job.state.budgets.restarts == 0
    assert job.state.budgets.stuck_cycles == 0
    assert job.state.rerun is not None
    assert job.state.rerun.suspects == {3: ("n1/1",)}
    assert "rank 3" in job.state.restart_reason
    assert "s0 takes the place of node n1" in job.state.restart_reason
    assert job.state.hardware["n1/1"].suspicions == 1


def test_persistent_fault_quarantines_the_first_device_and_the_job_goes_on_where_it_is() -> None:
    job = cluster(2, spares=1)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE))
    before = restarted(job)
    leave(job, 17, (3, S.SECOND_RERUN_NOT_REPRODUCIBLE))
    assert restarted(job) == before
    culprit = job.decisions()[-1].culprit
    assert culprit is not None
    assert (culprit["rank"], culprit["node"], culprit["slot"]) == (3, "n1", 1), "the device at fault, not the one that showed it"
    assert job.state.hardware["n1/1"].quarantined
    assert [d for d, r in job.state.hardware.items() if r.quarantined] == ["n1/1"]
    assert job.state.rerun_verdict == "persistent"
    assert job.state.rerun is None


def test_quarantined_node_takes_no_hole_any_more() -> None:
    job = cluster(2, spares=1)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE))
    restarted(job)
    leave(job, 17, (3, S.SECOND_RERUN_NOT_REPRODUCIBLE))
    restarted(job)
    job.send(NodeLost("s0", "gone"))
    job.clear("n0")
    assert job.state.phase is Phase.PAUSED, "n1 has a device in quarantine"
    job.join("s9", port=9000)
    assert restarted(job).nodes == ("n0", "s9")


def test_without_a_spare_the_suspect_changes_slots_within_its_node() -> None:
    job = cluster(2)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE))
    placement = restarted(job)
    assert placement.nodes == ("n0", "n1")
    assert placement.place(2) == ("n1", 1)
    assert placement.place(3) == ("n1", 0)
    assert placement.place(0) == ("n0", 0)


def test_same_place_again_is_never_chosen_while_another_is_free() -> None:
    job = cluster(1, nproc=4)
    seen = {0}
    for _ in range(3):
        leave(job, 16, (0, S.FIRST_RERUN_REPRODUCIBLE))
        slot = restarted(job).slot_of(0)
        assert slot not in seen
        seen.add(slot)
    leave(job, 16, (0, S.FIRST_RERUN_REPRODUCIBLE))
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == (Outcome.RERUN_ELSEWHERE, 16)
    assert [d["device"] for d in verdict.exclude] == ["n0/0"]
    assert "no other device" in verdict.reason


def test_exit_16_without_a_new_finding_still_means_the_known_suspect() -> None:
    job = cluster(1, nproc=4)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE))
    first = restarted(job).slot_of(2)
    leave(job, 16)
    assert restarted(job).slot_of(2) not in (2, first)


def test_unknown_suspect_rotates_every_node_and_gives_up_after_a_full_turn() -> None:
    job = cluster(2, nproc=3)
    leave(job, 16)
    assert restarted(job).ranks_on("n1") == (5, 3, 4)
    leave(job, 16)
    assert restarted(job).ranks_on("n0") == (1, 2, 0)
    leave(job, 16)
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 16


def test_after_a_rotation_the_verdict_still_finds_the_first_device() -> None:
    job = cluster(2, nproc=2)
    leave(job, 16)
    assert restarted(job).place(3) == ("n1", 0)
    leave(job, 17, (3, S.SECOND_RERUN_NOT_REPRODUCIBLE))
    assert job.state.hardware["n1/1"].quarantined
    assert restarted(job).place(3) == ("n1", 0), "no spare: it stays off the quarantined device"


def test_second_fault_during_the_rerun_keeps_the_suspect_off_its_first_device() -> None:
    job = cluster(2, spares=1)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE))
    restarted(job)
    job.send(NodeLost("s0", "gone"))
    job.clear("n0")
    placement = restarted(job)
    assert placement.nodes == ("n0", "n1"), "the suspect's node is the spare of last resort"
    assert placement.place(3) == ("n1", 0), "but not the same device"


def test_a_crash_during_the_rerun_moves_nobody() -> None:
    job = cluster(1, nproc=4)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE))
    before = restarted(job)
    job.exit("n0", 1, signal=9)
    job.clear("n0")
    assert restarted(job) == before
    assert job.state.budgets.restarts == 1


def test_transient_faults_are_counted_and_the_third_one_quarantines_the_device() -> None:
    job = cluster(2, spares=1, quarantine_after=3)
    for count in (1, 2):
        leave(job, 17, (1, S.FIRST_RERUN_NOT_REPRODUCIBLE))
        assert restarted(job).nodes == ("n0", "n1")
        assert job.state.hardware["n0/1"].suspicions == count
        assert job.state.rerun_verdict == "transient"
    leave(job, 17, (1, S.FIRST_RERUN_NOT_REPRODUCIBLE))
    assert job.state.hardware["n0/1"].quarantined
    assert restarted(job).nodes == ("s0", "n1")
    assert job.state.budgets.restarts == 0


def test_correct_result_stops_and_says_that_it_is_the_application() -> None:
    job = cluster(2)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE))
    restarted(job)
    leave(job, 17, (2, S.SECOND_RERUN_REPRODUCIBLE))
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == (Outcome.RESULT_REJECTED, 17)
    assert "application" in verdict.reason
    assert job.state.hardware["n1/0"].suspicions == 0


@pytest.mark.parametrize("found", [(), ((2, S.RERUN_DISABLED),), ((2, S.INITIAL_RUN),)])
def test_without_a_record_17_is_passed_on_and_nothing_is_guessed(found: tuple[tuple[int, RerunStatus], ...]) -> None:
    job = cluster(2, spares=1)
    leave(job, 17, *found)
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 17
    assert not job.state.hardware


def test_a_new_generation_finds_the_first_device_in_what_the_last_one_left() -> None:
    job = cluster(1, nproc=2)
    job.machine.state = job.machine.state.but(hardware={"GPU-a": DeviceRecord("old", 3, suspicions=1, rank=1)})
    leave(job, 17, (1, S.SECOND_RERUN_NOT_REPRODUCIBLE))
    assert job.state.hardware["GPU-a"].quarantined
    assert restarted(job).nodes == ("n0",)


def bad_device(job: Job, iteration: int) -> None:
    """Whoever computes on slot 1 of n1 gets a wrong result there, and another one elsewhere."""
    assert job.state.placement is not None
    rank = next(r for r in job.state.placement.ranks_on("n1") if job.state.placement.slot_of(r) == 1)
    leave(job, 16, (rank, S.FIRST_RERUN_REPRODUCIBLE), iteration=iteration)
    restarted(job)
    leave(job, 17, (rank, S.SECOND_RERUN_NOT_REPRODUCIBLE), iteration=iteration)


def test_a_quarantined_device_that_spoils_another_rank_ends_the_job_with_16_where_no_other_hardware_is() -> None:
    job = cluster(2, nproc=4)
    bad_device(job, iteration=10)
    restarted(job)
    assert job.state.hardware["n1/1"].quarantined
    bad_device(job, iteration=500)
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == (Outcome.RERUN_ELSEWHERE, 16)
    assert "n1/1 was in quarantine already and no other hardware has come: requeue elsewhere" in verdict.reason
    assert [d["device"] for d in verdict.exclude] == ["n1/1"]
    assert job.state.rerun is None
    assert job.state.rerun_verdict == "persistent", "the next launch ignores the fault checkpoint's rerun state"


def test_with_a_spare_that_has_come_meanwhile_the_job_goes_on_there() -> None:
    job = cluster(2, nproc=4)
    bad_device(job, iteration=10)
    restarted(job)
    leave(job, 16, (7, S.FIRST_RERUN_REPRODUCIBLE), iteration=500)  # moved within its node
    restarted(job)
    job.join("late", port=9000)
    leave(job, 17, (7, S.SECOND_RERUN_NOT_REPRODUCIBLE), iteration=500)
    assert restarted(job).nodes == ("n0", "late")


def test_a_quarantined_device_whose_node_has_left_already_ends_nothing() -> None:
    job = cluster(2, nproc=4)
    bad_device(job, iteration=10)
    restarted(job)
    job.join("late", port=9000)
    assert job.state.placement is not None
    rank = job.state.placement.rank_at("n1", 1)
    leave(job, 16, (rank, S.FIRST_RERUN_REPRODUCIBLE), iteration=500)
    assert restarted(job).nodes == ("n0", "late")
    leave(job, 17, (rank, S.SECOND_RERUN_NOT_REPRODUCIBLE), iteration=500)
    assert restarted(job).nodes == ("n0", "late")
    assert job.state.hardware["n1/1"].quarantined


def test_transient_faults_of_a_quarantined_device_are_borne_as_often_again() -> None:
    job = cluster(1, nproc=4, quarantine_after=2)
    for count in range(1, 5):
        assert job.state.placement is not None
        leave(job, 17, (job.state.placement.rank_at("n0", 1), S.FIRST_RERUN_NOT_REPRODUCIBLE), iteration=100 * count)
        restarted(job)
        record = job.state.hardware["n0/1"]
        assert (record.suspicions, record.quarantined) == (count, count >= 2)
    assert job.state.placement is not None
    leave(job, 17, (job.state.placement.rank_at("n0", 1), S.FIRST_RERUN_NOT_REPRODUCIBLE), iteration=900)
    assert job.state.verdict is not None
    assert (job.state.verdict.outcome, job.state.verdict.exit_code) == (Outcome.RERUN_ELSEWHERE, 16)


def test_a_node_that_is_taken_in_spite_of_a_quarantine_says_which_slot_and_how_to_lift_it() -> None:
    job = Job(nodes=1, nproc=2)
    job.machine.state = job.machine.state.but(hardware={"n0/1": DeviceRecord("n0", 1, suspicions=3, quarantined=True, rank=1)})
    job.start()
    assert job.state.phase is Phase.RUNNING
    assert "node n0 (slot 1) holds ranks although a device there is in quarantine" in job.said()
    assert "quarantine_until null" in job.said()


def test_a_successor_knows_the_devices_of_a_node_whose_registration_is_gone() -> None:
    """All leases end while the store is away: the new controller reads reports before the node has registered again."""
    job = cluster(2, quarantine_after=1)
    heir = Job(nodes=2, nproc=2, can_join=True, quarantine_after=1)
    heir.machine = JobMachine(JobState.from_json(job.state.to_json()), job.machine.topology, job.options)
    heir.machine.begin(0.0)
    heir.reports = {name: replace(r, devices=(f"GPU-{name}-0", f"GPU-{name}-1")) for name, r in job.reports.items()}
    for name in ("n0", "n1"):
        heir.report(name)
    leave(heir, 17, (3, S.FIRST_RERUN_NOT_REPRODUCIBLE))
    assert [device for device, record in heir.state.hardware.items() if record.quarantined] == ["GPU-n1-1"]


def test_it_cannot_loop() -> None:
    job = cluster(1, nproc=2, max_reruns=4, quarantine_after=0)
    for _ in range(4):
        leave(job, 17, (1, S.FIRST_RERUN_NOT_REPRODUCIBLE))
        restarted(job)
    leave(job, 17, (1, S.FIRST_RERUN_NOT_REPRODUCIBLE))
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 17
    assert "4 allowed" in job.state.verdict.reason


def test_a_suspect_is_not_moved_to_a_device_in_quarantine_while_another_is_free() -> None:
    job = cluster(1, nproc=4)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE), iteration=7)
    now = restarted(job).slot_of(3)
    leave(job, 17, (3, S.SECOND_RERUN_NOT_REPRODUCIBLE), iteration=7)
    assert restarted(job).slot_of(3) == now
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE), iteration=30)
    assert restarted(job).slot_of(3) not in (3, now), "slot 3 is in quarantine"


def test_the_spare_that_was_announced_is_the_one_that_comes_though_another_node_is_lost() -> None:
    job = cluster(2, nproc=1, spares=1)
    job.exit("n1", 1, code=16)
    job.exit("n0", 0, code=16)
    job.send(NodeLost("n0", "gone"))
    job.clear("n1", iteration=7, client=True, reruns={1: RerunFinding(1, S.FIRST_RERUN_REPRODUCIBLE, 7)})
    assert restarted(job).nodes == ("n1", "s0"), "s0 for the suspect; its own node is the last resort for the lost one"
    assert "s0 takes the place of node n1" in job.state.restart_reason


def test_one_rank_a_node_and_no_spare_changes_places_with_another_node() -> None:
    job = cluster(3, nproc=1)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE))
    assert restarted(job).nodes == ("n0", "n2", "n1")
    leave(job, 17, (2, S.SECOND_RERUN_NOT_REPRODUCIBLE))
    assert job.state.hardware["n2/0"].quarantined
    assert restarted(job).nodes == ("n0", "n2", "n1")


def test_one_rank_a_node_and_nobody_known_moves_everybody_to_the_next_node() -> None:
    job = cluster(3, nproc=1)
    leave(job, 16)
    assert restarted(job).nodes == ("n1", "n2", "n0")
    leave(job, 16)
    assert restarted(job).nodes == ("n2", "n0", "n1")
    leave(job, 16)
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 16


def test_a_drain_meanwhile_loses_no_suspicion_and_the_suspect_still_moves() -> None:
    job = cluster(2, spares=1)
    job.exit("n1", 3, code=16)
    job.report("n0", signals=(15,))
    job.send(TimerFired(Timer.DRAIN, job.state.cycle))
    for node in ("n0", "n1"):
        reruns = {3: RerunFinding(3, S.FIRST_RERUN_REPRODUCIBLE, 7)} if node == "n1" else {}
        job.clear(node, iteration=7, client=True, reruns=reruns)
    assert [d.rule for d in job.decisions()] == [2]
    assert job.state.hardware["n1/1"].suspicions == 1
    placement = restarted(job)
    assert placement.nodes == ("s0", "n1")
    assert placement.place(3) == ("n1", 0), "off its device"


def test_when_nobody_else_comes_hardware_in_quarantine_is_taken_and_that_is_said() -> None:
    job = Job(nodes=2, nproc=2, can_join=True)
    job.machine.state = job.machine.state.but(hardware={"n0/0": DeviceRecord("n0", 0, quarantined=True, rank=0)})
    job.join("n0")
    job.join("n1")
    assert job.state.phase is Phase.FORMING
    job.send(TimerFired(Timer.JOIN, -1))
    assert job.state.phase is Phase.RUNNING
    assert job.state.placement is not None
    assert job.state.placement.place(0) == ("n0", 1), "the affected rank on another slot"
    assert "there is no other hardware" in job.said()


def test_progress_between_them_keeps_the_count_of_moves_small() -> None:
    job = cluster(1, nproc=2, max_reruns=2, quarantine_after=0)
    for iteration in range(7, 20, 2):
        leave(job, 17, (1, S.FIRST_RERUN_NOT_REPRODUCIBLE), iteration=iteration)
        restarted(job)
    assert job.state.budgets.reruns == 1


def test_two_suspects_of_one_node_both_leave_their_devices() -> None:
    job = cluster(1, nproc=2)
    leave(job, 16, (0, S.FIRST_RERUN_REPRODUCIBLE), (1, S.FIRST_RERUN_REPRODUCIBLE))
    assert restarted(job).ranks_on("n0") == (1, 0)
    leave(job, 16, (0, S.FIRST_RERUN_REPRODUCIBLE))
    assert job.state.verdict is not None
    assert job.state.verdict.exit_code == 16


def test_a_later_step_is_a_new_dispute() -> None:
    job = cluster(1, nproc=4)
    leave(job, 16, (0, S.FIRST_RERUN_REPRODUCIBLE), iteration=7)
    restarted(job)
    leave(job, 16, (2, S.FIRST_RERUN_REPRODUCIBLE), iteration=30)
    restarted(job)
    assert job.state.rerun is not None
    assert set(job.state.rerun.suspects) == {2}
    assert job.state.rerun.moves == 1


def test_quarantine_is_honoured_when_a_run_forms_also_under_another_node_id() -> None:
    job = Job(nodes=1, nproc=2, can_join=True)
    job.machine.state = job.machine.state.but(hardware={"GPU-b": DeviceRecord("old-name", 1, quarantined=True, rank=0)})
    job.send(NodeJoined(NodeInfo("new-name", "127.0.0.1:1", 2, 0, devices=("GPU-a", "GPU-b"))))
    job.report("new-name", reaped=True, standby=Address("127.0.0.1", 1))
    assert job.state.phase is Phase.FORMING
    assert "quarantine" in (job.machine.waiting() or "")
    job.join("fresh")
    assert job.state.phase is Phase.RUNNING
    assert job.state.placement is not None
    assert job.state.placement.nodes == ("fresh",)


def test_alone_a_node_in_quarantine_is_used_with_the_rank_elsewhere() -> None:
    job = Job(nodes=1, nproc=2)
    job.machine.state = job.machine.state.but(hardware={"n0/1": DeviceRecord("n0", 1, quarantined=True, rank=1)})
    job.start()
    assert job.state.placement is not None
    assert job.state.placement.place(1) == ("n0", 0)


def test_state_survives_the_store() -> None:
    job = cluster(2, spares=1)
    leave(job, 16, (3, S.FIRST_RERUN_REPRODUCIBLE))
    assert JobState.from_json(job.state.to_json()) == job.state


def test_kept_off_prefers_the_least_move_and_says_when_there_is_none() -> None:
    placement = Placement(("a", "b"), 3)
    moved = kept_off(placement, {4: frozenset({"b/1"})}, {})
    assert moved is not None
    assert [moved.place(r) for r in (0, 1, 2)] == [placement.place(r) for r in (0, 1, 2)]
    assert device_of({}, *moved.place(4)) != "b/1"
    assert kept_off(placement, {4: frozenset({"b/0", "b/1", "b/2"})}, {}) is None
    assert Dispute.from_json(Dispute(1, None, placement, {2: ("x",)}).to_json()) == Dispute(1, None, placement, {2: ("x",)})
