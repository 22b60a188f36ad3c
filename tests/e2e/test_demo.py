"""What `make demo` runs, shortened: a rank is killed, the run recovers, and the demonstration says so with its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demonstration_shows_a_recovery(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--iters", "40", "--kill-at", "15", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "kill -9" in said
    assert "rank 2 (tp=0,cp=0,dp=0,pp=1; node" in said
    assert "every rank was training again" in said
    assert "outcome   finished, exit code 0" in said
