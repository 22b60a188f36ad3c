"""One sample an occurrence, whoever reports what when; which occurrences count; under which name a timeout is kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitors.timeouts import TimeoutLearner
from monitors.timeouts_book import LAG, MAX_JUMP, MAX_SECTIONS, WARMUP, WINDOW, Occurrence, Relevance, SectionBook, learning_key

Report = tuple[str, int, int, float]


def fed(book: SectionBook, reports: list[Report]) -> list[Occurrence]:
    return [occurrence for report in reports for occurrence in book.add(*report)]


def shuffled(draw: random.Random, ranks: int, count: int, spread: int) -> list[Report]:
    """Every rank's reports of `count` steps, out of order by about `spread` occurrences, some twice."""
    reports = [("step", rank, i, draw.uniform(0, 5)) for rank in range(ranks) for i in range(count)]
    reports.sort(key=lambda r: r[2] + draw.uniform(0, spread))
    again = draw.sample(reports, len(reports) // 3)
    for report in again:
        at = reports.index(report)
        reports.insert(draw.randint(at, len(reports)), (*report[:3], report[3] + 100.0))  # a duplicate must change nothing
    return reports


def longest(reports: list[Report], index: int) -> float:
    first: dict[int, float] = {}
    for _, rank, i, duration_s in reports:
        if i == index:
            first.setdefault(rank, duration_s)
    return max(first.values())


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_order_gives_the_longest_of_all_ranks_in_order(seed: int, ranks: int, count: int) -> None:
    reports = shuffled(random.Random(seed), ranks, count, spread=LAG - 1)
    found = fed(book := SectionBook(ranks), reports)
    assert [o.index for o in found] == list(range(count))
    assert all(o.ranks == ranks for o in found)
    assert [o.duration_s for o in found] == [longest(reports, i) for i in range(count)]
    assert [o.warmup for o in found] == [i < WARMUP for i in range(count)]
    assert book.flush() == []


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_two_levels_of_books_are_one_book(seed: int) -> None:
    draw = random.Random(seed)
    reports = shuffled(draw, 6, 20, spread=LAG - 1)
    top, nodes = SectionBook(3), [SectionBook(2) for _ in range(3)]
    found = []
    for section, rank, index, duration_s in reports:
        for o in nodes[rank // 2].add(section, rank % 2, index, duration_s):
            found += top.add(o.section, rank // 2, o.index, o.duration_s)
    assert [(o.index, o.duration_s) for o in found] == [(o.index, o.duration_s) for o in fed(SectionBook(6), reports)]


def test_nothing_is_emitted_before_the_slowest_has_reported() -> None:
    book = SectionBook(3)
    assert fed(book, [("step", 0, 0, 1.0), ("step", 1, 0, 1.1)]) == []
    assert fed(book, [("step", 2, 0, 9.0)]) == [Occurrence("step", 0, 9.0, 3, warmup=True)]


def test_a_rank_that_fell_silent_is_waited_for_and_then_not() -> None:
    book, found = SectionBook(2), []
    fed(book, [("step", 1, 0, 1.0), ("step", 0, 0, 1.0)])
    for i in range(1, WINDOW + 11):
        found += book.add("step", 0, i, 2.0)
    assert [(o.index, o.ranks) for o in found] == [(i, 1) for i in range(1, 11)]
    assert book.add("step", 1, 5, 9.0) == [] and book.dropped == 1  # too late
    assert book.add("step", 1, 11, 9.0)[0] == Occurrence("step", 11, 9.0, 2)


def test_a_section_that_rank_0_has_alone_does_not_wait_for_the_others() -> None:
    book = SectionBook(8)
    found = [o for i in range(20) for o in book.add("checkpointing", 0, i, 30.0 + i)]
    assert [(o.index, o.duration_s) for o in found] == [(i, 30.0 + i) for i in range(20 - LAG)]
    assert [o.index for o in book.flush()] == list(range(20 - LAG, 20))
    assert book.add("checkpointing", 1, 3, 1.0) == [] and book.dropped == 1


def test_an_occurrence_that_all_lost_is_stepped_over() -> None:
    """A page's ring holds 128: an agent that did not look for long finds a gap. A new controller begins in the middle."""
    book = SectionBook(2)
    reports = [("step", rank, i, 1.0) for i in [*range(5000, 5010), *range(5300, 5320)] for rank in (0, 1)]
    found = [o.index for o in fed(book, reports)]
    assert found == [*range(5000, 5010), *range(5300, 5320)]


def test_sections_do_not_wait_for_each_other() -> None:
    book = SectionBook(2)
    book.add("checkpointing", 0, 0, 60.0)
    assert fed(book, [("step", 0, 0, 1.0), ("step", 1, 0, 1.0)]) == [Occurrence("step", 0, 1.0, 2, warmup=True)]
    assert [o.section for o in book.flush()] == ["checkpointing"]


@pytest.mark.parametrize(
    "report", [("step", 2, 3, 1.0), ("step", -1, 3, 1.0), ("step", 0, -1, 1.0), ("step", 0, 10**15, 1.0), ("step", 0, 4, float("nan"))]
)
def test_what_a_broken_rank_says_is_dropped(report: Report) -> None:
    book = SectionBook(2)
    fed(book, [("step", rank, i, 1.0) for i in range(3) for rank in (0, 1)])
    assert book.add(*report) == [] and book.dropped == 1
    assert [o.index for o in fed(book, [("step", 0, 3, 1.0), ("step", 1, 3, 1.0)])] == [3]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 6), st.integers(-5, 9000), st.floats(-1, 10)), max_size=300))
@settings(deadline=None)
def test_memory_and_order_hold_for_any_reports(reports: list[Report]) -> None:
    book = SectionBook(5)
    last: dict[str, int] = {}
    for report in reports:
        for o in book.add(*report):
            assert o.index > last.get(o.section, -1)
            last[o.section] = o.index
        assert all(len(page.rows) <= WINDOW + 1 for page in book._pages.values())
    for o in book.flush():
        assert o.index > last.get(o.section, -1)
        last[o.section] = o.index
    assert not any(page.rows for page in book._pages.values())


def test_endless_section_names_do_not_fill_the_memory() -> None:
    book = SectionBook(1)
    for i in range(MAX_SECTIONS + 50):
        book.add(f"s{i}", 0, 0, 1.0)
    assert len(book._pages) == MAX_SECTIONS and book.dropped == 50
    assert MAX_JUMP > WINDOW


def test_a_book_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SectionBook(0)


# -- which occurrences count -----------------------------------------------------------------------------------------------------------------------------------


def learn(section: str, ceiling_s: float, durations: list[float]) -> tuple[TimeoutLearner, list[float]]:
    """A learner behind a Relevance; and the durations that its limit would have ended."""
    learner, relevant, killed = TimeoutLearner(ceiling_s=ceiling_s), Relevance(section, ceiling_s), []
    for duration_s in durations:
        if duration_s > learner.decide().hard_s:
            killed.append(duration_s)
        if relevant.counts(duration_s):
            learner.observe(duration_s)
    return learner, killed


@pytest.mark.parametrize("empty_s", [5e-6, 2e-3, 0.03])
@pytest.mark.parametrize("first_save", [30, 500, 2000])
@pytest.mark.parametrize("save_s", [4.0, 40.0, 350.0])
def test_megatrons_empty_checkpointing_never_gets_a_real_save_killed(empty_s: float, first_save: int, save_s: float) -> None:
    """Every iteration opens the section; one in 20 of the empty ones is stretched by a pause of up to 1.7 s."""
    draw = random.Random(f"{empty_s}{first_save}")
    durations = [empty_s * draw.lognormvariate(0, 0.5) + (draw.uniform(0, 1.7) if draw.random() < 0.05 else 0.0) for _ in range(20_000)]
    for i in range(first_save, 20_000, 500):
        durations[i] = min(410.0, save_s * draw.lognormvariate(0, 0.3))
    learner, killed = learn("checkpointing", 420.0, durations)
    assert killed == []
    saves = [durations[i] for i in range(first_save, 20_000, 500)]
    stretched_first = durations[0] > 0.42  # before anything empty was seen
    assert learner.count == sum(d >= 2.0 for d in saves) + stretched_first


def test_saves_without_empty_ones_are_all_samples() -> None:
    learner, killed = learn("checkpointing", 420.0, [random.Random(3).uniform(0.6, 1.5) for _ in range(60)])
    assert (learner.count, killed) == (60, []) and learner.decide().learned


def test_a_step_is_progress_however_short() -> None:
    learner, _ = learn("step", 180.0, [1e-4] * 40)
    assert learner.count == 40 and learner.decide().hard_s < 10


def test_what_is_always_short_keeps_its_ceiling() -> None:
    learner, _ = learn("forward", 180.0, [0.02] * 5000)
    assert learner.count == 0 and learner.decide().hard_s == 180.0


def test_much_shorter_than_the_longest_is_nothing_once_there_was_nothing() -> None:
    relevant = Relevance("checkpointing", 420.0)
    assert [relevant.counts(d) for d in (1e-5, 300.0, 5.0, 7.0)] == [False, True, False, True]


def test_relevance_is_kept_over_restarts_and_garbage_is_as_nothing() -> None:
    relevant = Relevance("checkpointing", 420.0)
    relevant.counts(1e-5), relevant.counts(300.0)
    again = Relevance.from_json(relevant.to_json(), "checkpointing", 420.0)
    assert not again.counts(5.0) and again.counts(7.0)
    for garbage in (None, [], {"idle": -1, "longest_s": 1.0}, {"idle": 1, "longest_s": float("nan")}, {"idle": "1", "longest_s": 0}):
        assert Relevance.from_json(garbage, "checkpointing", 420.0).to_json() == {"idle": 0, "longest_s": 0.0}


# -- the key -------------------------------------------------------------------------------------------------------------------------------------------------

TOPOLOGY = {"tp": 2, "pp": 4, "dp": 8}


def test_the_key_is_the_same_everywhere_and_for_any_order_of_the_topology() -> None:
    assert learning_key("step", TOPOLOGY, "pretrain.py", ["--lr", "1"]) == "step@da5ffee8046a6737"
    assert learning_key("step", dict(reversed(TOPOLOGY.items())), "pretrain.py", ["--lr", "1"]) == "step@da5ffee8046a6737"


def test_the_key_tells_everything_apart() -> None:
    keys = [
        learning_key("step", TOPOLOGY, "pretrain.py", ["--lr", "1"]),
        learning_key("checkpointing", TOPOLOGY, "pretrain.py", ["--lr", "1"]),
        learning_key("step", {**TOPOLOGY, "tp": 4}, "pretrain.py", ["--lr", "1"]),
        learning_key("step", TOPOLOGY, "other.py", ["--lr", "1"]),
        learning_key("step", TOPOLOGY, "pretrain.py", ["--lr", "2"]),
        learning_key("step", TOPOLOGY, "pretrain.py", ["--lr 1"]),
        learning_key("step", TOPOLOGY, "pretrain.py", ["--lr", "1", ""]),
        learning_key("step", TOPOLOGY, "pretrain.py", ["\udcff"]),
    ]
    assert len(set(keys)) == len(keys)
