"""The page in a real Chromium: what it shows, by mouse, by keyboard, on a phone, in the dark, with ten thousand ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import FLAGS, Tab, chromium, served
from tests.dashboard.runs import Run, standing, storied

pytestmark = pytest.mark.serial
TOKEN = "k3-" + "x" * 24
Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """`opened(url)`: a tab; after the test it must not have complained."""
    tabs: list[Tab] = []

    def make(url: str, **how: Any) -> Tab:
        tabs.append(Tab(browser, url, **how))
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.context.close()
    assert [error for tab in tabs for error in tab.errors] == []


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = storied(tmp_path_factory.mktemp("story"))
    with served(run.log_dir) as url:
        yield url


def colours(tab: Tab) -> list[str]:
    """The canvas's colour near the corner of each rank's cell."""
    found: list[str] = tab.page.evaluate(
        """() => {
          const canvas = document.querySelector('#grid'), scale = canvas.width / canvas.getBoundingClientRect().width;
          const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return Array.from({length: window.ftGrid.world}, (_, rank) => {
            const at = window.ftGrid.cell(rank, {x: 0, y: 0}), from = 4 * (Math.round((at.y + 5) * scale) * width + Math.round((at.x + 5) * scale));
            return data.slice(from, from + 4).join(',');
          });
        }"""
    )
    return found


def test_what_it_says(opened: Open, story: str) -> None:
    tab = opened(story).shown()
    assert tab.text("#run-id") == "gpt-8b"
    assert tab.text("#phase") == "running"
    latest = tab.text("#latest")
    for part in (
        "hang",
        "✕ rank 5 (tp 1, dp 0, pp 1) on node000 slot 5",
        "data.py:read_shard",
        "decision: restart",
        "training again 630 ms after the fault",
        "incident 2: stacks",
    ):
        assert part in latest, part
    assert "Goodput\n96.7 %" in tab.text("#tiles")
    assert "running 8" in tab.text("#legend")
    assert "rank 5, culprit of the last incident" in tab.text("#legend")
    cycles = tab.text("#cycles")
    for part in (
        "Cycle 1",
        "410 ms",
        "630 ms of outage, 100 iterations to do again",
        "iteration 4,100 was passed again",
        "it was killed by SIGKILL",
    ):
        assert part in cycles, part
    assert tab.page.locator("#sections svg[role=img]").count() == 4
    label = tab.page.get_attribute('article[aria-label="Section step"] svg', "aria-label")
    assert "soft timeout" in label
    assert "hard timeout 7.38 s" in label
    assert tab.page.locator('article[aria-label="Section step"] svg rect').count() >= 4
    assert "node000/7" in tab.text("#hardware")
    assert "restarts: 2 of 3" in tab.text("#budgets")
    assert "culprit of the last incident: rank 5" in tab.page.get_attribute("#grid", "aria-label")
    assert tab.text("#announce-incident") == "Incident in cycle 1, hang: rank 5 (tp 1, dp 0, pp 1) on node000 slot 5. Decision: restart."
    assert tab.page.title() == "running · gpt-8b · ft-launcher"


def test_the_grid_draws_every_rank_in_the_colour_of_its_state(opened: Open, tmp_path: Path) -> None:
    run = Run(tmp_path, tp=2, dp=4, pp=2)
    run.start_cycle(iteration=0)
    run.line("ended", 0, rank=3, code=1)
    run.find("suspect", 6, 6.2, 9.3)
    run.find("hung", 9, 9.9, 9.3)
    run.save()
    with served(tmp_path) as url:
        tab = opened(url).shown()
        drawn, odd = colours(tab), {3, 6, 9}
        assert len({drawn[rank] for rank in range(16) if rank not in odd}) == 1
        assert len({drawn[rank] for rank in odd} | {drawn[0]}) == 4
        assert all(colour.endswith(",255") for colour in drawn)
        assert "hung" in tab.text("#standing")


def test_the_keyboard_walks_the_topology(opened: Open, story: str) -> None:
    tab = opened(story).shown()
    tab.page.focus("#grid")
    steps = [
        ("Home", 0),
        ("ArrowRight", 2),
        ("ArrowDown", 3),
        ("ArrowDown", 3),
        ("PageDown", 7),
        ("ArrowLeft", 5),
        ("ArrowUp", 4),
        ("PageUp", 0),
        ("End", 7),
        ("c", 5),
    ]
    for key, rank in steps:
        tab.page.keyboard.press(key)
        tab.wait_text("#rank-detail h3", f"Rank {rank}")
    assert "node000 slot 5" in tab.text("#rank-detail")
    assert "✕ culprit" in tab.text("#rank-detail")
    assert tab.page.get_attribute("#rank-detail", "aria-live") == "polite"
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.closest('#cycles') !== null"):
            break
    assert tab.page.evaluate("document.activeElement.closest('#cycles') !== null"), "Tab leaves the grid"


def test_everything_has_a_name_for_a_screen_reader(opened: Open, story: str) -> None:
    tab = opened(story).shown()
    tree = tab.page.locator("body").aria_snapshot()
    for part in (
        "banner",
        "main",
        'heading "gpt-8b" [level=1]',
        'heading "Ranks" [level=2]',
        'list "States of ranks"',
        'region "Hardware ledger"',
        'heading "Sections and their timeouts"',
    ):
        assert part in tree, part
    nameless = """() => {
      const labelled = (e) => e.labels?.length || document.querySelector(`label[for=${e.id || 'none'}]`);
      const named = (e) => e.innerText || e.getAttribute('aria-label') || labelled(e);
      const all = [...document.querySelectorAll('button,a,select,input,svg[role=img],canvas[role],meter')];
      return all.filter((e) => !e.closest('[hidden]') && !named(e)).map((e) => e.outerHTML);
    }"""
    assert tab.page.evaluate(nameless) == []


def test_the_table_says_the_same(opened: Open, story: str) -> None:
    tab = opened(story).shown()
    tab.page.click("#table-box summary")
    tab.wait_count("#rank-table tbody tr", 8)
    assert tab.text("#rank-table tbody tr:nth-child(6)").split() == ["5", "running", "1", "0", "1", "0", "node000", "slot", "5"]
    tab.page.select_option("#table-filter", "odd")
    tab.wait_text("#table-count", "0 of 8")


def test_an_incident_opens_with_its_stacks_grouped(opened: Open, story: str) -> None:
    tab = opened(story).shown()
    tab.page.click("#latest a")
    tab.wait_text("#incident", "8 of 8 ranks dumped their stacks; 2 different ones.")
    assert tab.page.evaluate("document.querySelector('#incident').matches(':modal')")
    said = tab.text("#incident")
    for part in ("Outliers: rank 5", "ranks 0-4,6-7", "waits in all_reduce", "train/data.py:132", "opening shard 00412 <b>&amp;</b>"):
        assert part in said, part
    assert tab.page.locator("#incident .group.odd").count() == 1
    tab.page.keyboard.press("Escape")
    tab.wait_true("!document.querySelector('#incident').open")
    tab.wait_true("!location.href.includes('#')")
    linked = opened(story, anchor="#incident-1").shown()
    linked.wait_text("#incident", "No rank dumped its stacks.")


def test_no_width_needs_sideways_scrolling(opened: Open, story: str) -> None:
    tab = opened(story, width=1280, height=844).shown()
    for width in (320, 390, 768, 2200):
        drawn = tab.page.evaluate("window.ftGrid.drawn")
        tab.page.set_viewport_size({"width": width, "height": 844})
        tab.page.wait_for_function("(before) => window.ftGrid.drawn > before", arg=drawn)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate("document.querySelector('#grid').getBoundingClientRect().right") <= width
    tab.page.set_viewport_size({"width": 320, "height": 844})
    tab.page.click("#latest a")
    tab.wait_text("#incident", "Outliers")
    assert tab.page.evaluate("document.querySelector('#incident').getBoundingClientRect().right") <= 320


_CONTRAST = """(selectors) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255];
  };
  return selectors.map((s) => {
    const e = document.querySelector(s), [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    return [s, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
}"""
"""WCAG's contrast ratio of a text against what is behind it."""


def test_light_and_dark_are_both_readable(opened: Open, story: str) -> None:
    tab, backgrounds = opened(story).shown(), set()
    texts = ["h1", "#run-line", "#phase", "#link", "#latest .who", "#latest .after", "#latest a", "#tiles dt", "#tiles dd"]
    texts += ["#cycles .tag", "#cycles .tag.hang", ".facts", ".section .why", "#grid-help"]
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        backgrounds.add(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector, ratio in tab.page.evaluate(_CONTRAST, texts):
            assert ratio >= 4.5, (scheme, selector, ratio)
    assert len(backgrounds) == 2


def test_ten_thousand_ranks(opened: Open, tmp_path: Path) -> None:
    run = storied(tmp_path, tp=8, dp=125, pp=10, culprit=5234, stacks=0)
    with served(tmp_path) as url:
        tab = opened(url).shown()
        assert "running 10,000" in tab.text("#legend")
        assert "✕ rank 5234" in tab.text("#latest")
        cells = tab.page.evaluate(
            """() => {
              const g = window.ftGrid, seen = new Set(), box = document.querySelector('#grid').getBoundingClientRect();
              let hits = 0;
              for (let r = 0; r < 10000; r++) {
                const at = g.cell(r, {x: 0, y: 0});
                seen.add(at.x + ':' + at.y);
                hits += g.at({clientX: box.left + at.x + 2, clientY: box.top + at.y + 2}) === r;
              }
              return [seen.size, hits];
            }"""
        )
        assert cells == [10_000, 10_000], "every rank has a place of its own, and is found there"
        took_ms = tab.page.evaluate(
            "() => { const from = performance.now(); for (let i = 0; i < 10; i++) window.ftGrid.draw(); return (performance.now() - from) / 10; }"
        )
        print(f"one drawing of 10,000 ranks: {took_ms:.1f} ms")
        tab.page.focus("#grid")
        tab.page.keyboard.press("End")
        tab.wait_text("#rank-detail h3", "Rank 9999")
        standing(run, 5234)
        tab.wait_text("#legend", "hung 65")
        tab.page.click("#table-box summary")
        tab.page.select_option("#table-filter", "hung")
        tab.wait_count("#rank-table tbody tr", 65)
        assert opened(url, width=390, height=844).shown().page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_happens_is_drawn_without_a_reload(opened: Open, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        tab = opened(url).shown()
        assert tab.text("#run-id") == "No run yet"
        assert "no such file yet" in tab.text("#notes")
        run = Run(tmp_path)
        run.start_cycle(iteration=0)
        run.save()
        tab.wait_text("#run-id", "gpt-8b")
        assert tab.text("#notes") == ""
        tab.page.focus("#grid")
        standing(run, 5)
        run.job("ending", "rank 5 hangs")
        run.end_cycle("hang", 5, "it is stopped")
        tab.wait_text("#latest", "✕ rank 5")
        tab.wait_text("#legend", "culprit 1")
        assert tab.page.evaluate("document.activeElement.id") == "grid", "the focus stays"
        for name in ("ft_state.json", "ft_state.json.bak"):
            (tmp_path / name).unlink()
        tab.wait_text("#link", "no usable state file now")
        assert tab.text("#run-id") == "gpt-8b"
        run.conclude("failed", 1, "restarts are used up")
        run.save()
        tab.wait_text("#phase", "failed, exit 1")


def test_a_launcher_that_is_not_heard_of_is_said(opened: Open, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_cycle(iteration=0)
    run.save()
    with served(tmp_path) as url:
        tab = opened(url).shown()
        tab.wait_text("#link", "no word of the launcher for")
        assert tab.page.get_attribute("#link", "data-link") == "wait"
        run.conclude("finished", 0, "all ranks finished")
        run.save()
        tab.wait_text("#link", "the run is over")


def test_a_server_that_is_gone_is_said(browser: Any, story: str) -> None:
    tab = Tab(browser, story).shown()
    tab.context.set_offline(True)
    tab.wait_text("#link", "server not reached")
    assert tab.text("#run-id") == "gpt-8b", "what was known stays"
    tab.context.set_offline(False)
    tab.wait_text("#link", "live")
    tab.context.close()


def test_the_token_is_asked_for_and_kept_in_the_tab(browser: Any, opened: Open, tmp_path: Path) -> None:
    storied(tmp_path)
    with served(tmp_path, token=TOKEN) as url:
        tab = Tab(browser, url)
        tab.page.wait_for_selector("#token-form:not([hidden])")
        tab.page.fill("#token", "not it, by far")
        tab.page.keyboard.press("Enter")
        tab.wait_text("#token-error", "not the server's")
        tab.page.fill("#token", TOKEN)
        tab.page.keyboard.press("Enter")
        tab.wait_text("#run-id", "gpt-8b")
        assert tab.page.is_hidden("#token-form")
        tab.context.close()
        linked = opened(url, anchor=f"#token={TOKEN}").shown()
        assert linked.text("#run-id") == "gpt-8b"
        assert TOKEN not in linked.page.url


def test_text_of_a_run_stays_text(opened: Open, tmp_path: Path) -> None:
    run = storied(tmp_path)
    nasty = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    run.document["run"] |= {"script": nasty, "reason": nasty}
    run.document["hardware"]["<b>n</b>/1"] = {
        "suspicions": 1,
        "verdicts": [{"at": nasty, "verdict": nasty}],
        "quarantine_until": None,
        "why": nasty,
    }
    run.save()
    with served(tmp_path) as url:
        tab = opened(url).shown()
        assert "<img src=x" in tab.text("#run-line")
        assert "owned" not in tab.page.title()
        assert tab.page.locator("img").count() == 0
