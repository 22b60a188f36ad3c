"""docs/operations.md quotes the launcher: what it quotes is still said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
CODE = "\n".join(path.read_text() for folder in ("ft_launcher", "monitors") for path in sorted((ROOT / folder).rglob("*.py")))

FRAGMENTS = [
    "all ranks finished",
    "a restart cannot cure that",
    " while others were at work; ",
    "was in quarantine already and no other hardware has come: requeue elsewhere",
    " has taken the checkpoint folder: restarting would take it back, so this one ends",
    "requeue elsewhere",
    "it is correct, and the application is the cause",
    "no record says whether the hardware is at fault",
    "not enough healthy nodes after",
    "not enough healthy nodes: ",
    "cycles in a row without going beyond",
    "stopped by ",
    "the launcher cannot go on: ",
    "every rank has completed a step",
    "stood still because of it",
    "the culprit cannot be told: ",
    "next cycle in ",
    "no restart is charged",
    "the zygote has not answered for ",
    "ranks are started by ",
    "source files changed since they were imported",
    "before the first rank can start (--preload)",
    "rank 0 will host it",
    "has attached no monitoring client in ",
    "for a spare in place of ",
    "did not end within ",
    "GiB more in use than before the first cycle",
    "s after the last rank had gone",
    "the GPU driver does not answer (asked for ",
    "cannot be killed",
    "the zygote does not start: ",
    "it counts as unfit",
    "which is not this job's; not waited for",
    "nodes at once, so the check is at fault, not they; going on without it",
    "it goes as soon as a spare can take its place",
    "if the others are not told within ",
    "is quarantined",
    "does not answer; training goes on without it",
    "but it answers: it is cut off from the store only",
    "its address refuses a new one: the agent process is gone",
    "no step was begun and completed since",
    "this controller may be the one that is cut off; held",
    "still waiting for nodes: ",
    "was taken over by another agent while this one was away",
    "the store has lost run ",
    "has been given up while it was away (",
    "whether those left too early cannot be told",
    "while this node was away: leaving",
    "when it is full, training goes on and what ranks print is lost",
    "bytes of output are missing here",
    "trying again, training goes on",
    "output of the ranks is no longer shown",
    "bytes not shown here, see ",
]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_what_the_page_quotes_is_said(fragment: str) -> None:
    assert fragment in PAGE, "the page does not quote it"
    assert fragment in CODE, "nothing says it any more: change docs/operations.md"


def test_the_variables_of_a_check_are_those_it_gets() -> None:
    rows = re.findall(r"^\| `(FT_\w+)` \|", PAGE, re.MULTILINE)
    given = re.findall(r'"(FT_\w+)"', (ROOT / "ft_launcher" / "shell" / "health.py").read_text())
    assert sorted(rows) == sorted(set(given))
