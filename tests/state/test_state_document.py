from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_samples import AT, cycle, full, run_info

from ft_launcher.state import document as doc
from ft_launcher.state import history, nvrx
from ft_launcher.state.file import render

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/ft_state.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def errors(document: doc.Document) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in CHECK.iter_errors(document)]


def test_schema_in_docs_and_in_the_package_are_the_same_and_a_schema() -> None:
    assert (ROOT / "docs/ft_state.schema.json").read_bytes() == (ROOT / "ft_launcher/state/ft_state.schema.json").read_bytes()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("document", [full(), doc.empty(), doc.begin_run(None, run_info()), full("other", previous=full())])
def test_what_we_build_fits_the_schema(document: doc.Document) -> None:
    assert errors(json.loads(render(document)[0])) == []


def test_the_schema_refuses_what_we_never_write() -> None:
    base = full()
    for change in (
        {"run": {**base["run"], "cycle": -1}},
        {"run": {**base["run"], "started": "yesterday"}},
        {"current_timeouts": {**base["current_timeouts"], "ours": 1}},
        {"cycles": [{"n": 1}]},
        {"hardware": {"no slot": base["hardware"]["node-a/3"]}},
        {"budgets": {"restarts": {"used": 1}}},
        {"schema": "ft-state/9"},
    ):
        assert errors({**base, **change}), change
    assert errors({**base, "a key of a later launcher": 1}) == []


def test_another_run_that_still_writes_is_noticed() -> None:
    before = doc.at_position(doc.begin_run(None, run_info("theirs")), "2026-03-01T08:00:00.000Z", phase="running")
    soon, later = "2026-03-01T08:00:20.000Z", "2026-03-01T08:01:00.000Z"
    assert doc.still_written(before, "ours", soon) == "theirs"
    assert doc.still_written(before, "theirs", soon) is None, "another launch of the same run is told apart by its generation"
    assert doc.still_written(before, "ours", later) is None
    assert doc.still_written(doc.at_position(before, soon, outcome="failed"), "ours", soon) is None
    for nothing in (None, doc.empty(), {"run": {"id": "x", "written": 5}}, {"run": {"id": "x", "written": "soon"}}):
        assert doc.still_written(nothing, "ours", soon) is None


def test_updates_never_change_a_document_that_was_handed_out() -> None:
    before = full()
    kept = copy.deepcopy(before)
    doc.with_cycle(before, cycle(9))
    doc.with_timeouts(before, {"step": doc.SectionTimeout(1.0, "changed")}, AT)
    doc.with_device(before, "node-a/3", suspicions=2, verdict={"at": AT, "verdict": "persistent"})
    doc.at_position(before, AT, cycle=9)
    doc.begin_run(before, run_info("another"))
    history.united(before, full("another", at_cycle=5))
    assert before == kept


def test_size_is_bounded_and_older_cycles_are_counted() -> None:
    made = doc.begin_run(None, run_info())
    for n in range(700):
        made = doc.with_cycle(made, doc.CycleRecord(n, 0, AT, AT, "x" * 50_000, "crash"))
        made = doc.with_timeouts(made, {f"user-{n}": doc.SectionTimeout(n + 1.0, "w" * 9_000)}, AT)
        made = doc.with_device(made, f"node-{n}/0", verdict={"at": AT, "verdict": "transient"})
    assert [one["n"] for one in made["cycles"]] == list(range(500, 700))
    assert made["dropped"] == {"cycles": 500, "through": [0, 499]}
    assert len(made["sections"]) <= doc.KEEP_SECTIONS
    assert len(render(made)[0]) < 3_000_000
    assert errors(made) == []


def test_a_quarantined_device_is_never_forgotten_for_room() -> None:
    made = doc.with_device(full(), "bad/0", quarantine_until=AT)
    for n in range(doc.KEEP_DEVICES + 50):
        made = doc.with_device(made, f"n{n}/0", suspicions=1)
    assert len(made["hardware"]) == doc.KEEP_DEVICES
    assert "bad/0" in made["hardware"]
    assert f"n{doc.KEEP_DEVICES + 49}/0" in made["hardware"]


def test_a_changed_timeout_is_history_and_an_unchanged_one_is_not() -> None:
    made = full()
    for value in (9.5, 9.5, 7.0, 7.0):
        made = doc.with_timeouts(made, {"step": doc.SectionTimeout(value, "learned", learned=True)}, AT)
    assert [change["hard_s"] for change in made["sections"]["step"]["history"]] == [9.5, 7.0]
    assert made["current_timeouts"]["section"]["section"] == {"step": 7.0}


def test_a_cycle_is_replaced_by_what_is_known_of_it_later() -> None:
    made = doc.with_cycle(full(), doc.CycleRecord(2, 0, AT, AT, "node lost", "node_lost"))
    assert [(one["n"], one["cause"]) for one in made["cycles"]] == [(0, "crash"), (1, "crash"), (2, "node_lost")]


def test_a_new_generation_goes_on_and_another_run_leaves_a_summary() -> None:
    again = doc.begin_run(full(), run_info(generation=1))
    assert len(again["cycles"]) == 3
    assert again["budgets"] == full()["budgets"]
    other = doc.begin_run(full(), run_info("job8"))
    assert other["cycles"] == []
    assert other["budgets"] == {}
    assert other["hardware"] == full()["hardware"]
    assert other["sections"] == full()["sections"]
    assert other["earlier_runs"]["job7"]["cycles"] == 3
    assert other["earlier_runs"]["job7"]["causes"] == {"crash": 2}


def test_another_controller_goes_on_with_what_the_former_one_wrote() -> None:
    later = replace(run_info(), started="2025-03-02T10:00:00.000Z")
    found = full()
    taken = doc.taken_over(doc.begin_run(found, later), found)
    assert {**taken["run"], "written": AT} == {**found["run"], "written": AT}
    assert doc.cycles_in(taken, 0)[1] == cycle(1)
    assert doc.cycles_in(taken, 0)[2] == doc.CycleRecord(2, 0, AT)
    assert doc.cycles_in(taken, 1) == {}
    for other in (doc.empty(), full("job8"), full(generation=1)):
        assert doc.taken_over(doc.begin_run(found, later), other)["run"]["started"] == later.started


def test_entries_of_cycles_that_make_no_sense_are_not_gone_on_with() -> None:
    bad = [{"n": 0, "generation": 0}, {"n": 1, "generation": 0, "start": AT, "culprit": {"rank": 3}}]
    assert doc.cycles_in({**full(), "cycles": bad}, 0) == {}


def test_a_former_controllers_last_word_of_a_cycle_stands() -> None:
    """It reached the disk after its successor had read."""
    over = doc.with_cycle(full(), doc.CycleRecord(2, 0, AT, "2025-03-01T11:00:00.000Z", "stopped by SIGTERM", "drain"))
    assert history.united(full(), over)["cycles"][2]["cause"] == "drain"
    assert history.united(over, full())["cycles"][2]["cause"] == "drain"
    another = doc.with_cycle(full(at_cycle=1), doc.CycleRecord(2, 0, "2025-03-01T12:00:00.000Z"))
    assert history.united(another, over)["cycles"][2]["cause"] is None, "it began after that end: another cycle of the same number"


def test_fence_orders_by_generation_then_cycle_then_revision() -> None:
    older, newer = full(at_cycle=5), full(generation=1, at_cycle=0)
    assert history.is_older(older, newer)
    assert not history.is_older(newer, older)
    assert not history.is_older(older, older)
    assert not history.is_older(older, full("another", generation=9))
    same = doc.at_position(older, AT, revision=99)
    assert history.is_older(older, same)
    assert not history.is_older(doc.at_position(older, AT, revision=None), same)


cycles = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=40, unique=True)


@settings(max_examples=60, deadline=None)
@given(cycles, cycles, st.sampled_from(["job7", "job8"]))
def test_uniting_loses_nothing_and_is_idempotent(mine: list[tuple[int, int]], theirs: list[tuple[int, int]], disk_run: str) -> None:
    def built(numbers: list[tuple[int, int]], run_id: str) -> doc.Document:
        made = doc.begin_run(None, run_info(run_id, 3))
        for generation, n in numbers:
            made = doc.with_cycle(made, cycle(n, generation))
        return doc.with_device(made, f"{run_id}/{len(numbers)}", suspicions=1)

    document, disk = built(mine, "job7"), built(theirs, disk_run)
    once = history.united(document, disk)
    numbers = {(one["generation"], one["n"]) for one in once["cycles"]}
    assert numbers == (set(mine) | set(theirs) if disk_run == "job7" else set(mine))
    assert once["hardware"].keys() >= document["hardware"].keys() | disk["hardware"].keys()
    assert history.united(once, disk) == once == history.united(once, once)
    assert ("job8" in once["earlier_runs"]) == (disk_run == "job8")


def test_uniting_does_not_bring_back_or_count_twice_what_was_dropped() -> None:
    made = doc.begin_run(None, run_info())
    for n in range(250):
        made = doc.with_cycle(made, cycle(n))
    stale = doc.begin_run(None, run_info())
    for n in range(100):
        stale = doc.with_cycle(stale, cycle(n))
    both = history.united(made, stale)
    assert both["dropped"] == {"cycles": 50, "through": [0, 49]}
    assert [one["n"] for one in both["cycles"]] == list(range(50, 250))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*doc.OWN_KEYS, "current_timeouts", "x"]), json_values, max_size=9), json_values)
def test_any_object_is_repaired_into_one_that_every_update_accepts(raw: dict, inner: object) -> None:
    nested = {"sections": {"step": inner}, "hardware": {"a/0": inner}, "cycles": [inner], "earlier_runs": {"r": inner}, "run": inner}
    for candidate in (raw, {**raw, **nested}):
        document, _ = history.repaired(candidate)
        again = doc.begin_run(document, run_info("new"))
        again = doc.with_timeouts(again, {"step": doc.SectionTimeout(3.0, "x")}, AT)
        again = doc.with_device(doc.with_cycle(again, cycle(1)), "a/0", verdict={"at": AT, "verdict": "transient"})
        history.united(again, document)
        history.united(full(), document)


def test_numbers_json_lacks_and_objects_become_null_or_text_with_a_note() -> None:
    data, notes = render({**full(), "budgets": {"x": {"used": float("nan"), "limit": {7}}}, "odd": Path("/x")})
    assert json.loads(data)["budgets"]["x"] == {"used": None, "limit": [7]}
    assert json.loads(data)["odd"] == "/x"
    assert len(notes) == 1


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {"x": {}},
        {"section": []},
        {"section": {"section": {"step": 0}}},
        {"section": {"section": {"step": -1.0}}},
        {"section": {"section": {"step": "9"}}},
        {"section": {"section": {"step": True}}},
        {"section": {"section": {"step": float("inf")}}},
        {"section": {"section": {"step": float("nan")}}},
        {"section": {"section": {"step": 10**400}}},
        {"section": {"section": {}, "ours": 1}},
        {"section": {"section": {}, "calculated_sections": ["step"]}},
        {"section": {"section": {}, "out_of_section": 0}},
        {"section": {"section": {}, "is_out_of_section_calculated": 1}},
        {"section": {"section": {str(n): 1.0 for n in range(300)}}},
        {"heartbeat": {"initial": 1.0, "subsequent": -1.0}},
        {"heartbeat": {"beat": 1}},
    ],
)
def test_foreign_timeouts_that_make_no_sense_are_refused_in_one_line(bad: object) -> None:
    trouble = nvrx.trouble_in(bad)
    assert trouble
    assert "\n" not in trouble
    assert len(trouble) < 300
