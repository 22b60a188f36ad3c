"""Page, client and detector together on a real process that really hangs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest

from monitors.detect import Finding, HangDetector, Limits
from monitors.page import SectionPage
from tests.monitors.conftest import StartRank

LIMITS = Limits({"setup": 60.0, "step": 0.9, "checkpointing": 60.0}, 60.0)
STEPS = "import threading, signal, time\ni = 0\nwhile True:\n    with mon.section('step', iteration=i):\n        {body}\n    i += 1\n"


def watch(page: SectionPage, rank: subprocess.Popen[str], until: Callable[[list[Finding]], bool]) -> list[Finding]:
    """Looks every 50 ms, as the agent does, until `until(findings so far)`; fails when the rank ends or a minute has passed."""
    detector, found, started_ns = HangDetector(LIMITS), [], time.monotonic_ns()
    while not until(found):
        assert time.monotonic_ns() - started_ns < 60e9, page.sample()
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=0.05)
        found += detector.observe(time.monotonic_ns(), 0, page.sample(), started_ns)
    return found


def is_hung(found: list[Finding]) -> bool:
    return any(f.kind == "hung" for f in found)


def test_a_frozen_rank(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank("import os\n" + STEPS.format(body="i == 20 and os.kill(os.getpid(), signal.SIGSTOP)"))
    hung = watch(page, rank, is_hung)[-1]
    assert (hung.section, hung.iteration, page.sample().steps) == ("step", 20, 20) and hung.since_s >= 0.9


def test_a_rank_that_spins_and_beats_and_ignores_term(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "import threading\ndef beat():\n    while True:\n        with mon.section('heartbeat'): print('.', end='', file=sys.stderr)\n"
        "threading.Thread(target=beat, daemon=True).start()\n"
        + STEPS.format(body="signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        while i == 30: pass")
    )
    rank.stderr.close()  # type: ignore[union-attr]
    watch(page, rank, lambda _: page.sample().iteration == 30)
    rank.terminate()
    hung = watch(page, rank, is_hung)[-1]
    assert (hung.section, hung.iteration, page.sample().steps) == ("step", 30, 30)
    assert hung.reason.startswith("rank 0 has been in section 'step' (iteration 30) for ")


def test_a_slow_save_within_its_own_limit_is_no_hang(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "mon.set_iteration(1)\nwith mon.section('checkpointing'): sys.stdin.readline()\nmon.set_iteration(2); sys.stdin.read()\n"
    )
    begun_ns = time.monotonic_ns()
    assert watch(page, rank, lambda _: time.monotonic_ns() - begun_ns > 2e9) == []
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert watch(page, rank, lambda _: page.sample().iteration == 2) == []
