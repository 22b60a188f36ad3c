"""The table: every cell decided, no edge that is not drawn, Megatron's cases."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.core.machine import IGNORE, IMPOSSIBLE
from ft_launcher.core.rerun_report import RerunStatus
from rerun.machine import AGREED, EDGES, LEAVING, RESUMABLE, TRANSITIONS, OutsideStepError, RerunMachine
from rerun.words import (
    Event,
    Flags,
    Leave,
    LoopAsked,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    ResultDiffered,
    ResultRejected,
    ResultRepeated,
    Resumed,
    SameDevice,
    Shown,
    StepEnded,
    Turn,
)

S = RerunState
ROOT = Path(__file__).resolve().parents[2]
EVENTS: list[Event] = [
    *(LoopAsked(Flags(*flags)) for flags in itertools.product((False, True), repeat=4)),
    ResultRejected(),
    *(kind(fatal) for kind in (ResultRepeated, ResultDiffered) for fatal in (False, True)),
    SameDevice(),
    StepEnded(),
    *(Resumed(state, Flags(checkpoint=True)) for state in S),
]
ANSWERS = {LoopAsked: Turn, StepEnded: Leave, Resumed: type(None)}


def machine_in(state: RerunState, mode: RerunMode = RerunMode.VALIDATE_RESULTS) -> RerunMachine:
    machine = RerunMachine(mode)
    machine.state = state
    return machine


@pytest.mark.parametrize("mode", list(RerunMode))
def test_every_cell_is_decided_and_no_edge_is_undrawn(mode: RerunMode) -> None:
    assert set(AGREED) == set(LEAVING) == set(EDGES) == set(S)
    for state, event in itertools.product(S, EVENTS):
        machine, cell = machine_in(state, mode), TRANSITIONS[(state, type(event))]
        if cell == IMPOSSIBLE:
            with pytest.raises(OutsideStepError, match=state.value):
                machine.handle(event)
            assert machine.state is state
            continue
        assert isinstance(machine.handle(event), ANSWERS.get(type(event), Shown))
        resumed = isinstance(event, Resumed) and machine.state in {S.NOT_RUNNING_YET, *RESUMABLE}
        assert machine.state is state or machine.state in EDGES[state] or resumed
        assert cell != IGNORE or machine.state is state


def test_the_page_is_that_of_the_table() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "rerun_states.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/rerun_states.py"


def disputed() -> RerunMachine:
    """A machine of a process that has a step behind it, in the rerun in place of a step whose result was rejected."""
    machine = RerunMachine(RerunMode.VALIDATE_RESULTS)
    for event in (LoopAsked(), LoopAsked(), StepEnded(), LoopAsked()):
        machine.handle(event)
    assert machine.examines and machine.handle(ResultRejected()) == Shown(RerunStatus.INITIAL_RUN)
    assert not machine.examines, "one dispute a step"
    turn = machine.handle(LoopAsked(machine.flags))
    assert isinstance(turn, Turn) and (turn.run, turn.begins, turn.rewinds) == (True, False, True)
    return machine


def resumed() -> RerunMachine:
    machine = RerunMachine(RerunMode.VALIDATE_RESULTS)
    machine.handle(Resumed(S.WILL_RERUN_FROM_CHECKPOINT, Flags(rerun=True, checkpoint=True)))
    assert machine.handle(LoopAsked()) == Turn(True) and machine.state is S.RERUNNING_FROM_CHECKPOINT
    return machine


@pytest.mark.parametrize(
    ("start", "event", "shown", "diagnostic", "state", "leave"),
    [
        (disputed, ResultDiffered(True), 3, "transient_error", S.RERUNNING_IN_PLACE, (True, True, 17)),
        (disputed, ResultRepeated(True), 4, None, S.WILL_RERUN_FROM_CHECKPOINT, (True, True, 16)),
        (disputed, ResultDiffered(False), 3, "transient_error", S.NOT_RUNNING_YET, (False, False, 0)),
        (disputed, ResultRepeated(False), 4, None, S.NOT_RUNNING_YET, (False, False, 0)),
        (resumed, SameDevice(), None, None, S.RERUNNING_AGAIN_FROM_CHECKPOINT, (False, True, 16)),
        (resumed, ResultDiffered(True), 5, "persistent_error", S.RERUNNING_FROM_CHECKPOINT, (False, True, 17)),
        (resumed, ResultRepeated(True), 6, "correct_result", S.RERUNNING_FROM_CHECKPOINT, (False, True, 17)),
        (resumed, ResultDiffered(False), 5, "persistent_error", S.NOT_RUNNING_YET, (False, False, 0)),
    ],
)
def test_megatrons_cases(
    start: object, event: Event, shown: int | None, diagnostic: str | None, state: RerunState, leave: tuple[bool, bool, int]
) -> None:
    assert callable(start)
    machine: RerunMachine = start()
    status = None if shown is None else RerunStatus(shown)
    assert machine.handle(event) == Shown(status, None if diagnostic is None else RerunDiagnostic(diagnostic))
    turn = machine.handle(LoopAsked(machine.flags))
    assert isinstance(turn, Turn) and not turn.run and machine.state is state
    answer = machine.handle(StepEnded())
    assert isinstance(answer, Leave) and (answer.checkpoint, answer.exit, answer.code) == leave


def test_asking_again_goes_before_going_on() -> None:
    """Megatron's order where ranks want different things: whoever was on the suspected device has shown nothing yet."""
    machine = resumed()
    machine.handle(LoopAsked(Flags(restart_again=True, proceed=True)))
    assert machine.state is S.RERUNNING_AGAIN_FROM_CHECKPOINT
    machine = disputed()
    machine.handle(LoopAsked(Flags(checkpoint=True, proceed=True)))
    assert machine.state is S.NOT_RUNNING_YET


def test_the_first_step_of_a_process_is_not_examined() -> None:
    machine = RerunMachine(RerunMode.VALIDATE_RESULTS)
    machine.handle(LoopAsked())
    assert not machine.examines


@pytest.mark.parametrize("state", sorted(set(S) - RESUMABLE))
def test_a_checkpoint_whose_verdict_was_given_asks_nothing(state: RerunState) -> None:
    machine = RerunMachine(RerunMode.VALIDATE_RESULTS)
    machine.handle(Resumed(state, Flags(True, True, True, True)))
    assert machine.state is S.NOT_RUNNING_YET and machine.flags == Flags()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.sampled_from(list(RerunMode)))
def test_no_story_leaves_the_table(events: list[Event], mode: RerunMode) -> None:
    """Only a mode that validates ever asks the loop to leave, and only with 16 or 17."""
    machine = RerunMachine(mode)
    for event in events:
        try:
            answer = machine.handle(event)
        except OutsideStepError:
            continue
        if isinstance(answer, Leave):
            assert answer.exit == (answer.code in (16, 17)) and (answer.exit or not answer.checkpoint)
            assert not answer.exit or mode is RerunMode.VALIDATE_RESULTS
