"""Megatron's own RerunStateMachine (megatron-core 0.16.1, on the CPU) and ours see, say and do the same; and where not, that is on purpose and shown here."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_launcher.core.rerun_report import RerunStatus
from monitors import layout
from monitors.rank_page import RankPage, scratch_words
from rerun import adapter, data, megatron_hook, telling
from rerun.compare import COMPARISON_MISMATCH, compare_floats
from rerun.words import RerunState
from tests.rerun.twin import Cast, Check, Fault, Story, Theatre, random_story

pytestmark = pytest.mark.serial  # one process imports megatron-core (seconds), not each of several
RANDOM_STORIES = 150


def both(casts: dict[str, Cast], story: Story, tmp_path: Path) -> tuple[list[Any], list[Any]]:
    seen = []
    for name in ("theirs", "ours"):
        folder = tmp_path / f"{name}{story.seed}"
        folder.mkdir()
        seen.append(Theatre(casts[name], story, folder).play())
    return seen[0], seen[1]


HERE, THERE = (("a", 0),), (("a", 1),)
LOSS = (Check("loss"),)


@pytest.mark.parametrize(
    ("kind", "lives", "codes", "statuses"),
    [
        ("transient", (HERE, HERE), [17], ["INITIAL_RUN", "FIRST_RERUN_NOT_REPRODUCIBLE"]),
        ("persistent", (HERE, THERE), [16, 17], ["INITIAL_RUN", "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_NOT_REPRODUCIBLE"]),
        ("persistent", (HERE, HERE, THERE), [16, 16, 17], ["INITIAL_RUN", "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_NOT_REPRODUCIBLE"]),
        ("application", (HERE, THERE), [16, 17], ["INITIAL_RUN", "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_REPRODUCIBLE"]),
    ],
)
@pytest.mark.parametrize("injected", [False, True])
def test_the_cases_of_the_facts(
    casts: dict[str, Cast], tmp_path: Path, kind: str, lives: Any, codes: list[int], statuses: list[str], injected: bool
) -> None:
    names = {"transient": "transient_error", "persistent": "persistent_error", "application": "correct_result"}
    story = Story(LOSS, () if injected else (Fault(2, 0, 0, kind),), lives, injection=(1 if injected else 0, names[kind]))
    theirs, ours = both(casts, story, tmp_path)
    assert ours == theirs
    ends = [entry[2][0][2] for entry in ours if entry[0] == "end"]
    assert [code for code in ends if code][: len(codes)] == codes
    assert [entry[2] for entry in ours[-1]][: len(statuses)] == statuses


def test_not_fatal_goes_on(casts: dict[str, Cast], tmp_path: Path) -> None:
    for seed, kind in enumerate(("transient", "persistent", "application")):
        story = Story((Check("loss", fatal=False),), (Fault(2, 0, 0, kind),), (HERE,), seed=seed)
        theirs, ours = both(casts, story, tmp_path)
        assert ours == theirs and {entry[2][0] for entry in ours[:-1] if entry[0] == "end"} == {(False, False, 0)}


def test_random_stories(casts: dict[str, Cast], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the stories are not all the same one: every exit code, every status and every state is met."""
    codes, statuses, states = set(), set(), set()
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    for seed in range(RANDOM_STORIES):
        story = random_story(seed)
        theirs, ours = both(casts, story, tmp_path)
        assert ours == theirs, f"random_story({seed}) = {story}"
        codes |= {end for entry in ours[:-1] if entry[0] == "end" for end in entry[2]}
        states |= {name for entry in ours[:-1] if entry[0] == "run" for name in entry[3]}
        statuses |= {entry[2] for entry in ours[-1]}
    assert codes == {(False, False, 0), (True, True, 17), (True, True, 16), (False, True, 16), (False, True, 17)}
    assert len(states) == len(RerunState) and len(statuses) == 6


def test_an_old_dispute_of_another_rank(casts: dict[str, Cast], tmp_path: Path) -> None:
    """On purpose: rank 0 had a dispute that was not fatal. Later rank 1 has one, and Megatron's rank 0 compares its new result with its old one."""
    checks = (Check("loss", fatal=False), Check("norm"))
    places = (("a", 0), ("a", 1))
    story = Story(checks, (Fault(1, 0, 0, "application"), Fault(3, 1, 1, "transient")), (places,))
    casts["theirs"].forget = lambda _: None
    theirs, ours = both(casts, story, tmp_path)
    late = [(rank, status) for rank, iteration, status, _, _ in theirs[-1] if iteration == 3]
    assert (0, "FIRST_RERUN_NOT_REPRODUCIBLE") in late, "Megatron: rank 0 had nothing to dispute in that step"
    assert [(rank, status) for rank, iteration, status, _, _ in ours[-1] if iteration == 3] == [
        (1, "INITIAL_RUN"),
        (1, "FIRST_RERUN_NOT_REPRODUCIBLE"),
    ]
    assert theirs[-2][2][0] == (False, False, 0) and ours[-2][2][0] == (True, True, 17), "and Megatron goes on over rank 1's fatal fault"


def test_resuming_a_transient_verdict(casts: dict[str, Cast], tmp_path: Path) -> None:
    """On purpose: Megatron raises TypeError at the first step, in every cycle; here a state whose verdict was given asks nothing."""
    for name, cast in casts.items():
        stage = Theatre(cast, Story(LOSS, (Fault(1, 0, 0, "transient"),), (HERE,)), tmp_path / name)
        (tmp_path / name).mkdir()
        step, code, saved = stage._live(HERE, 0, None)
        assert (step, code) == (1, 17) and saved is not None
        if name == "theirs":
            with pytest.raises(TypeError):
                stage._live(HERE, step, saved)
        else:
            assert stage._live(HERE, step, saved)[1] is None and ("valid", False) in stage.seen


def test_determinism_is_reported(casts: dict[str, Cast], megatron: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On purpose: Megatron raises when it comes to print what it has found."""
    story = Story(LOSS, (Fault(1, 0, 0, "drift"),), mode="report_determinism_stats")
    casts["theirs"].machine = megatron.RerunStateMachine
    (tmp_path / "theirs").mkdir(), (tmp_path / "ours").mkdir()
    megatron.RerunStateMachine._reduce_any, kept = lambda self, value: True, megatron.RerunStateMachine._reduce_any
    try:
        with pytest.raises(AttributeError, match="filename"):
            Theatre(casts["theirs"], story, tmp_path / "theirs").play()
    finally:
        megatron.RerunStateMachine._reduce_any = kept
    with caplog.at_level("INFO", "rerun"):
        Theatre(casts["ours"], story, tmp_path / "ours").play()
    assert "Computation determinism of 'loss': 5/4 total/identical samples, rel. variability: avg=" in caplog.text


def test_megatrons_own_checkpoint_is_understood(casts: dict[str, Cast], tmp_path: Path) -> None:
    """A loop that changes its import between exit 16 and the resume still gets its verdict."""
    story = Story(LOSS, (Fault(2, 0, 0, "persistent"),), (HERE,))
    (tmp_path / "x").mkdir()
    stage = Theatre(casts["theirs"], story, tmp_path / "x")
    step, code, saved = stage._live(HERE, 0, None)
    stage.cast = casts["ours"]
    assert code == 16 and stage._live(THERE, step, saved)[1] == 17
    assert stage.seen[-1][2] == [(False, True, 17)]


def test_opposite_infinities_and_numbers_differ(megatron: Any) -> None:
    """On purpose: Megatron compares NaN (so: the same) and divides by zero."""
    inf, one = torch.tensor(float("inf")), torch.tensor(1.0)
    assert not megatron._compare_floats(inf, -inf) > 0 and compare_floats(inf, -inf) == COMPARISON_MISMATCH
    with pytest.raises(ZeroDivisionError):
        megatron._compare_floats(one, -one)
    assert compare_floats(one, -one) == COMPARISON_MISMATCH
    numbers = [0.0, 1.0, 1.0001, -3.0, 1e30, float("nan"), float("inf")]
    for a in numbers:
        for b in numbers:
            assert compare_floats(torch.tensor(a), torch.tensor(b)) == megatron._compare_floats(torch.tensor(a), torch.tensor(b))


def test_large_values(megatron: Any) -> None:
    r = random.Random(1)
    theirs, ours = megatron.RerunStateMachine(), adapter.RerunStateMachine()
    for n in range(2000):
        value = torch.tensor(r.choice((1.0, 5.0, 49.0, 51.0, -60.0, 1e9, float("nan"), float("inf"))) * r.random())
        context, resample = r.choice(("loss", "grads")), n in (700, 900)
        answers = {m.is_unexpectedly_large(value, 10.0, context, 50, resample) for m in (theirs, ours)}
        assert len(answers) == 1
    ours.LARGE_VALUE_FACTOR = 1.0
    assert ours.is_unexpectedly_large(torch.tensor(1e9), context="loss") == megatron.RerunStateMachine.is_unexpectedly_large(
        theirs, torch.tensor(1e9), 1.0, "loss"
    )


def test_iterations_to_skip(megatron: Any, tmp_path: Path) -> None:
    r = random.Random(2)
    path = tmp_path / "tracker"
    for _ in range(30):
        lines = [
            f"ts=2026-01-01 00:00:00 node=n device=0 jobID={r.randrange(2)} rank={r.randrange(3)} iteration={r.randrange(4)} "
            f"status={r.choice(list(megatron.RerunValidationStatus))} result=nan message='loss'\n"
            for _ in range(r.randrange(8))
        ]
        path.write_text("".join(lines))
        ask = "get_skipped_iterations_from_tracker_file"
        assert getattr(adapter.RerunStateMachine, ask)(str(path)) == getattr(megatron.RerunStateMachine, ask)(str(path))


def test_the_same_public_names(megatron: Any) -> None:
    import rerun

    for name in rerun.__all__:
        assert hasattr(megatron, name) and getattr(rerun, name) is not None
    for kind in ("RerunMode", "RerunDiagnostic", "RerunState"):
        assert list(getattr(megatron, kind).__members__) == list(getattr(rerun, kind).__members__)
    methods = {n for n in vars(megatron.RerunStateMachine) if not n.startswith("_")}
    assert methods <= set(dir(adapter.RerunStateMachine)) and {n for n in vars(megatron.RerunDataIterator) if n[:2] != "__"} <= set(
        dir(data.RerunDataIterator)
    )
    for name in ("EXIT_CODE_RESUME_TO_DISAMBIGUATE", "EXIT_CODE_FAILED_ON_RESULT_VALIDATION"):
        assert getattr(rerun, name) == getattr(megatron, name)


# -- unmodified Megatron with the hook


@pytest.fixture
def hooked(casts: dict[str, Cast], megatron: Any, monkeypatch: pytest.MonkeyPatch) -> Cast:
    """Megatron's class with the hook's lessons, as a rank of the launcher on a CPU: one host, no index; only the slot tells places apart."""
    spec = importlib.util.spec_from_file_location("megatron_rerun_copy", megatron.__file__)
    assert spec is not None and spec.loader is not None
    copy: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    spec.loader.exec_module(copy)
    megatron_hook.teach(copy)
    cast, speak = casts["theirs"], casts["theirs"].speak

    def speak_in_slot(rank: int, where: tuple[str, int], machines: list[Any]) -> None:
        speak(rank, where, machines)
        monkeypatch.setenv("FT_NODE_ID", where[0])
        monkeypatch.setenv("FT_SLOT", str(where[1]))

    theirs = cast.machine
    for name in ("safe_get_rank", "log_single_rank", "get_rerun_state_machine"):
        monkeypatch.setattr(copy, name, getattr(megatron, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    made = type("Hooked", (copy.RerunStateMachine,), {"_reduce_any": theirs._reduce_any})
    return Cast(made, copy.RerunDataIterator, lambda rate, kind: copy.RerunErrorInjector(), copy.RerunMode, speak_in_slot)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPage]:
    """The section page of this process."""
    made = RankPage(scratch_words())
    monkeypatch.setattr(telling, "own_page", lambda: made)
    yield made


def reported(page: RankPage) -> int:
    return page.words[layout.RERUN_STATUS]


@pytest.mark.parametrize(("again", "code", "status"), [(HERE, 16, 0), (THERE, 17, 5), ((("b", 0),), 17, 5)])
def test_the_hook_tells_places_apart_by_slot(hooked: Cast, page: RankPage, tmp_path: Path, again: Any, code: int, status: int) -> None:
    stage = Theatre(hooked, Story(LOSS, (Fault(2, 0, 0, "persistent"),), (HERE,)), tmp_path)
    step, first, saved = stage._live(HERE, 0, None)
    assert (step, first, reported(page)) == (2, 16, RerunStatus.FIRST_RERUN_REPRODUCIBLE)
    telling.take_back()
    assert stage._live(again, step, saved)[1] == code and reported(page) == status


def test_without_the_hook_every_slot_of_a_host_is_the_same(casts: dict[str, Cast], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the hook is for."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stage = Theatre(casts["theirs"], Story(LOSS, (Fault(2, 0, 0, "persistent"),), (HERE,)), tmp_path)
    step, _, saved = stage._live(HERE, 0, None)
    assert stage._live(THERE, step, saved)[1] == 16


@pytest.mark.parametrize("kind", ["transient", "persistent"])
def test_the_hook_acts_upon_a_verdict(hooked: Cast, page: RankPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Unhooked, the first raises TypeError for ever, the second exits 17 for ever; with the verdict known, both end well, asked for validity or not."""
    stage = Theatre(hooked, Story(LOSS, (Fault(2, 0, 0, kind),), (HERE,)), tmp_path)
    step, code, saved = stage._live(HERE, 0, None)
    if kind == "persistent":
        assert stage._live(THERE, step, saved)[1] == 17
    else:
        assert code == 17 and reported(page) == RerunStatus.FIRST_RERUN_NOT_REPRODUCIBLE
    monkeypatch.setenv(telling.VERDICT, kind)
    telling.take_back()
    assert stage._live(THERE, step, saved)[1] is None and ("valid", False) in stage.seen and reported(page) == 0


class Generators:
    """Like Megatron's tracker of generators: gives out a copy, keeps what it is given, and writes into it."""

    def __init__(self) -> None:
        self.states = {"draws": 0}

    def get_states(self) -> dict[str, int]:
        return dict(self.states)

    def set_states(self, states: dict[str, int]) -> None:
        self.states = states


def test_the_step_begins_again_even_if_what_is_put_back_is_written_to(hooked: Cast, casts: dict[str, Cast], tmp_path: Path) -> None:
    """Megatron's tracker of generators does that; without the hook the checkpoint gets the state of the step's end."""
    for name, cast in (("hooked", hooked), ("ours", casts["ours"]), ("theirs", casts["theirs"])):
        generators = Generators()
        machine = cast.machine(
            mode=cast.mode("validate_results"), state_save_func=generators.get_states, state_restore_func=generators.set_states
        )
        cast.speak(0, ("a", 0), [machine])
        samples = cast.iterator(iter(range(100)))
        for result in (1.0, -1.0):
            while machine.should_run_forward_backward(samples):
                next(samples)
                generators.states["draws"] += 1
                machine.validate_result(torch.tensor(result), lambda r: r < 0, "loss")
            machine.should_checkpoint_and_exit()
        assert machine.state.name == "WILL_RERUN_FROM_CHECKPOINT"
        assert generators.states["draws"] == (2 if name == "theirs" else 1), name


def test_what_is_not_fatal_is_taken_back(
    hooked: Cast, casts: dict[str, Cast], page: RankPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    report = RankPage.report_rerun
    monkeypatch.setattr(RankPage, "report_rerun", lambda self, *what: (told.append(what[0]), report(self, *what)))
    for name, cast in (("hooked", hooked), ("ours", casts["ours"])):
        (tmp_path / name).mkdir()
        told.clear()
        Theatre(cast, Story((Check("loss", fatal=False),), (Fault(2, 0, 0, "application"),), (HERE,)), tmp_path / name).play()
        assert told == [RerunStatus.INITIAL_RUN, RerunStatus.FIRST_RERUN_REPRODUCIBLE, 0] and reported(page) == 0
