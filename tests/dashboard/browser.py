"""A real Chromium for the page's tests, and a server behind it. Without a Chromium the tests are skipped and say how to get one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.dashboard.answers import Answers
from ft_launcher.dashboard.gate import Gate
from ft_launcher.dashboard.server import StateServer
from ft_launcher.dashboard.source import Source

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
PATIENCE_MS = 60_000


def chromium() -> str:
    """Where it is; skips the test where it is not."""
    pytest.importorskip("playwright")
    names = (os.environ.get("FT_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium: tools/chromium.sh installs one (root and apt-get), or say FT_CHROMIUM=/path/to/chromium")
    return found


@contextmanager
def served(path: Path, token: str | None = None) -> Iterator[str]:
    """The address of a server over `path`."""
    server = StateServer("127.0.0.1", 0, Answers(Source(path), Gate(token, loopback=True)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Tab:
    """One page in a context of its own; `errors` are what the console and the page complained about."""

    def __init__(self, browser: Any, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light", anchor: str = "") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url + anchor)

    def shown(self) -> Tab:
        """Waits for the first drawing."""
        self.page.wait_for_selector("body[data-shown=yes]")
        return self

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def wait_text(self, selector: str, part: str) -> None:
        """Waits until an element says something."""
        said = "([s, t]) => document.querySelector(s)?.innerText.includes(t)"
        self.page.wait_for_function(said, arg=[selector, part])

    def wait_true(self, expression: str) -> None:
        """Waits until an expression is true: what a click or a key causes (toggle, close, hashchange) the page may hear of in a later task than the click."""
        self.page.wait_for_function(f"() => ({expression})")

    def wait_count(self, selector: str, count: int) -> None:
        """Waits until so many elements are there."""
        self.page.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[selector, count])
