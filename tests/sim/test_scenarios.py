"""Named stories, each with its complete output; and stories that once broke an invariant.

A file in `tests/scenarios` holds the script, a line of dashes, and everything the run says. After a change of wording: FT_WRITE_SCENARIOS=1 pytest tests/sim/test_scenarios.py, and read the
difference. A file in `tests/scenarios/found` holds a script alone: no invariant may break any more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.errors import ConfigError
from ft_launcher.sim import script
from ft_launcher.sim.main import summary
from tests.sim.worlds import OPEN, ran, small

FOLDER = Path(__file__).parent.parent / "scenarios"
RULE = "-" * 40
STORIES = sorted(FOLDER.glob("*.txt"))
FOUND = sorted((FOLDER / "found").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    told, _, expected = path.read_text().partition(RULE + "\n")
    world = ran(script.read(told))
    said = "\n".join([*world.trace.lines(), *summary(world)]) + "\n"
    if os.environ.get("FT_WRITE_SCENARIOS"):
        path.write_text(f"{told}{RULE}\n{said}")
    else:
        assert said == expected
    assert not world.violations


def test_the_named_stories_are_there() -> None:
    wanted = {"crash", "crash_during_restart", "node_lost_with_spare", "drain", "finish_with_stragglers"}
    assert wanted <= {path.stem for path in STORIES}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.xfail(strict=True, reason="open")] if p.stem in OPEN else []) for p in FOUND]
)
def test_what_was_found_stays_fixed(path: Path) -> None:
    world = ran(script.read(path.read_text()))
    assert not world.violations, world.violations[0]
    assert sum(world.tally.faults.values()) > 0, "the story strikes nobody any more: it proves nothing"


def test_open_names_are_stories() -> None:
    assert set(OPEN) <= {path.stem for path in FOUND}


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_world_survives_being_written_and_read(seed: int) -> None:
    setting = small(seed)
    again = script.read(script.write(setting))
    assert again == setting
    assert ran(again).trace.digest() == ran(setting).trace.digest()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no `world` line"),
        ("at 1 crash rank=0 signal=9", "line 1"),
        ("world ranks=5 nodes=2", "5 ranks on 2 nodes"),
        ("world ranks=4 speed=3", "unknown word 'speed'"),
        ("world ranks=4\nat 1 flood rank=0", "line 2: at 1 flood rank=0: unknown kind of fault 'flood'"),
        ("world ranks=4\nat soon crash rank=0 signal=9", "line 2"),
    ],
)
def test_a_bad_scenario_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script.read(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
