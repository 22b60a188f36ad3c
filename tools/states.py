"""Draws docs/states.md from the transition tables, so that the diagrams cannot drift. `python tools/states.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from ft_launcher.core import job, node
from ft_launcher.core.machine import IGNORE, IMPOSSIBLE

TARGET = Path(__file__).resolve().parent.parent / "docs" / "states.md"
WORDS = {IGNORE: "·", IMPOSSIBLE: "✗"}
HEAD = """# States

Drawn by `tools/states.py` from `EDGES` and `TRANSITIONS` of the two machines; a test refuses a page that differs.
A cell names the handler of that event in that phase; `·` ignores the event (it belongs to a life that is over), `✗` is a bug of the launcher.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    machines: list[tuple[str, Any, type[StrEnum], str]] = [
        ("The job (`ft_launcher/core/job.py`)", job, job.Phase, "JobMachine"),
        ("A node (`ft_launcher/core/node.py`)", node, node.NodePhase, "NodeMachine"),
    ]
    for title, module, phases, machine in machines:
        parts += [f"## {title}\n", diagram(module.EDGES), meanings(phases), table(module.TRANSITIONS, phases, getattr(module, machine))]
    return "\n".join(parts)


def diagram(edges: Mapping[StrEnum, frozenset[StrEnum]]) -> str:
    """A mermaid state diagram."""
    first = next(iter(edges))
    lines = [f"    [*] --> {first.value}"]
    for phase, followers in edges.items():
        lines += [f"    {phase.value} --> {f.value}" for f in sorted(followers)]
        lines += [f"    {phase.value} --> [*]"] if not followers else []
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n"


def meanings(phases: type[StrEnum]) -> str:
    """One line a phase, from the strings that stand below them in the source."""
    source = Path(sys.modules[phases.__module__].__file__ or "").read_text().splitlines()
    lines = []
    for phase in phases:
        at = next(i for i, line in enumerate(source) if line.strip() == f'{phase.name} = "{phase.value}"')
        lines.append(f"- **{phase.value}**: {source[at + 1].strip().strip(chr(34))}")
    return "\n".join(lines) + "\n"


def table(transitions: Mapping[tuple[Any, type], str], phases: type[StrEnum], machine: type) -> str:
    """Events down, phases across; then what each handler does."""
    events = list(dict.fromkeys(event for _, event in transitions))
    rows = [
        "| event | " + " | ".join(p.value for p in phases) + " |",
        "|---|" + "---|" * len(list(phases)),
    ]
    for event in events:
        cells = [WORDS.get(transitions[(p, event)], f"`{transitions[(p, event)]}`") for p in phases]
        rows.append(f"| {event.__name__} | " + " | ".join(cells) + " |")
    handlers = dict.fromkeys(cell for cell in transitions.values() if cell not in WORDS)
    rows.append("")
    rows += [f"- `{name}`: {(getattr(machine, name).__doc__ or '').strip().splitlines()[0]}" for name in handlers]
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write the page, or with --check say whether it is up to date (exit 1 when not)."""
    text = page()
    if "--check" in sys.argv:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
