"""A rank's session: what NVRx's client says becomes what the detector judges. Pure: every moment is given."""

from __future__ import annotations

import math

import pytest

from monitors import nvrx_wire as wire
from monitors.detect import Finding, HangDetector, Limits
from monitors.nvrx_session import EXIT, HEARTBEAT, Answer, RankSession
from monitors.nvrx_wire import SectionAction
from monitors.page import OpenSection, PageSample, SectionStats
from monitors.timeouts import FLOOR_S

LIMITS = Limits({"setup": 60.0, "step": 20.0, "checkpointing": 40.0}, 30.0)
PAGE = PageSample()
S = 1_000_000_000


class Rank:
    """A client on a clock of its own, judged as the watchman does."""

    def __init__(self, limits: Limits = LIMITS, page: PageSample = PAGE, **init: object) -> None:
        self.session = RankSession(3, limits)
        self.limits, self.page = limits, page
        self.detector = HangDetector(limits, interval_s=0.05)
        self.now_s = 0.0
        self.init = wire.InitMsg(**{"rank": 3, "pid": 1, "reads_skip": False, "warmup_iters": None, **init})  # type: ignore[arg-type]

    def say(self, message: wire.Message, connection: int = 1) -> Answer:
        return self.session.receive(int(self.now_s * S), connection, message)

    def connect(self, connection: int = 1) -> Answer:
        assert self.say(wire.AuthkeyMsg(), connection).reply == wire.OK
        return self.say(self.init, connection)

    def open(self, name: str, iteration: int | None = None) -> Answer:
        return self.say(wire.SectionMsg(name, SectionAction.OPEN, iteration))

    def end(self, name: str, iteration: int | None = None) -> Answer:
        return self.say(wire.SectionMsg(name, SectionAction.CLOSE, iteration))

    def step(self, took_s: float = 0.1, iteration: int | None = None) -> None:
        self.open("step", iteration)
        self.wait(took_s)
        self.end("step", iteration)

    def wait(self, seconds: float) -> list[Finding]:
        """Time goes by, and is looked at."""
        found: list[Finding] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + 0.05)
            sample = self.sample
            self.detector.limits = self.session.limits(self.limits)
            found += self.detector.observe(int(self.now_s * S), 3, sample, 0)
        return found

    def close(self, connection: int = 1) -> tuple[str, ...]:
        return self.session.closed(int(self.now_s * S), connection)

    @property
    def sample(self) -> PageSample:
        return self.session.sample(self.page)


def hung(findings: list[Finding]) -> list[tuple[str | None, float]]:
    return [(f.section, f.limit_s) for f in findings if f.kind == "hung"]


def test_no_client_changes_nothing() -> None:
    rank = Rank()
    assert rank.sample is PAGE
    assert rank.session.limits(LIMITS) is LIMITS
    assert {f.kind for f in rank.wait(61)} == {"silent"}


def test_an_attached_client_is_a_known_client() -> None:
    rank = Rank()
    rank.connect()
    assert rank.sample.attached
    assert hung(rank.wait(61)) == [("setup", 60.0)], "hung before its first section"


def test_sections_are_judged_by_their_limits() -> None:
    rank = Rank()
    rank.connect()
    assert rank.open("setup").reply == wire.OK
    rank.wait(50)
    assert rank.end("setup").reply == wire.OK
    rank.wait(10)
    for _ in range(3):
        rank.step()
    assert rank.sample.steps == 3
    assert rank.sample.sections["step"] == SectionStats(3, int(0.1 * S), pytest.approx(int(0.1 * S), abs=2), int(rank.now_s * S))
    rank.open("step")
    assert hung(rank.wait(21)) == [("step", 20.0)]


def test_out_of_section_counts_from_the_last_end() -> None:
    rank = Rank()
    rank.connect()
    rank.step()
    assert not hung(rank.wait(29))
    assert hung(rank.wait(2)) == [(None, 30.0)]


def test_nested_and_overlapping_sections_have_their_own_clocks() -> None:
    rank = Rank()
    rank.connect()
    rank.open("checkpointing")
    rank.wait(15)
    rank.open("step")
    rank.wait(15)
    rank.end("step")
    assert hung(rank.wait(11)) == [("checkpointing", 40.0)]


def test_end_all_sections() -> None:
    rank = Rank()
    rank.connect()
    rank.open("step")
    rank.open("checkpointing")
    assert rank.say(wire.SectionMsg(None, SectionAction.CLOSE_ALL)).reply == wire.OK
    assert rank.sample.open == ()
    assert rank.sample.steps == 1


def test_misuse_is_answered_as_nvrx_does() -> None:
    rank = Rank()
    rank.connect()
    assert rank.end("step").reply == wire.error("Section 'step' is not open.")
    rank.open("step")
    assert rank.open("step").reply == wire.error("Section 'step' is already open.")


def test_a_section_opened_twice_counts_from_the_second() -> None:
    """The only sign of a newer client's `end_all_sections`, which sends nothing."""
    rank = Rank(reads_skip=True)
    rank.connect()
    rank.open("step")
    rank.wait(19)
    assert rank.open("step").reply is None
    assert not hung(rank.wait(19))
    assert hung(rank.wait(2)) == [("step", 20.0)]


def test_a_newer_client_is_not_answered_where_it_does_not_wait() -> None:
    rank = Rank(reads_skip=True)
    assert rank.connect().reply is not None
    assert rank.open("step").reply is None
    assert rank.say(wire.HeartbeatMsg()).reply is None
    assert rank.say(wire.UpdateConfigMsg()).reply == wire.OK


def test_iterations_of_newer_clients_are_progress() -> None:
    rank = Rank(reads_skip=True)
    rank.connect()
    assert rank.sample.iteration is None, "the iteration of InitMsg is a guess of the client's"
    rank.step(iteration=500)
    rank.open("step", 501)
    assert (rank.sample.iteration, rank.sample.open) == (501, (OpenSection("step", int(rank.now_s * S), 501),))
    rank.open("checkpointing", 900)
    assert rank.sample.iteration == 501, "only a step tells"


def test_a_heartbeat_only_client() -> None:
    rank = Rank(limits := Limits({**LIMITS.sections, HEARTBEAT: 10.0}, 30.0))
    rank.connect()
    assert not hung(rank.wait(55)), "starting up"
    for _ in range(5):
        rank.say(wire.HeartbeatMsg())
        assert not hung(rank.wait(6))
    assert rank.sample.steps == 5
    assert hung(rank.wait(5)) == [(HEARTBEAT, 10.0)]
    assert limits.sections[HEARTBEAT] == 10.0


def test_heartbeats_without_a_limit_of_their_own_may_have_a_step_a_save_and_more_between_them() -> None:
    rank = Rank()
    rank.connect()
    rank.wait(1)
    rank.say(wire.HeartbeatMsg())
    assert not hung(rank.wait(89))
    assert hung(rank.wait(2)) == [(HEARTBEAT, 90.0)]


def test_heartbeats_beside_sections_are_no_progress() -> None:
    rank = Rank()
    rank.connect()
    rank.step()
    steps = rank.sample.steps
    found: list[Finding] = []
    for _ in range(320):
        rank.say(wire.HeartbeatMsg())
        found += rank.wait(0.1)
    assert hung(found) == [(None, 30.0)], "its other threads still beat"
    assert rank.sample.steps == steps


def test_after_a_goodbye_a_rank_is_not_judged_unless_asked_to() -> None:
    for limits, expected in ((LIMITS, []), (Limits({**LIMITS.sections, EXIT: 15.0}, 30.0), [(EXIT, 15.0)])):
        rank = Rank(limits)
        rank.connect()
        rank.step()
        assert rank.close() == ()
        assert rank.sample.open == (OpenSection(EXIT, int(rank.now_s * S)),)
        assert hung(rank.wait(200)) == expected


def test_a_connection_lost_within_a_section_is_remembered_and_not_judged() -> None:
    rank = Rank()
    rank.connect()
    rank.open("step")
    assert rank.close() == ("step",)
    assert [o.name for o in rank.sample.open] == ["step"], "where it was when it ended"
    assert not rank.wait(200)
    rank.connect(2)
    assert rank.sample.open == ()
    rank.now_s += 1
    assert rank.say(wire.SectionMsg("step", SectionAction.OPEN), 2).reply == wire.OK
    assert hung(rank.wait(21)) == [("step", 20.0)]


def test_the_newest_introduction_counts() -> None:
    rank = Rank()
    rank.connect(1)
    rank.connect(2)
    assert rank.session.connection == 2
    answer = rank.say(wire.HeartbeatMsg(), 1)
    assert answer.close
    assert rank.close(1) == ()
    assert rank.session.connection == 2


def test_before_an_introduction_nothing_counts() -> None:
    rank = Rank()
    answer = rank.open("step")
    assert answer.close
    assert answer.note is not None
    assert not rank.sample.attached


def test_a_wrong_rank_number_is_said_and_harms_nobody() -> None:
    rank = Rank(rank=7)
    answer = rank.connect()
    assert answer.note == ("rank", "its client calls itself rank 7; it is counted as rank 3, whose socket it uses")
    assert answer.reply is not None


def test_a_section_without_a_limit_is_said() -> None:
    rank = Rank()
    rank.connect()
    answer = rank.open("forward")
    assert answer.reply == wire.OK
    assert answer.note is not None
    assert "--timeouts +forward=SECONDS" in answer.note[1]
    assert hung(rank.wait(61)) == [("setup", 60.0)], "it is not there for the detector"


def test_memory_is_bounded() -> None:
    rank = Rank()
    rank.connect()
    answers = [rank.open(f"s{i}") for i in range(500)]
    assert len(rank.sample.open) == 32
    assert answers[-1].reply == wire.error("more than 32 sections open at once")
    rank.say(wire.SectionMsg(None, SectionAction.CLOSE_ALL))
    for i in range(500):
        rank.open(f"t{i}")
        rank.end(f"t{i}")
    assert len(rank.sample.sections) == 64
    assert len({a.note[0] for a in answers if a.note}) <= 65, "kinds of lines"
    for _ in range(1000):
        rank.step(0)
    assert len(rank.session.occurrences("step")) <= 128


def test_occurrences_are_told_as_a_page_tells_them() -> None:
    rank = Rank()
    rank.connect()
    for took_s in (0.1, 0.2, 0.3):
        rank.step(took_s)
    found = rank.session.occurrences("step", 0)
    assert [(i, round(took / S, 3)) for i, took in found] == [(1, 0.2), (2, 0.3)]
    assert rank.session.occurrences("nothing") == []
    rank.page = native()
    assert rank.sample.attached
    assert rank.session.occurrences("step") == [], "its page has them"


# -- the client's own timeouts --------------------------------------------------------------------------------------------------------------------------


def told(**sections: float) -> wire.UpdateConfigMsg:
    return wire.UpdateConfigMsg(sections)


def test_the_clients_timeouts_hold_within_floor_and_ceiling() -> None:
    rank = Rank()
    rank.connect()
    rank.say(wire.UpdateConfigMsg({"checkpointing": 12.0, "step": 0.5, "unknown": 1.0}, 500.0, 7.0))
    for _ in range(6):
        rank.step()
    limits = rank.session.limits(LIMITS)
    assert limits.sections == {"setup": 60.0, "step": FLOOR_S, "checkpointing": 12.0, HEARTBEAT: 7.0}
    assert limits.out_of_section_s == 30.0, "the launch's value is the ceiling"
    rank.open("step")
    assert hung(rank.wait(FLOOR_S + 0.1)) == [("step", FLOOR_S)]


def test_a_ceiling_below_the_floor_stays() -> None:
    rank = Rank(low := Limits({"step": 1.0}, 2.0))
    rank.connect()
    rank.say(told(step=0.1))
    for _ in range(6):
        rank.step()
    assert rank.session.limits(low).sections["step"] == 1.0


def test_the_first_steps_of_a_process_are_judged_by_the_ceiling() -> None:
    """NVRx's file is loaded before the first, slow iterations."""
    rank = Rank(warmup_iters=3, reads_skip=True)
    rank.connect()
    rank.say(wire.UpdateConfigMsg({"step": 5.0}, 6.0))
    assert not hung(rank.wait(25))
    rank.step(15)
    rank.step()
    assert not hung(rank.wait(10))
    rank.step()
    assert rank.session.limits(LIMITS).sections["step"] == 5.0
    assert hung(rank.wait(7)) == [(None, 6.0)]


def test_the_clients_setup_holds_in_that_section_only() -> None:
    """It knows nothing of the imports before it."""
    rank = Rank()
    rank.wait(20)
    rank.connect()
    rank.say(told(setup=5.0))
    assert not hung(rank.wait(1))
    rank.open("setup")
    assert not hung(rank.wait(4))
    assert hung(rank.wait(2)) == [("setup", 5.0)]


def test_later_timeouts_replace_what_they_mention() -> None:
    rank = Rank()
    rank.connect()
    rank.say(wire.UpdateConfigMsg({"checkpointing": 12.0}, 8.0))
    rank.say(wire.UpdateConfigMsg(heartbeat_s=7.0))
    assert rank.session.timeouts == wire.UpdateConfigMsg({"checkpointing": 12.0}, 8.0, 7.0)


def test_limits_that_change_under_way_are_taken_at_once() -> None:
    rank = Rank()
    rank.connect()
    assert rank.session.limits(LIMITS).sections["step"] == 20.0
    assert rank.session.limits(Limits({"step": 5.0}, 6.0)).sections["step"] == 5.0


def test_infinite_limits_are_none_to_the_client() -> None:
    rank = Rank(Limits({"step": math.inf, HEARTBEAT: 5.0, EXIT: 7.0}, math.inf))
    reply = rank.connect().reply
    assert reply is not None
    assert b"step" in reply
    for ours in (HEARTBEAT, EXIT):
        assert b"X" + len(ours).to_bytes(4, "little") + ours.encode() not in reply, "no section of the client's"


# -- beside our own client --------------------------------------------------------------------------------------------------------------------------------


def native(**more: object) -> PageSample:
    return PageSample(attached=True, iteration=41, steps=4, last_progress_ns=5 * S, **more)  # type: ignore[arg-type]


def test_both_clients_are_judged() -> None:
    page = native(open=(OpenSection("step", 0, 41),), sections={"step": SectionStats(4, 1, 1, 2)})
    rank = Rank(page=page)
    rank.now_s = 1.0
    rank.connect()
    rank.open("checkpointing")
    sample = rank.sample
    assert [o.name for o in sample.open] == ["step", "checkpointing"]
    assert (sample.iteration, sample.steps) == (41, 4)
    assert hung(rank.wait(21)) == [("step", 20.0)]


def test_a_goodbye_to_nvrx_leaves_our_own_client_judged() -> None:
    rank = Rank(page=native())
    rank.now_s = 6.0
    rank.connect()
    rank.close()
    assert rank.sample is rank.page
    assert hung(rank.wait(40)) == [(None, 30.0)]


def test_a_page_that_cannot_be_trusted_leaves_nvrx_judged() -> None:
    rank = Rank(page=PageSample(broken="its header was overwritten"))
    rank.connect()
    rank.open("step")
    assert rank.sample.broken is None
    assert hung(rank.wait(21)) == [("step", 20.0)]


def test_what_the_page_alone_knows_is_kept() -> None:
    rank = Rank(page=PageSample(exception=(5, "ValueError: x"), stacks_signal=39))
    rank.connect()
    assert (rank.sample.exception, rank.sample.stacks_signal) == ((5, "ValueError: x"), 39)
    assert rank.sample is rank.sample, "the same object while nothing changes"
