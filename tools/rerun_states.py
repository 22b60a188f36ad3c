"""Draws docs/rerun-machine.md from the table of rerun/machine.py, so that it cannot drift. `python tools/rerun_states.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import states

from rerun import machine, words

TARGET = Path(__file__).resolve().parent.parent / "docs" / "rerun-machine.md"
HEAD = """# The rerun state machine

Drawn by `tools/rerun_states.py` from `EDGES`, `TRANSITIONS`, `AGREED` and `LEAVING` of `rerun/machine.py`; a test refuses a page that differs.
States, modes and exit codes are Megatron's (`megatron.core.rerun_state_machine`).
A cell names the handler of that event in that state; `·` changes nothing, `✗` is a mistake of the training loop and raises OutsideStepError.
"""


def leaving() -> str:
    """What should_checkpoint_and_exit answers, and what has to be agreed upon, by state."""
    lines = ["| state | all ranks agree on | checkpoint | exit | code |", "|---|---|---|---|---|"]
    for state, leave in machine.LEAVING.items():
        agreed = ", ".join(machine.AGREED[state]) or "-"
        lines.append(f"| {state} | {agreed} | {_word(leave.checkpoint)} | {_word(leave.exit)} | {leave.code} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    table = states.table(machine.TRANSITIONS, words.RerunState, machine.RerunMachine)
    parts = [HEAD, states.diagram(machine.EDGES), states.meanings(words.RerunState), table]
    parts += ["## What the loop is told before the optimizer step (mode validate_results)\n", leaving()]
    return "\n".join(parts)


def main() -> int:
    """Write the page, or with --check say whether it is up to date (exit 1 when not)."""
    text = page()
    if "--check" in sys.argv:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


def _word(flag: bool) -> str:
    return "yes" if flag else "no"


if __name__ == "__main__":
    sys.exit(main())
