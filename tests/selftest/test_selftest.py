"""`ft-launch selftest` on this machine: every fault is decided as it should be, and the exit code says so."""

from __future__ import annotations

import json
import subprocess
import sys

from ft_launcher.selftest.main import FAULTS


def test_every_fault_is_decided_as_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ft_launcher", "selftest", "--json"], capture_output=True, text=True, timeout=280, check=False
    )
    report = json.loads(done.stdout)
    assert report["failed"] == 0, [row for row in report["rows"] if not row["passed"]]
    assert done.returncode == 0
    assert [row["fault"] for row in report["rows"]][: len(FAULTS)] == [fault.do for fault in FAULTS]
    assert all(row["recover_s"] > 0 for row in report["rows"][: len(FAULTS)])
