"""The timeout rule: its promises one by one as stories, then what holds for any durations whatever."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ft_launcher.errors import ConfigError
from monitors.timeouts import EARLY, FLOOR_S, KILL_FACTOR, MIN_SAMPLES, PATIENCE, TimeoutLearner
from monitors.timeouts_memory import HOLD_MIN, LogHistogram, Peaks, Recent

CEILING_S = 600.0


def taught(durations: Iterable[float], ceiling_s: float = CEILING_S) -> TimeoutLearner:
    learner = TimeoutLearner(ceiling_s=ceiling_s)
    for duration_s in durations:
        learner.observe(duration_s)
    return learner


def jittered(seed: int, count: int, usual_s: float = 1.0, sigma: float = 0.1, level: Callable[[int], float] = lambda i: 1.0) -> list[float]:
    draw = random.Random(seed)
    return [usual_s * level(i) * draw.lognormvariate(0, sigma) for i in range(count)]


def killed(learner: TimeoutLearner, durations: Iterable[float]) -> list[tuple[int, float, str]]:
    """What the learner's limit would have ended, each with its place and the reason of the limit; it learns on."""
    found = []
    for i, duration_s in enumerate(durations):
        timeout = learner.decide()
        if duration_s > timeout.hard_s:
            found.append((i, duration_s, timeout.reason))
        learner.observe(duration_s)
    return found


# -- few samples -------------------------------------------------------------------------------------------------------------------------------------------


def test_the_ceiling_holds_until_sixteen_samples() -> None:
    learner = TimeoutLearner(ceiling_s=CEILING_S)
    for n in range(MIN_SAMPLES):
        timeout = learner.decide()
        assert (timeout.hard_s, timeout.soft_s, timeout.learned) == (CEILING_S, CEILING_S * 2 / 3, False)
        assert "16" in timeout.reason and (f"{n} of" in timeout.reason or n == 0)
        learner.observe(0.1)
    assert learner.decide().hard_s < CEILING_S and learner.decide().learned


def test_warm_up_is_kept_apart() -> None:
    learner = TimeoutLearner(ceiling_s=CEILING_S)
    for _ in range(100):
        learner.observe(90.0, warmup=True)
    assert learner.decide().hard_s == CEILING_S  # none of them is a sample
    cold, warm = learner, taught([1.0] * 500)
    for _ in range(500):
        cold.observe(1.0)
    assert cold.decide().hard_s == warm.decide().hard_s
    assert cold.decide(warmup=True).hard_s == CEILING_S and "warming up" in cold.decide(warmup=True).reason
    assert cold.distribution()["warmups"] == 100


# -- outliers ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 15, 16, 40, 100, 150, 199])
def test_one_stall_raises_the_timeout_at_most_tenfold_and_is_forgotten(at: int) -> None:
    learner, quiet = TimeoutLearner(ceiling_s=CEILING_S), TimeoutLearner(ceiling_s=CEILING_S)
    highest_s = 0.0
    for i in range(200):
        learner.observe(20.0 if i == at else 0.1)
        quiet.observe(0.1)
        if i >= MIN_SAMPLES - 1:
            assert learner.decide().hard_s <= 10 * quiet.decide().hard_s, i
            highest_s = max(highest_s, learner.decide().hard_s)
    if at > MIN_SAMPLES:
        assert highest_s > 20.0  # the same again would live
    for _ in range(2 * at + HOLD_MIN + 64):
        learner.observe(0.1)
    assert learner.decide().hard_s == quiet.decide().hard_s


def test_two_stalls_in_a_row_count_for_nothing_in_the_usual() -> None:
    learner = taught([0.1] * 5000 + [20.0, 20.0] + [0.1] * 60)
    assert learner._recent.nth_longest_s(3) == 0.1


@pytest.mark.parametrize("at", [MIN_SAMPLES, 17, 64, 300, EARLY - 1])
@pytest.mark.parametrize("usual_s", [0.1, 1.0, 10.0])
def test_an_evaluation_inside_step_survives_its_first_time(at: int, usual_s: float) -> None:
    learner = taught([usual_s] * at)
    assert learner.decide().hard_s > 30 * usual_s


@pytest.mark.parametrize("every", [3, 10, 100, 250, 1000])
@pytest.mark.parametrize("usual_s", [0.1, 2.0])
def test_periodic_evaluation_is_never_killed(every: int, usual_s: float) -> None:
    durations = jittered(every, max(6000, every * 6), usual_s, level=lambda i: 30.0 if i % every == every - 1 else 1.0)
    assert killed(TimeoutLearner(ceiling_s=CEILING_S), durations) == []


def test_a_kind_seen_before_the_sixteenth_is_remembered() -> None:
    learner = taught([1.0] * 5 + [25.0] + [1.0] * 60)
    assert learner.decide().hard_s >= 2 * 25.0


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [2.0, 5.0, 20.0])
def test_bimodal_steps_are_never_killed(share: float, ratio: float) -> None:
    draw = random.Random(f"{share}{ratio}")
    durations = jittered(7, 8000, level=lambda _: ratio if draw.random() < share else 1.0)
    assert killed(TimeoutLearner(ceiling_s=CEILING_S), durations) == []


# -- changes -----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [16, 64, 500, 2000, 6000])
@pytest.mark.parametrize("over", [1, 10, 50])
@given(seed=st.integers(0, 10**6), sigma=st.sampled_from([0.0, 0.05, 0.15]), usual_s=st.sampled_from([0.1, 2.0, 15.0]))
@settings(max_examples=6, deadline=None)
def test_it_follows_to_three_times_without_a_kill(after: int, over: int, seed: int, sigma: float, usual_s: float) -> None:
    durations = jittered(seed, after + over + 300, usual_s, sigma, lambda i: 1 + 2 * min(1.0, max(0.0, (i - after + 1) / over)))
    learner = TimeoutLearner(ceiling_s=CEILING_S)
    assert killed(learner, durations) == []
    assert learner.decide().hard_s > 3 * 3 * usual_s  # it has followed: three times as long again would live


def test_it_comes_back_down_when_steps_get_faster() -> None:
    learner = taught([9.0] * 6000 + [1.0] * 700)
    assert learner.decide().hard_s < 9.0 * 2
    assert "down from" in learner.decide().reason


@pytest.mark.parametrize("seed", range(4))
def test_saves_with_a_pareto_tail_are_never_killed(seed: int) -> None:
    draw = random.Random(seed)
    saves = [min(0.95 * 420, 5 * draw.paretovariate(1.5)) for _ in range(600)]
    assert killed(TimeoutLearner(ceiling_s=420), saves) == []


def test_the_history_is_not_spammed() -> None:
    changes, learner, before = [], TimeoutLearner(ceiling_s=CEILING_S), CEILING_S
    for duration_s in jittered(1, 20_000, 2.0, 0.3):
        reason = learner.decide().reason
        learner.observe(duration_s)
        after = learner.decide()
        if after.hard_s != before:
            changes.append(after.reason)
            assert after.reason != reason
            assert f"to {after.hard_s:g} s after {learner.count} occurrences" in after.reason
        elif learner.count > MIN_SAMPLES and after.learned:
            assert after.reason == reason  # the sentence belongs to the change
        before = after.hard_s
    assert 3 <= len(changes) <= 50, changes


# -- bounds ------------------------------------------------------------------------------------------------------------------------------------------------


def test_the_floor_can_be_survived_by_a_pause() -> None:
    timeout = taught([0.001] * 10_000).decide()
    assert (timeout.hard_s, timeout.soft_s) == (FLOOR_S, pytest.approx(3.0))
    assert "floor" in timeout.reason


def test_a_ceiling_below_the_floor_is_the_users_word() -> None:
    assert taught([0.001] * 100, ceiling_s=1.5).decide().hard_s == 1.5


def test_never_stays_never() -> None:
    timeout = taught([1.0] * 3000, ceiling_s=math.inf).decide()
    assert timeout.hard_s == timeout.soft_s == math.inf and not timeout.learned


@pytest.mark.parametrize("ceiling_s", [0, -1, math.nan, "600", None, True])
def test_an_impossible_ceiling_is_refused(ceiling_s: object) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        TimeoutLearner(ceiling_s=ceiling_s)  # type: ignore[arg-type]


def test_what_is_no_duration_is_ignored_and_counted() -> None:
    learner = taught([1.0] * 100)
    before = learner.to_json()
    for value in (math.nan, math.inf, -1.0, "1", None, True, 1e300):
        learner.observe(value)  # type: ignore[arg-type]
    assert {**learner.to_json(), "ignored": 0} == before and learner.ignored == 7


DURATIONS = st.lists(
    st.one_of(st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 1.0, 20.0, 599.0, 5e4, 1e9]), st.floats(0, 700)), min_size=1, max_size=300
)


@given(DURATIONS, st.sampled_from([1.5, 30.0, 600.0]), st.lists(st.floats(0, 700), max_size=3))
@settings(max_examples=150, deadline=None)
def test_bounds_hold_for_any_durations(durations: list[float], ceiling_s: float, kills: list[float]) -> None:
    learner = TimeoutLearner(ceiling_s=ceiling_s)
    for i, duration_s in enumerate(durations):
        learner.observe(duration_s)
        if i % 90 == 89 and kills:
            learner.observe_kill(kills.pop())
        timeout = learner.decide()
        assert min(FLOOR_S, ceiling_s) <= timeout.hard_s <= ceiling_s
        assert 0 < timeout.soft_s <= timeout.hard_s
        assert timeout == learner.decide()
        if learner.count >= MIN_SAMPLES:
            term_s = learner._largest().hard_s
            assert timeout.hard_s >= min(ceiling_s, term_s) * 0.999  # never below what the terms want, whatever was skipped as unchanged


@given(st.integers(0, 10**6), st.floats(0.05, 20), st.integers(5, 64))
@settings(max_examples=40, deadline=None)
def test_longer_durations_never_give_a_shorter_timeout_for_constant_steps(seed: int, usual_s: float, count: int) -> None:
    shorter, longer = jittered(seed, 300 + count, usual_s), jittered(seed, 300 + count, usual_s * 2)
    assert taught(shorter).decide().hard_s <= taught(longer).decide().hard_s


# -- kills -------------------------------------------------------------------------------------------------------------------------------------------------


def test_a_wrong_kill_does_not_repeat_itself_for_long() -> None:
    """An evaluation of 200 steps' time that comes late: after at most two kills it may finish, and the limit comes back later."""
    learner = taught([1.0] * 6000)
    before_s, kills = learner.decide().hard_s, 0
    while learner.decide().hard_s < 200.0:
        learner.observe_kill(learner.decide().hard_s)
        kills += 1
    assert kills == 2
    assert f"{KILL_FACTOR:g} x" in learner.decide().reason
    for _ in range(HOLD_MIN + PATIENCE + 64):
        learner.observe(1.0)
    assert learner.decide().hard_s <= before_s


def test_a_kill_at_the_ceiling_teaches_nothing() -> None:
    learner = taught([1.0] * 6000)
    before = learner.to_json()
    learner.observe_kill(CEILING_S)
    assert learner.to_json() == before


# -- persistence -------------------------------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 900), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_restart_changes_nothing(seed: int, cut: int, kill: bool) -> None:
    durations = jittered(seed, 900, level=lambda i: 25.0 if i % 97 == 0 else 1.0)
    straight = taught(durations[:cut])
    if kill:
        straight.observe_kill(straight.decide().hard_s)
    again = TimeoutLearner.from_json(json.loads(json.dumps(straight.to_json())), ceiling_s=CEILING_S)
    assert again.decide() == straight.decide()
    for duration_s in durations[cut:]:
        straight.observe(duration_s)
        again.observe(duration_s)
        assert again.decide().hard_s == straight.decide().hard_s
    assert again.to_json() == straight.to_json()
    assert again.distribution() == straight.distribution()


def test_a_lower_ceiling_cuts_and_a_higher_one_does_not_raise_what_is_learned() -> None:
    kept = taught([10.0] * 8000).to_json()
    learned_s = TimeoutLearner.from_json(kept, ceiling_s=CEILING_S).decide().hard_s
    assert TimeoutLearner.from_json(kept, ceiling_s=20).decide().hard_s == 20
    assert TimeoutLearner.from_json(kept, ceiling_s=10_000).decide().hard_s == learned_s


def test_the_record_stays_small_and_is_strict_json() -> None:
    draw = random.Random(5)
    learner = taught(draw.choice([1e-6, 0.1, 1.0, 50.0, 1e9]) * draw.paretovariate(0.5) % 1e9 for _ in range(20_000))
    assert len(json.dumps(learner.to_json(), allow_nan=False)) < 24_000
    assert len(json.dumps(learner.distribution(), allow_nan=False)) < 4_000
    json.dumps(taught([1.0], ceiling_s=math.inf).to_json(), allow_nan=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted(TimeoutLearner(1.0).to_json())


@given(JSON)
def test_garbage_is_as_nothing(value: object) -> None:
    learner = TimeoutLearner.from_json(value, ceiling_s=CEILING_S)
    assert learner.decide().hard_s == CEILING_S and "cannot be read" in learner.decide().reason
    learner.observe(1.0)


@given(st.sampled_from(KEYS), JSON | st.sampled_from([-1, 0, 1e308, math.nan, math.inf, 2**70, [], [[]], [[1, 2]], [1e99] * 64]), DURATIONS)
@settings(max_examples=200, deadline=None)
def test_a_record_with_one_bad_field_never_does_harm(key: str, value: object, durations: list[float]) -> None:
    kept = {**taught(jittered(3, 700, level=lambda i: 20.0 if i % 99 == 0 else 1.0)).to_json(), key: value}
    learner = TimeoutLearner.from_json(kept, ceiling_s=CEILING_S)
    for duration_s in durations:
        learner.observe(duration_s)
        timeout = learner.decide()
        assert FLOOR_S <= timeout.hard_s <= CEILING_S and timeout.reason
    json.dumps(learner.to_json(), allow_nan=False)


def test_a_published_timeout_below_what_the_durations_say_is_corrected_at_once() -> None:
    kept = {**taught([10.0] * 8000).to_json(), "hard_s": 0.5}
    assert TimeoutLearner.from_json(kept, ceiling_s=CEILING_S).decide().hard_s > 30


# -- what dashboards draw ----------------------------------------------------------------------------------------------------------------------------------


def test_the_distribution_counts_every_sample_in_fixed_buckets() -> None:
    draw = random.Random(2)
    durations = [draw.lognormvariate(0, 1) for _ in range(5000)]
    shown = taught(durations).distribution()
    histogram = shown["histogram"]
    assert isinstance(histogram, dict) and sum(histogram["count"]) == shown["count"] == 5000
    known = {float(f"{1e-3 * 10 ** (i / 8):.4g}") for i in range(64)}
    assert set(histogram["low_s"]) <= known
    exact = sorted(durations)
    for share, key in ((0.5, "p50_s"), (0.9, "p90_s"), (0.99, "p99_s")):
        assert shown[key] == pytest.approx(exact[int(share * 5000)], rel=0.2), key
    assert shown["recent"]["max_s"] == pytest.approx(max(durations[-64:]), abs=1e-6)  # type: ignore[index]


def test_an_empty_distribution_can_be_drawn() -> None:
    shown = TimeoutLearner(1.0).distribution()
    assert shown["count"] == 0 and shown["p99_s"] == 0.0


# -- the memories, against dumb twins ----------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=200), st.integers(1, 5))
def test_recent_is_the_sorted_end_of_the_list(durations: list[float], nth: int) -> None:
    recent = Recent()
    for duration_s in durations:
        recent.add(duration_s)
    end = sorted(durations[-64:])
    assert len(recent) == len(end)
    mean = math.exp(sum(math.log(max(d, 1e-6)) for d in end) / len(end)) if end else 0.0
    assert recent.typical_s() == pytest.approx(mean, rel=1e-5)
    assert recent.nth_longest_s(nth) == (end[max(0, len(end) - nth)] if end else 0.0)


@given(st.lists(st.floats(0.2, 1000), min_size=1, max_size=300), st.floats(0.001, 0.999))
@example([1.0, 1.0, 1.0, 1.0, 2.0], 0.20000000000000004)
def test_quantiles_of_the_histogram_are_within_a_bucket(values: list[float], share: float) -> None:
    histogram = LogHistogram(0.1, 5, 48)
    for value in values:
        histogram.add(value)
    ordered = sorted(values, reverse=True)
    exact = ordered[math.ceil(share * len(values) - 1e-9) - 1]
    width = 10 ** (1 / 48)
    assert exact / width * 0.999 <= histogram.exceeded_by([share])[0] <= exact * width * 1.001


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(2.0, 1000.0)), min_size=1, max_size=60))
def test_peaks_stay_few_and_what_is_held_is_found_to_end(gaps: list[tuple[int, float]]) -> None:
    peaks, index = Peaks(), 0
    for gap, duration_s in gaps:
        index += gap
        peaks.add(index, duration_s, 1.0, 10.0)
        held = peaks.held(index)
        assert any(duration_s <= peak.duration_s <= 1.5 * duration_s * 1.5 for peak in held)
        assert len(peaks._kinds) <= 8
    last = max(peak.until for peak in peaks.held(index))
    assert peaks.held(last - 1) and not peaks.held(last)
