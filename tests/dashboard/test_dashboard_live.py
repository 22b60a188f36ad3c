"""A real job behind the page: eight ranks in lock-step, one of them is stopped, and the browser names it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.dashboard.source import Source
from tests.dashboard.browser import FLAGS, Tab, chromium, served
from tests.e2e.launch import Launch

pytestmark = pytest.mark.serial
WORKER = Path(__file__).with_name("lockstep_worker.py")
VICTIM = 5
OPTIONS = [
    "--nproc-per-node",
    "8",
    "--tp",
    "2",
    "--pp",
    "2",
    "--timeouts",
    "setup=60,step=1.5",
    "--out-of-section",
    "30",
    "--preload",
    "json",
    "--tee",
    "none",
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    """Runs until it is told to finish."""
    (tmp_path / "run").mkdir()
    made = Launch(tmp_path / "run", *OPTIONS, script=[str(WORKER), str(tmp_path / "run")])
    yield made
    made.kill()


def stop_one(job: Launch) -> None:
    """SIGSTOP to rank 5 once all have made steps."""
    job.wait_for(lambda: len(list(job.folder.glob("stepped.0.*"))) == 8, "the first steps")
    os.kill(job.rank_pid(VICTIM), signal.SIGSTOP)


def finish(job: Launch) -> None:
    (job.folder / "finish").touch()
    assert job.wait() == 0, job.said()


def test_the_page_names_the_rank_that_was_stopped(job: Launch) -> None:
    path = chromium()
    from playwright.sync_api import sync_playwright

    logs = job.folder / "ft_logs"
    with served(logs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        tab = Tab(browser, url).shown()
        tab.wait_text("#legend", "running 8")
        tab.page.evaluate(
            """() => new MutationObserver(() => {
              const said = document.querySelector('#latest .who')?.innerText;
              if (said && !window.namedAt) { window.namedAt = Date.now(); window.named = said; }
            }).observe(document.querySelector('#latest'), {childList: true, subtree: true})"""
        )
        stop_one(job)
        tab.wait_text("#latest", "✕ rank 5 (tp 1, dp 0, pp 1)")
        named_at, named = tab.page.evaluate("[window.namedAt, window.named]")
        assert named.startswith("✕ rank 5 ("), "the first name that the page says is the right one"
        decision = next(job.events("decision"))
        print(f"from the decision to the page: {named_at / 1000 - datetime.fromisoformat(decision['t']).timestamp():.2f} s")
        assert "is stopped (process state T)" in tab.text("#latest")
        tab.wait_text("#latest", "training again")
        tab.page.click("#latest a")
        tab.wait_text("#incident", "Without stacks: rank 5")
        tab.page.keyboard.press("Escape")
        tab.wait_text("#legend", "running 8")
        finish(job)
        tab.wait_text("#phase", "finished")
        tab.wait_text("#legend", "finished 8")
        assert tab.errors == []
        browser.close()


def test_what_the_tests_pretend_is_what_a_run_writes(job: Launch, tmp_path: Path) -> None:
    """The journal lines of tests/dashboard/runs.py have the keys of real ones."""
    from tests.dashboard.runs import storied

    stop_one(job)
    job.wait_for(lambda: next(job.events("recovered"), None), "the recovery")
    finish(job)
    seen = Source(job.folder / "ft_logs").look()
    assert (seen.moment.outcome, seen.states, (seen.latest.culprit or {})["rank"] if seen.latest else None) == ("finished", "f" * 8, VICTIM)
    assert list(seen.overshoot_s) == [0]
    real, pretended = shapes(job.folder / "ft_logs"), shapes(storied(tmp_path / "pretended").log_dir)
    for kind, keys in pretended.items():
        assert keys <= real[kind], (kind, keys - real[kind])


def shapes(logs: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in logs.glob("*/journal.*.jsonl"):
        for line in path.read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            found.setdefault(event["kind"], set()).update(event, *(event[key] for key in ("job", "culprit") if event.get(key)))
    return found
