"""The page between real processes: who may write to it, and what a reader makes of what it finds."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.errors import PlatformError
from monitors import layout
from monitors import page as pages
from monitors.client import Monitor
from monitors.page import PageSample, SectionPage, claim
from tests.monitors.conftest import ROOT, StartRank

WAIT = "print('ready', flush=True); sys.stdin.read()\n"


def content(page: SectionPage) -> bytes:
    return os.pread(page.fd, layout.PAGE_BYTES, 0)


def answer(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline().strip()
    assert line, rank.communicate(timeout=60)[1]
    return line


def test_a_rank_tells_through_an_inherited_descriptor_where_it_is(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "with mon.section('setup'): pass\n"
        "for i in range(100, 300):\n"
        "    with mon.section('step', iteration=i): pass\n"
        "mon.start_section('checkpointing'); mon.start_section('bericht é', iteration=5)\n" + WAIT
    )
    answer(rank)
    sample = page.sample()
    assert (sample.owner_pid, sample.attached, sample.broken) == (rank.pid, True, None)
    assert (sample.iteration, sample.steps) == (299, 200)
    assert [(o.name, o.iteration) for o in sample.open] == [("checkpointing", None), ("bericht é", 5)]
    step = sample.sections["step"]
    assert step.count == 200 and 0 < step.last_ns <= step.max_ns
    assert sample.last_progress_ns >= step.last_end_ns > sample.sections["setup"].last_end_ns
    ring = page.occurrences("step")
    assert [index for index, _ in ring] == list(range(200 - layout.RING, 200)) and ring[-1][1] == step.last_ns
    assert [index for index, _ in page.occurrences("step", after_index=197)] == [198, 199]
    assert page.occurrences("setup") == [(0, sample.sections["setup"].last_ns)] and page.occurrences("never") == []
    assert sample.misuse == {}


def test_before_anyone_attached_a_page_says_so(page: SectionPage) -> None:
    assert page.sample() == PageSample()
    assert page.sample() is page.sample()


def test_a_page_cannot_be_shrunk_under_the_reader(page: SectionPage) -> None:
    for size in (0, layout.PAGE_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, size)
    assert os.fstat(page.fd).st_blocks * 512 >= layout.PAGE_BYTES
    assert fcntl.fcntl(page.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


def test_a_closed_page_gives_its_descriptors_back_and_still_answers() -> None:
    gc.collect()  # what other tests have left must not go away meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    made = SectionPage.create(rank=0, cycle=0)
    made.close()
    made.close()
    assert made.sample().broken == "the page is closed" and made.occurrences("step") == []
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_left_is_a_platform_fault_that_names_the_rank() -> None:
    code = (
        "import resource\nfrom monitors.page import SectionPage\nSectionPage.create(rank=0, cycle=0)\nresource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\n"
        "SectionPage.create(rank=9, cycle=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert PlatformError.__name__ in done.stderr and "rank 9: no section page" in done.stderr


def test_only_a_section_page_can_be_claimed(tmp_path: pytest.TempPathFactory) -> None:
    with open(f"{tmp_path}/x", "w+b") as file, pytest.raises(ValueError, match="not a section page"):
        claim(file.fileno())
    with pytest.raises(OSError):
        claim(-1)


# -- processes that are not the rank


def test_a_child_that_inherits_page_and_environment_is_not_the_rank(page: SectionPage, start_rank: StartRank) -> None:
    child = (
        "from monitors.client import attach; m = attach(); m.start_section('x'); m.set_iteration(9); print(m.attached, m.commit_allowed())"
    )
    rank = start_rank(
        f"import subprocess\nmon.set_iteration(1)\nsubprocess.run([sys.executable, '-c', {child!r}], pass_fds=[{page.fd}], check=True)\n"
        + WAIT
    )
    assert answer(rank) == "False True"
    answer(rank)
    assert page.sample().iteration == 1 and page.sample().open == ()


def test_an_exec_child_without_the_descriptor_is_not_the_rank(page: SectionPage, start_rank: StartRank) -> None:
    child = "from monitors.client import attach; m = attach(); m.start_section('x'); print(m.attached)"
    rank = start_rank(f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n" + WAIT)
    assert answer(rank) == "False"
    answer(rank)
    assert page.sample().open == () and rank.poll() is None


def test_a_rank_that_executes_itself_anew_stays_the_rank(page: SectionPage, start_rank: StartRank) -> None:
    again = (
        "import sys\nfrom monitors.client import attach\nm = attach(); m.set_iteration(5); print(m.attached, flush=True); sys.stdin.read()"
    )
    rank = start_rank(f"mon.set_iteration(4)\nos.execv(sys.executable, [sys.executable, '-c', {again!r}])")
    assert answer(rank) == "True"
    assert page.sample().iteration == 5 and page.sample().owner_pid == rank.pid


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_rank_leave_its_page_alone(
    page: SectionPage, start_rank: StartRank, method: str, tmp_path: pytest.TempPathFactory
) -> None:
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(
            "import multiprocessing, sys\nfrom monitors.client import attach\nmon = attach()\n"
            "def work(i):\n    m = attach(); mon.start_section('a'); m.start_section('b'); mon.set_iteration(10**6); m.end_section('step')\n"
            "    with m.section('step', iteration=i): return m.attached, mon.attached\n"
            "if __name__ == '__main__':\n"
            f"    mon.start_section('step', iteration=2)\n    with multiprocessing.get_context({method!r}).Pool(2) as pool: seen = pool.map(work, range(8))\n"
            "    print(set(seen), mon.attached, flush=True)\n    sys.stdin.read()\n"
        )
    rank = start_rank(f"os.execv(sys.executable, [sys.executable, {script!r}])", attach=False)
    assert answer(rank) == "{(False, False)} True"
    sample = page.sample()
    assert [o.name for o in sample.open] == ["step"] and set(sample.sections) == set() and (sample.iteration, sample.misuse) == (2, {})


def test_a_forked_child_falls_silent_but_still_hears_the_agent(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "with mon.section('step', iteration=1):\n"
        "    if os.fork() == 0:\n"
        "        mon.start_section('child'); mon.end_all_sections(); mon.set_iteration(50)\n"
        "        try: raise KeyError('child')\n"
        "        except KeyError as e: sys.excepthook(KeyError, e, None)\n"
        "        print('child', mon.commit_allowed(), flush=True); sys.stdin.readline()\n"
        "        print('child', mon.commit_allowed(), flush=True); os._exit(0)\n"
        "    os.wait()\n" + WAIT
    )
    assert answer(rank) == "child True"
    before = content(page)
    page.revoke()
    assert rank.stdin is not None
    rank.stdin.write("go\n")
    rank.stdin.flush()
    assert answer(rank) == "child False"
    answer(rank)
    assert [index for index, _ in page.occurrences("step")] == [0]
    assert page.sample().exception is None and set(page.sample().sections) == {"step"} and page.sample().iteration == 1
    assert before[: layout.REVOKED * 8] == content(page)[: layout.REVOKED * 8]


def test_wrong_environments_give_a_client_that_does_nothing(page: SectionPage, start_rank: StartRank) -> None:
    other = os.memfd_create(layout.MEMFD_NAME)  # right name, wrong size, no header
    unclaimed = SectionPage.create(rank=1, cycle=0)
    paths = [
        "",
        "/proc/self/fd/",
        "/proc/self/fd/x",
        "/proc/self/fd/²",
        "/proc/self/fd/-1",
        f"/proc/self/fd/{10**30}",
        "/proc/self/fd/0",
        "/etc/passwd",
    ]
    paths += [f"/proc/self/fd/{other}", f"/proc/self/fd/{unclaimed.fd}", f"/dev/fd/{page.fd}"]
    code = (
        "import monitors.client as c\n"
        f"for path in {paths!r}:\n"
        "    os.environ['FT_SECTION_PAGE'] = path; c._attached.clear(); mon = attach()\n"
        "    with mon.section('step', iteration=1): pass\n"
        "    mon.end_section('never'); mon.report_rerun(1, 1, 'x')\n"
        "    assert not mon.attached and mon.commit_allowed() and attach() is mon and not c.install_hooks(), path\n"
        "assert sys.excepthook is sys.__excepthook__\n" + WAIT
    )
    before = content(unclaimed)
    rank = start_rank(code, attach=False, pass_fds=(other, unclaimed.fd))
    assert answer(rank) == "ready"
    assert content(unclaimed) == before and not page.sample().attached
    os.close(other)
    unclaimed.close()


# -- readers of a page in any state


def test_reading_while_a_rank_writes_as_fast_as_it_can_and_after_it_was_killed(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "import threading\ndef work(k):\n    i = 0\n    while True:\n"
        "        with mon.section('step', iteration=i):\n            with mon.section(f'inner {k} ' + chr(97 + i % 20)): pass\n        i += 1\n"
        "for k in range(3): threading.Thread(target=work, args=(k,), daemon=True).start()\n" + WAIT
    )
    answer(rank)
    last, steps = -1, 0
    for _ in range(3000):
        sample = page.sample()
        assert sample.broken is None and len(sample.open) <= 6 and sample.steps >= steps
        steps = sample.steps
        assert all(o.name == "step" or o.name.startswith("inner ") for o in sample.open)
        fresh = page.occurrences("step", last)
        assert all(0 <= took < 600e9 for _, took in fresh) and [i for i, _ in fresh] == sorted({i for i, _ in fresh})
        last = fresh[-1][0] if fresh else last
    rank.send_signal(signal.SIGKILL)
    rank.wait(timeout=60)
    sample = page.sample()
    assert sample.broken is None and sample.steps >= 1 and page.sample() is sample
    assert 63 >= len(sample.sections) >= 2


@given(
    st.lists(st.tuples(st.integers(0, layout.PAGE_WORDS - 1), st.integers(-(1 << 63), (1 << 63) - 1)), max_size=60), st.binary(max_size=400)
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_scribbled_a_look_neither_raises_nor_shows_control_characters(scribble: list[tuple[int, int]], blob: bytes) -> None:
    page = SectionPage.create(rank=0, cycle=0)
    try:
        for at, word in scribble:
            os.pwrite(page.fd, word.to_bytes(8, "little", signed=True), at * 8)
            os.pwrite(page.fd, blob, at % 1024 * 8)
            sample = page.sample()
            texts = (
                [o.name for o in sample.open]
                + list(sample.sections)
                + [sample.broken or ""]
                + ([sample.exception[1]] if sample.exception else [])
            )
            assert all(text.isprintable() or not text for text in texts)
            for name in ["step", *sample.sections]:
                assert len(page.occurrences(name)) <= layout.RING
    finally:
        page.close()


def test_an_overwritten_header_or_an_impossible_section_is_called_broken(page: SectionPage, words: memoryview, monitor: Monitor) -> None:
    words[layout.OPEN] = 500
    assert "number 499" in str(page.sample().broken)
    words[layout.OPEN] = 0
    assert page.sample().broken is None
    words[layout.MAGIC] = 1
    assert "header was overwritten" in str(page.sample().broken)


def test_what_the_rank_scribbles_into_the_agents_words_is_overwritten_by_the_agent(page: SectionPage, words: memoryview) -> None:
    for word in (layout.CYCLE, layout.LEASE_NS, layout.REVOKED):
        words[word] = 77
    page.set_cycle(8)
    page.set_lease(5)
    page.revoke()
    assert [words[w] for w in (layout.CYCLE, layout.LEASE_NS, layout.REVOKED)] == [8, 5, 1]


def test_a_ring_entry_caught_in_the_middle_of_its_write_is_left_for_the_next_call(
    page: SectionPage, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two readings sees the old index beside the new duration: the writer went on in between."""
    with monitor.section("a"), monitor.section("b"):
        pass
    real, readings = pages._RING, []

    class Torn:
        @staticmethod
        def unpack_from(source: object, at: int) -> tuple[int, ...]:
            words = real.unpack_from(source, at)  # type: ignore[arg-type]
            readings.append(words)
            return words if len(readings) % 2 else (words[0] + layout.RING, *words[1:])

    monkeypatch.setattr(pages, "_RING", Torn)
    assert page.occurrences("a") == []
    monkeypatch.setattr(pages, "_RING", real)
    assert [index for index, _ in page.occurrences("a")] == [0]
