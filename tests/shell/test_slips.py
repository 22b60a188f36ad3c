"""A misspelt section is said once; names of one's own are left alone."""

from __future__ import annotations

import pytest

from ft_launcher.config import SECTIONS
from ft_launcher.shell.slips import Slips, meant


@pytest.mark.parametrize(
    ("name", "other"),
    [("stpe", "step"), ("setp", "setup"), ("steps", "step"), ("Step", "step"), ("checkpoint", "checkpointing"), ("set_up", "setup")],
)
def test_a_name_near_a_known_one_is_taken_for_a_slip(name: str, other: str) -> None:
    assert meant(name, SECTIONS) == other


@pytest.mark.parametrize("name", ["step", "setup", "evaluation", "data", "validation_step", "training", "save", "stop_profiler", "substep"])
def test_a_known_name_or_one_of_its_own_is_not(name: str) -> None:
    assert meant(name, SECTIONS) is None


def test_a_slip_is_said_once_and_not_beside_the_name_it_resembles() -> None:
    said: list[str] = []
    slips = Slips(said.append)
    for names in ((), ("setup",), ("setup", "stpe"), ("setup", "stpe", "data"), ("stpe",)):
        slips.look(names, SECTIONS)
    assert len(said) == 1
    assert "'stpe', which has no limit" in said[0]
    assert "--timeouts +stpe=SECONDS" in said[0]
    beside: list[str] = []
    Slips(beside.append).look(("checkpoint", "checkpointing"), SECTIONS)
    Slips(beside.append).look(("steps",), [*SECTIONS, "steps"])  # with a limit of its own, as NVRx's client may give it one
    assert beside == []
