"""A section page, a Monitor on it in this process, and real processes that own one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monitors import layout
from monitors.client import Monitor
from monitors.page import SectionPage, claim
from monitors.rank_page import RankPage

ROOT = Path(__file__).resolve().parents[2]
StartRank = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def page() -> Iterator[SectionPage]:
    made = SectionPage.create(rank=3, cycle=7)
    yield made
    made.close()


@pytest.fixture
def words(page: SectionPage) -> memoryview:
    return memoryview(mmap.mmap(page.fd, layout.PAGE_BYTES)).cast("q")


@pytest.fixture
def monitor(words: memoryview) -> Monitor:
    words[layout.ATTACHED] = 1
    return Monitor(RankPage(words))


@pytest.fixture
def start_rank(page: SectionPage) -> Iterator[StartRank]:
    """`start_rank(code, env=..., pass_fds=...)`: a process that owns the page and runs `code` with `mon` attached; talks over its pipes."""
    started: list[subprocess.Popen[str]] = []

    def start(
        code: str, *, attach: bool = True, env: dict[str, str] | None = None, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[str]:
        head = "import sys, os\nfrom monitors.client import attach\n" + ("mon = attach()\n" if attach else "")
        rank = subprocess.Popen(
            [sys.executable, "-c", head + code],
            env={**os.environ, "PYTHONPATH": str(ROOT), layout.ENV_PAGE: f"/proc/self/fd/{page.fd}", **(env or {})},
            pass_fds=(page.fd, *pass_fds),
            preexec_fn=lambda: claim(page.fd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(rank)
        return rank

    yield start
    for rank in started:
        rank.kill()
        rank.communicate()
