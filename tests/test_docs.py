"""What the documentation claims is checked against the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "states.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/states.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_page_speaks_of_a_machine_of_ours() -> None:
    for page in PAGES:
        assert "/work/" not in page.read_text(), page
