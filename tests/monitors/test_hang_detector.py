"""Hang detection as stories and as properties, against a twin that keeps everything and computes all of it again at each look."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.errors import ConfigError
from monitors.detect import OUT_OF_SECTION, Finding, HangDetector, Limits, Sample
from monitors.page import OpenSection, PageSample, SectionStats

MS = 1_000_000
LIMITS = Limits({"setup": 6.0, "step": 3.0, "checkpointing": 9.0}, out_of_section_s=4.5)


@dataclass
class World:
    """A rank whose script the test plays, looked at every 50 ms."""

    detector: HangDetector = field(default_factory=lambda: HangDetector(LIMITS))
    now_ns: int = 1_000_000 * MS
    rank: int = 5
    sample: PageSample = field(default_factory=lambda: PageSample(owner_pid=1, attached=True))
    found: list[tuple[float, Finding]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started_ns = self.now_ns

    def look(self) -> None:
        for finding in self.detector.observe(self.now_ns, self.rank, self.sample, self.started_ns):
            self.found.append(((self.now_ns - self.started_ns) / 1e9, finding))

    def wait(self, seconds: float, every_ms: int = 50) -> World:
        end_ns = self.now_ns + round(seconds * 1e9)
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + every_ms * MS)
            self.look()
        return self

    def open(self, name: str, iteration: int | None = None) -> World:
        self.sample = replace(self.sample, attached=True, open=(*self.sample.open, OpenSection(name, self.now_ns, iteration)))
        return self

    def close(self, name: str) -> World:
        gone = next(o for o in reversed(self.sample.open) if o.name == name)
        sections = {**self.sample.sections, name: SectionStats(1, 0, 0, self.now_ns)}
        self.sample = replace(self.sample, open=tuple(o for o in self.sample.open if o is not gone), sections=sections)
        return self.progress(gone.iteration) if name == "step" else self

    def progress(self, iteration: int | None) -> World:
        self.sample = replace(self.sample, last_progress_ns=self.now_ns, iteration=iteration, steps=self.sample.steps + 1)
        return self

    def said(self) -> list[tuple[str, str | None, float]]:
        return [(f.kind, f.section, round(at, 3)) for at, f in self.found]


# -- stories


def test_a_hung_step_is_suspect_at_two_thirds_and_hung_at_the_first_pair_past_its_limit() -> None:
    world = World().open("step", 57).wait(10)
    assert world.said() == [("suspect", "step", 2.05), ("hung", "step", 3.05)]
    hung = world.found[-1][1]
    assert (hung.rank, hung.limit_s, hung.iteration, hung.since_s) == (5, 3.0, 57, 3.05)
    assert hung.reason == "rank 5 has been in section 'step' (iteration 57) for 3.0 s; its limit is 3 s; no progress yet"


def test_it_is_said_when_what_was_suspected_goes_on() -> None:
    world = World().open("step", 1).wait(2.5).close("step").wait(1)
    assert world.said() == [("suspect", "step", 2.05), ("recovered", "step", 2.55)]
    assert "no longer in section 'step'" in world.found[-1][1].reason


def test_in_shadow_mode_a_hang_that_was_none_is_recovered_too() -> None:
    world = World().open("step", 1).wait(5).close("step").wait(1)
    assert [kind for kind, _, _ in world.said()] == ["suspect", "hung", "recovered"]


def test_start_up_has_the_setup_budget_from_the_ranks_start() -> None:
    world = World(sample=PageSample(attached=True)).wait(20)
    assert world.said() == [("suspect", "setup", 4.05), ("hung", "setup", 6.05)]
    assert "starting up (no section yet)" in world.found[-1][1].reason


def test_between_sections_and_at_exit_the_out_of_section_limit_counts_from_the_last_end() -> None:
    world = World().open("setup").wait(1).close("setup").wait(20)
    assert world.said() == [("suspect", None, 4.05), ("hung", None, 5.55)]
    again = World().open("setup").wait(1).close("setup")
    for i in range(20):
        again.open("step", i).wait(1.9).close("step").wait(2.9)
    assert again.said() == []


def test_nested_and_overlapping_sections_have_their_own_limits() -> None:
    world = World().open("checkpointing").wait(2).open("step", 1).wait(2.9).close("step").wait(20)
    assert world.said() == [
        ("suspect", "step", 4.05),
        ("recovered", "step", 4.95),
        ("suspect", "checkpointing", 6.05),
        ("hung", "checkpointing", 9.05),
    ]
    both = World().open("checkpointing").wait(1).open("step", 1).wait(20)
    assert [s for s in both.said() if s[0] == "hung"] == [("hung", "step", 4.05), ("hung", "checkpointing", 9.05)]


def test_many_short_steps_inside_a_long_section_do_not_prolong_it() -> None:
    world = World().open("checkpointing")
    for i in range(60):
        world.open("step", i).wait(0.2).close("step")
    assert [s for s in world.said() if s[0] == "hung"] == [("hung", "checkpointing", 9.05)]


def test_a_thread_that_beats_in_a_section_without_limit_does_not_hide_a_hang() -> None:
    world = World().open("step", 1).wait(1).close("step")
    for _ in range(100):
        world.open("heartbeat").wait(0.1).close("heartbeat")
    assert [s for s in world.said() if s[0] == "hung"] == [("hung", None, 5.55)]
    assert "out of section (inside 'heartbeat', without a limit of its own)" in world.found[-1][1].reason


def test_progress_by_iteration_alone_keeps_a_script_without_steps_alive() -> None:
    world = World()
    for i in range(20):
        world.progress(i).wait(2.5)
    assert world.said() == []
    assert world.wait(10).said() == [("suspect", None, 50.55), ("hung", None, 52.05)]


def test_a_script_that_never_attaches_is_warned_about_once_and_never_hung() -> None:
    world = World(sample=PageSample()).wait(60)
    assert world.said() == [("silent", "setup", 6.05)]
    assert "no monitoring client" in world.found[0][1].reason
    assert world.open("step").wait(0.5).said()[1:] == [("recovered", "setup", 60.05)]


def test_a_script_known_to_use_a_client_is_hung_when_it_does_not_attach() -> None:
    world = World(detector=HangDetector(LIMITS, client_known=True), sample=PageSample()).wait(20)
    assert world.said() == [("suspect", "setup", 4.05), ("hung", "setup", 6.05)]


def test_when_another_rank_attaches_late_a_silent_one_gets_the_setup_budget_from_then() -> None:
    world = World(sample=PageSample()).wait(8)
    world.detector.observe(world.now_ns, 6, PageSample(attached=True, last_progress_ns=world.now_ns), world.started_ns)
    assert world.wait(20).said() == [("silent", "setup", 6.05), ("suspect", "setup", 12.1), ("hung", "setup", 14.1)]


def test_a_rank_that_attaches_after_its_budget_when_no_client_was_known_is_judged_from_then() -> None:
    world = World(sample=PageSample()).wait(8)
    world.sample = PageSample(attached=True)
    assert world.wait(20).said() == [
        ("silent", "setup", 6.05),
        ("recovered", "setup", 8.05),
        ("suspect", "setup", 12.1),
        ("hung", "setup", 14.1),
    ]


def test_a_broken_page_is_said_once_and_never_judged() -> None:
    world = World().open("step").wait(1)
    world.sample = replace(world.sample, broken="its header was overwritten")
    assert world.wait(60).said() == [("silent", None, 1.05)]
    assert "overwritten" in world.found[0][1].reason


def test_one_odd_sample_is_no_finding() -> None:
    """A reader that caught the writer in the middle: an old start beside another section's name."""
    world = World().open("step", 1).wait(1)
    good, world.sample = world.sample, replace(world.sample, open=(OpenSection("step", 1, 1),))
    world.wait(0.05)
    world.sample = good
    assert world.wait(0.5).said() == []


def test_a_pause_of_the_agent_does_not_count_against_the_rank() -> None:
    world = World().open("step", 1).wait(1.9)
    world.now_ns += 3600 * 1000 * MS
    world.look()
    assert world.said() == []
    assert [(k, s, round(at - 3600, 3)) for k, s, at in world.wait(5).said()] == [("suspect", "step", 2.05), ("hung", "step", 3.05)]
    assert "3600.0 s of it not counted" in world.found[0][1].reason


def test_a_pause_past_the_deadline_never_confirms_and_a_rank_that_then_goes_on_is_left_alone() -> None:
    world = World().open("step", 1).wait(2.95)
    world.found.clear()
    world.now_ns += 10_000 * MS
    world.look()
    world.close("step")
    assert [k for k, _, _ in world.wait(1).said()] == ["recovered"]


@pytest.mark.parametrize("every_ms", [10, 50, 150])
def test_on_time_means_up_to_three_intervals(every_ms: int) -> None:
    world = World().open("step", 1).wait(10, every_ms)
    hung_at = next(at for kind, _, at in world.said() if kind == "hung")
    assert 3.0 + every_ms / 1000 <= hung_at <= 3.0 + 2 * every_ms / 1000


def test_an_agent_that_can_only_look_once_a_second_still_finds_a_hang() -> None:
    world = World().open("step", 1).wait(60, every_ms=1000)
    assert [k for k, _, _ in world.said()] == ["suspect", "hung"] and world.said()[-1][2] < 16


def test_a_time_before_the_first_look_is_not_counted_either() -> None:
    world = World()
    world.now_ns += 100_000 * MS
    world.look()
    assert world.wait(5).said() == [("suspect", "setup", 104.05)]


def test_limits_may_change_while_a_clock_runs() -> None:
    world = World().open("step", 1).wait(1)
    world.detector.limits = Limits({"setup": 6.0, "step": 60.0}, 4.5)
    assert world.wait(20).said() == []
    world.detector.limits = LIMITS
    assert [k for k, _, _ in world.wait(1).said()] == ["hung"]


def test_learned_soft_limits_and_limits_that_never_come() -> None:
    limits = Limits({"step": 3.0, "setup": math.inf}, math.inf, soft_s={"step": 0.5, OUT_OF_SECTION: 1.0})
    world = World(detector=HangDetector(limits)).wait(50).open("step", 1).wait(4).close("step").wait(50)
    assert world.said() == [("suspect", "step", 50.55), ("hung", "step", 53.05), ("recovered", "step", 54.05), ("suspect", None, 55.05)]
    assert limits.soft("setup") == math.inf and Limits({}, 9.0, {"a": 100.0}).soft("a") == 9.0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "5", None, True])
def test_impossible_limits_are_refused(value: object) -> None:
    for make in (lambda: Limits({"step": value}, 1.0), lambda: Limits({}, value), lambda: Limits({}, 1.0, {"step": value})):  # type: ignore[dict-item, arg-type]
        with pytest.raises(ConfigError, match="must be a number of seconds above 0"):
            make()


def test_a_start_in_the_future_is_never_overdue() -> None:
    world = World().open("step", 1)
    world.sample = replace(world.sample, open=(OpenSection("step", 1 << 62),))
    assert world.wait(60).said() == []


def test_the_next_deadline_is_the_moment_of_the_next_finding() -> None:
    world = World()
    assert world.detector.next_deadline_ns() is None
    world.open("step", 1).wait(0.1)
    assert world.detector.next_deadline_ns() == world.started_ns + 2000 * MS
    world.wait(2)
    assert world.detector.next_deadline_ns() == world.started_ns + 3000 * MS
    world.wait(2)
    assert world.detector.next_deadline_ns() is None
    world.detector.forget(5)
    assert world.detector.observe(world.now_ns, 5, world.sample, world.now_ns) == []


# -- the twin

NAMES = ("setup", "step", "checkpointing", "free")
TIGHT = Limits({"setup": 0.6, "step": 0.3, "checkpointing": 0.5}, out_of_section_s=0.4)
INTERVAL_NS = 50 * MS


class DumbTwin:
    """Says the same as HangDetector, from the whole past, with no state but what it saw."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.looks: list[tuple[int, int, Sample]] = []  # (now, rank, sample)
        self.broken_said: set[int] = set()

    def observe(self, now_ns: int, rank: int, sample: PageSample, started_ns: int) -> list[tuple[str, str | None]]:
        self.looks.append((now_ns, rank, sample))
        mine = [
            (now, s, any(x.attached and not x.broken for _, _, x in self.looks[: i + 1]))
            for i, (now, r, s) in enumerate(self.looks)
            if r == rank
        ]
        if sample.broken:
            first = rank not in self.broken_said
            self.broken_said.add(rank)
            return [("silent", None)] if first else []
        said = []
        before = self.keys(mine[-2][1], started_ns) if len(mine) > 1 else set()
        now_keys = self.keys(sample, started_ns)
        for key in before - now_keys:
            if self.story(key, mine[:-1], started_ns)[0]:
                said.append(("recovered", self.section(key)))
        for key in now_keys:
            fresh = self.story(key, mine, started_ns)[1]
            said += [(kind, self.section(key)) for kind in fresh]
        return said

    @staticmethod
    def section(key: tuple[str, str, int]) -> str | None:
        return None if key[0] == "out" else key[1]

    def keys(self, sample: PageSample, started_ns: int) -> set[tuple[str, str, int]]:
        if sample.broken:
            return set()
        if not sample.attached:
            return {("start", "setup", started_ns)}
        inside = {("in", o.name, o.since_ns) for o in sample.open if o.name in self.limits.sections}
        if inside:
            return inside
        last = max([sample.last_progress_ns] + [s.last_end_ns for n, s in sample.sections.items() if n in self.limits.sections])
        return {("out", "out_of_section", last)} if last else {("start", "setup", started_ns)}

    def story(self, key: tuple[str, str, int], looks: list[tuple[int, PageSample, bool]], started_ns: int) -> tuple[str, list[str]]:
        """What had been told of this clock after these looks, and what the last look added."""
        times = [started_ns] + [now for now, _, _ in looks]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        first = len(looks)
        while first > 0 and key in self.keys(looks[first - 1][1], started_ns):
            first -= 1
        hard = self.limits.out_of_section_s if key[0] == "out" else self.limits.sections[key[1]]
        excused, told, fresh, past = 0, "", [], (False, False)
        for i in range(first, len(looks)):
            now, sample, known = looks[i]
            usual = max(INTERVAL_NS, min(gaps[i - 8 : i])) if i >= 8 else INTERVAL_NS
            late = gaps[i] > 3 * usual
            excused += max(0, now - max(times[i], key[2])) if late else 0
            elapsed = now - key[2] - excused
            over = (not late and elapsed >= hard * 1e9 * 2 / 3, not late and elapsed >= hard * 1e9)
            pair, past, fresh = (over[0] and past[0], over[1] and past[1]), over, []
            if told == "silent" and known:
                told, fresh, past, excused = "", ["recovered"] if sample.attached else [], (False, False), now - key[2]
            elif not sample.attached and not known:
                fresh = ["silent"] if pair[1] and not told else []
            elif told != "hung" and pair[1]:
                fresh = ["hung"]
            elif not told and pair[0]:
                fresh = ["suspect"]
            told = fresh[-1] if fresh and fresh != ["recovered"] else told
        return told, fresh


GAPS = st.sampled_from([10, 49, 50, 50, 50, 50, 120, 150, 151, 400, 3000])
ACTS = st.sampled_from(["", "", "", "", "open", "open", "close", "close", "iteration", "attach", "detach", "break", "heal"])
LOOKS = st.lists(st.tuples(GAPS, ACTS, st.sampled_from(NAMES), st.integers(0, 1), st.integers(1, 12)), min_size=1, max_size=25)


@given(LOOKS)
@settings(max_examples=200, deadline=None)
def test_the_detector_says_what_its_dumb_twin_says(looks: list[tuple[int, str, str, int, int]]) -> None:
    fast, twin = HangDetector(TIGHT), DumbTwin(TIGHT)
    worlds = [World(rank=rank, sample=PageSample(attached=bool(rank))) for rank in (0, 1)]
    now_ns = worlds[0].now_ns
    for gap_ms, act, name, which, times in looks:
        world = worlds[which]
        world.now_ns = now_ns
        play(world, act, name)
        for _ in range(times):
            now_ns += gap_ms * MS
            for w in worlds:
                said = [(f.kind, f.section) for f in fast.observe(now_ns, w.rank, w.sample, w.started_ns)]
                assert sorted(said, key=str) == sorted(twin.observe(now_ns, w.rank, w.sample, w.started_ns), key=str)


def play(world: World, act: str, name: str) -> None:
    if act == "open":
        world.open(name, 1)
    elif act == "close" and world.sample.open:
        world.close(world.sample.open[-1].name)
    elif act == "iteration":
        world.progress(2)
    elif act in ("attach", "detach"):
        world.sample = replace(world.sample, attached=act == "attach")
    elif act in ("break", "heal"):
        world.sample = replace(world.sample, broken="x" if act == "break" else None)


# -- what must hold whatever happens


@given(
    st.lists(st.tuples(st.sampled_from(["step", "checkpointing", "free", "out"]), st.floats(0.05, 0.19)), max_size=20),
    st.lists(GAPS, min_size=1, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_a_rank_within_its_limits_is_never_found_whenever_the_agent_looks(script: list[tuple[str, float]], gaps: list[int]) -> None:
    world = World(detector=HangDetector(TIGHT)).open("setup").close("setup")
    k = 0
    for name, seconds in script:
        if name != "out":
            world.open(name, k)
        end_ns = world.now_ns + int(seconds * 1e9)
        while world.now_ns + gaps[k % len(gaps)] * MS < end_ns:
            world.now_ns += gaps[k % len(gaps)] * MS
            world.look()
            k += 1
        world.now_ns = end_ns
        if name == "free":
            world.close("free").progress(k)  # a section without limit counts as out of section, so it must bring progress
        elif name != "out":
            world.close(name)
        else:
            world.open("step").close("step")
    assert world.said() == []


@given(
    st.sampled_from(["setup", "step", "checkpointing", "out"]),
    st.lists(st.sampled_from([10, 49, 50, 75, 110, 150]), min_size=1, max_size=10),
)
@settings(max_examples=150, deadline=None)
def test_a_hang_is_found_at_the_first_pair_of_looks_past_its_limit_and_never_before(where: str, gaps: list[int]) -> None:
    world = World(detector=HangDetector(TIGHT)).open("setup").close("setup")
    if where != "out":
        world.open(where, 1)
    began_ns, limit_s = world.now_ns, TIGHT.hard_s(OUT_OF_SECTION if where == "out" else where)
    times = []
    for i in range(200):
        world.now_ns += gaps[i % len(gaps)] * MS
        world.look()
        times.append(world.now_ns)
        if world.found and world.found[-1][1].kind == "hung":
            break
    past = [t for t in times if t - began_ns >= limit_s * 1e9]
    assert len(past) == 2 and [k for k, _, _ in world.said()] in (["suspect", "hung"], ["hung"])  # long gaps: both at once
