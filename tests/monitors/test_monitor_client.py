"""The client in the rank: what it writes, what it tolerates, what it never does."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from monitors import layout
from monitors.client import STACKS_SIGNAL, Monitor, Section, attach
from monitors.page import RerunReport, SectionPage
from monitors.rank_page import RankPage
from tests.monitors.conftest import ROOT, StartRank

BOOT = time.CLOCK_BOOTTIME


class Tensor:
    """Reading it would synchronize a device."""

    def __index__(self) -> int:
        raise AssertionError("the client asked a device")

    __int__ = __index__


def free_slots(monitor: Monitor) -> int:
    return len(monitor._free)


# -- what is written


def test_sections_nest_and_overlap_in_the_order_of_their_starts(page: SectionPage, monitor: Monitor) -> None:
    with monitor.section("epoch"):
        monitor.start_section("checkpointing")
        with monitor.section("step", iteration=4), monitor.section("forward"):
            assert [(o.name, o.iteration) for o in page.sample().open] == [
                ("epoch", None),
                ("checkpointing", None),
                ("step", 4),
                ("forward", None),
            ]
        monitor.end_section("checkpointing")
    assert page.sample().open == ()
    assert {name: s.count for name, s in page.sample().sections.items()} == {"forward": 1, "step": 1, "checkpointing": 1, "epoch": 1}
    assert page.sample().misuse == {}


def test_progress_is_the_end_of_a_step_or_a_higher_iteration(page: SectionPage, monitor: Monitor) -> None:
    def progressed(act: object) -> bool:
        before = page.sample().last_progress_ns
        act()  # type: ignore[operator]
        return page.sample().last_progress_ns > before

    def use(name: str, iteration: int | None = None) -> None:
        with monitor.section(name, iteration=iteration):
            pass

    assert not progressed(lambda: use("setup"))
    assert progressed(lambda: use("step"))
    assert page.sample().iteration is None and page.sample().steps == 1
    assert progressed(lambda: monitor.set_iteration(7))
    assert not progressed(lambda: monitor.set_iteration(7))
    assert not progressed(lambda: monitor.set_iteration(3))
    assert not progressed(lambda: use("checkpointing", 7))
    assert progressed(lambda: use("evaluation", 8))
    assert progressed(lambda: use("step", 2))  # a repeated iteration is a step all the same, and the highest stays
    assert (page.sample().iteration, page.sample().steps) == (8, 2)


def test_the_iteration_is_known_while_its_step_runs(page: SectionPage, monitor: Monitor) -> None:
    with monitor.section("step", iteration=57):
        assert (page.sample().iteration, page.sample().steps, page.sample().open[0].iteration) == (57, 0, 57)


def test_a_step_that_an_exception_ended_is_neither_occurrence_nor_progress(page: SectionPage, monitor: Monitor) -> None:
    with pytest.raises(KeyError), monitor.section("step"):
        raise KeyError
    sample = page.sample()
    assert (sample.steps, sample.last_progress_ns, sample.open) == (0, 0, ())
    assert sample.sections["step"].count == 0 and sample.sections["step"].last_end_ns > 0


def test_end_all_sections_ends_what_any_way_of_opening_opened(page: SectionPage, monitor: Monitor) -> None:
    with monitor.section("a"):
        monitor.start_section("b")
        monitor.end_all_sections()
        assert page.sample().open == ()
        monitor.start_section("c")  # takes the slot that "a" had
    assert [o.name for o in page.sample().open] == ["c"]
    monitor.end_section("c")
    assert free_slots(monitor) == layout.OPEN_SLOTS and page.sample().misuse == {}


def test_one_section_object_may_be_used_again(page: SectionPage, monitor: Monitor) -> None:
    section = monitor.section("a")
    for _ in range(3):
        with section:
            assert len(page.sample().open) == 1
    assert page.sample().sections["a"].count == 3


def test_a_rerun_report_reaches_the_agent(page: SectionPage, monitor: Monitor) -> None:
    monitor.report_rerun(2, 41, "transient at layer 3\n")
    assert page.sample().rerun == RerunReport(2, 41, "transient at layer 3 ")


# -- what is tolerated, and counted


def test_misuse_is_counted_and_never_raised(page: SectionPage, monitor: Monitor) -> None:
    monitor.end_section("never started")
    monitor.end_section(["unhashable"])  # type: ignore[arg-type]
    monitor.start_section("twice")
    monitor.start_section("twice")
    for name in (None, 5, b"x", ["unhashable"], ""):
        monitor.start_section(name)  # type: ignore[arg-type]
        with monitor.section(name):  # type: ignore[arg-type]
            pass
    for iteration in (Tensor(), 1.5, "3", 1 << 63, -2, -(1 << 70)):
        with monitor.section("bad", iteration=iteration):  # type: ignore[arg-type]
            pass
        monitor.set_iteration(iteration)  # type: ignore[arg-type]
    assert page.sample().misuse == {"unpaired_end": 2, "restarted": 1, "bad_name": 10, "bad_iteration": 12}
    assert [o.name for o in page.sample().open] == ["twice"] and page.sample().iteration is None


def test_a_start_that_was_never_ended_starts_its_clock_again(page: SectionPage, monitor: Monitor) -> None:
    monitor.start_section("step")
    first = page.sample().open[0]
    for _ in range(3 * layout.OPEN_SLOTS):
        monitor.start_section("step")
    assert len(page.sample().open) == 1 and page.sample().open[0].since_ns > first.since_ns
    monitor.end_section("step")
    assert page.sample().sections["step"].count == 1 and free_slots(monitor) == layout.OPEN_SLOTS


def test_more_open_sections_than_slots(page: SectionPage, monitor: Monitor) -> None:
    sections = [monitor.section(f"s{i % 50}") for i in range(layout.OPEN_SLOTS + 5)]
    for section in sections:
        section.__enter__()
    assert len(page.sample().open) == layout.OPEN_SLOTS and page.sample().misuse == {"too_many_open": 5}
    for section in sections:
        section.__exit__(None, None, None)
    assert page.sample().open == () and free_slots(monitor) == layout.OPEN_SLOTS


def test_more_names_than_room_and_names_that_are_too_long(page: SectionPage, monitor: Monitor) -> None:
    long = "é" * 40
    for name in (long, long + "x", long):
        with monitor.section(name):
            assert [o.name for o in page.sample().open] == ["é" * 23]
    assert page.sample().misuse == {"long_name": 2}
    for i in range(3000):
        with monitor.section(f"unbounded {i}"):
            pass
    assert len(page.sample().sections) == layout.SECTIONS and page.sample().misuse["too_many_names"] == 3000 - layout.SECTIONS + 1
    assert len(monitor._kinds) <= 4 * layout.SECTIONS
    monitor.section("\ud800 lone surrogate").__enter__()
    assert free_slots(monitor) == layout.OPEN_SLOTS


def test_recursion(page: SectionPage, monitor: Monitor) -> None:
    def down(depth: int) -> None:
        with monitor.section("deep"):
            if depth:
                down(depth - 1)

    down(20)
    assert page.sample().sections["deep"].count == 21 and page.sample().open == ()
    same = monitor.section("same")
    with same, same:
        assert len(page.sample().open) == 1
    assert page.sample().open == () and free_slots(monitor) == layout.OPEN_SLOTS


def test_a_section_started_in_one_thread_may_end_in_another(page: SectionPage, monitor: Monitor) -> None:
    thread = threading.Thread(target=monitor.start_section, args=("save",))
    thread.start()
    thread.join()
    monitor.end_section("save")
    assert page.sample().open == () and page.sample().sections["save"].count == 1 and page.sample().misuse == {}


def test_threads_at_once_lose_nothing(page: SectionPage, monitor: Monitor) -> None:
    sys.setswitchinterval(1e-6)
    try:

        def work(k: int) -> None:
            for i in range(1500):
                with monitor.section("shared", iteration=i):
                    monitor.start_section(f"own {k}")
                    monitor.start_section("same")
                    monitor.end_section(f"own {k}")
                    monitor.end_section("same")

        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(0.005)
    assert page.sample().open == () and free_slots(monitor) == layout.OPEN_SLOTS and len(set(monitor._free)) == layout.OPEN_SLOTS
    assert next(monitor._kinds["shared"].counter) == 9000 and all(page.sample().sections[f"own {k}"].count == 1500 for k in range(6))
    assert page.sample().misuse.get("unpaired_end", 0) == 0


def test_signal_handlers_that_use_sections_in_the_middle_of_anything(page: SectionPage, monitor: Monitor) -> None:
    hits = []

    def handler(*_: object) -> None:
        hits.append(1)
        monitor.start_section("in handler")
        monitor.end_section("in handler")
        with monitor.section(f"handler {len(hits) % 40}"):
            pass

    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0002, 0.0002)
    try:
        while len(hits) < 300:
            with monitor.section("step", iteration=len(hits)):
                monitor.start_section("x")
                monitor.end_section("x")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert page.sample().open == () and len(set(monitor._free)) == layout.OPEN_SLOTS
    assert page.sample().sections["in handler"].count > 0 and page.sample().steps > 0 and "internal" not in page.sample().misuse


def test_what_a_signal_handler_left_open_in_the_middle_of_a_start_is_not_left_for_ever(page: SectionPage, words: memoryview) -> None:
    class Interrupted(Monitor):
        interruptions = 1

        def _open(self, section: Section) -> bool:
            opened = super()._open(section)
            if self.interruptions:
                self.interruptions -= 1
                self.start_section(section._name)
            return opened

    monitor = Interrupted(RankPage(words))
    monitor.start_section("x")
    assert len(page.sample().open) == 1
    monitor.end_section("x")
    assert page.sample().open == () and free_slots(monitor) == layout.OPEN_SLOTS


def test_a_client_inside_copied_or_pickled_things_is_the_processs_own() -> None:
    mine = attach()
    assert copy.deepcopy({"data set": mine})["data set"] is mine and pickle.loads(pickle.dumps(mine)) is mine


# -- commits


def test_a_commit_is_allowed_until_the_cycle_is_superseded_or_revoked(page: SectionPage, monitor: Monitor) -> None:
    assert monitor.commit_allowed()
    page.set_cycle(8)
    assert not monitor.commit_allowed()
    page.set_cycle(7)
    page.revoke()
    assert not monitor.commit_allowed()


def test_a_lease_that_has_passed_forbids_commits_until_a_whole_step_was_done_since(page: SectionPage, monitor: Monitor) -> None:
    page.set_lease(time.clock_gettime_ns(BOOT) + int(3600e9))
    assert monitor.commit_allowed()
    step = monitor.section("step", iteration=1)
    step.__enter__()
    page.set_lease(time.clock_gettime_ns(BOOT))
    assert not monitor.commit_allowed()
    step.__exit__(None, None, None)  # began before the deadline: the rank may have slept in it
    assert not monitor.commit_allowed()
    with monitor.section("checkpointing"):
        assert not monitor.commit_allowed()
    with monitor.section("step", iteration=2):
        pass
    assert monitor.commit_allowed()


def test_with_iterations_alone_the_second_after_the_deadline_is_a_whole_one(page: SectionPage, monitor: Monitor) -> None:
    monitor.set_iteration(1)
    page.set_lease(time.clock_gettime_ns(BOOT))
    monitor.set_iteration(2)
    assert not monitor.commit_allowed()
    monitor.set_iteration(3)
    assert monitor.commit_allowed()


def test_outside_the_launcher_commits_are_allowed() -> None:
    monitor = Monitor(None)
    with monitor.section("step", iteration=1):
        assert monitor.commit_allowed() and not monitor.attached


# -- hooks


def run_script(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, timeout=120)


CRASH = "def f(): raise TypeError('bad\\x1b[31m\\nshape')\nf()\n"


def test_an_exception_is_stamped_and_shown_as_ever(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(CRASH)
    error = rank.communicate(timeout=60)[1]
    alone = run_script("import sys, os\nfrom monitors.client import attach\nmon = attach()\n" + CRASH)
    assert (error, rank.returncode) == (alone.stderr, 1) and "TypeError: bad" in error
    at_ns, text = page.sample().exception or (0, "")
    assert 0 < at_ns <= time.monotonic_ns() and text == "TypeError: bad [31m shape"


def test_hooks_chain_once_and_survive_hostile_exceptions(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "import monitors.client as c\nsys.excepthook = lambda *a: print('user', a[0].__name__, flush=True)\n"
        "attach(); hook = sys.excepthook; mon = attach(); c.install_hooks(); assert sys.excepthook is hook\n"
        "class Bad(Exception):\n    def __str__(self): raise ValueError\n"
        "try: raise Bad\nexcept Bad as e: sys.excepthook(Bad, e, None)\n"
        "try: raise OSError('é' * 5000)\nexcept OSError as e: sys.excepthook(OSError, e, None)\n",
        attach=False,
    )
    assert rank.communicate(timeout=60)[0] == "user Bad\nuser OSError\n"
    _, text = page.sample().exception or (0, "")
    assert text.startswith("OSError: éé") and len(text.encode()) in (layout.TEXT_BYTES, layout.TEXT_BYTES - 1)


def test_a_script_without_client_is_stamped_too_when_the_launcher_installs_the_hooks(page: SectionPage, start_rank: StartRank) -> None:
    start_rank("from monitors.client import install_hooks\nassert install_hooks()\nraise SystemError\n", attach=False).communicate(
        timeout=60
    )
    assert (page.sample().exception or (0, ""))[1] == "SystemError" and not page.sample().attached
    assert page.sample().stacks_signal == STACKS_SIGNAL


def test_stacks_on_the_reserved_signal_while_blocked_go_to_the_launchers_descriptor(page: SectionPage, start_rank: StartRank) -> None:
    reader, writer = os.pipe()
    rank = start_rank(
        "def where_it_hangs(): print('ready', flush=True); sys.stdin.read()\nwhere_it_hangs()",
        pass_fds=(writer,),
        env={layout.ENV_STACKS_FD: str(writer)},
    )
    os.close(writer)
    assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    assert page.sample().stacks_signal == STACKS_SIGNAL
    rank.send_signal(STACKS_SIGNAL)
    with open(reader) as stacks:
        assert any("where_it_hangs" in line for line in iter(stacks.readline, ""))
    assert rank.poll() is None


@pytest.mark.parametrize("value", ["", "x", "-1", "9999", str(1 << 70)])
def test_a_wrong_stacks_descriptor_falls_back_to_stderr(page: SectionPage, start_rank: StartRank, value: str) -> None:
    rank = start_rank(f"os.kill(os.getpid(), {STACKS_SIGNAL})", env={layout.ENV_STACKS_FD: value})
    assert "most recent call first" in rank.communicate(timeout=60)[1] and rank.returncode == 0


@pytest.mark.parametrize(
    "taken",
    [
        "signal.signal(S, lambda *a: print('mine', flush=True))",
        "signal.signal(S, signal.SIG_IGN)",
        "faulthandler.register(S, open(1, 'w'))",
    ],
)
def test_a_signal_that_the_user_handles_is_left_alone(page: SectionPage, start_rank: StartRank, taken: str) -> None:
    rank = start_rank(f"import signal, faulthandler\nS = {STACKS_SIGNAL}\n{taken}\nmon = attach()\nos.kill(os.getpid(), S)\n", attach=False)
    out, err = rank.communicate(timeout=60)
    assert (rank.returncode, err) == (0, "") and page.sample().attached and page.sample().stacks_signal == 0
    assert "SIG_IGN" in taken or out


def test_threads_that_attach_at_once_get_one_client(page: SectionPage, start_rank: StartRank) -> None:
    rank = start_rank(
        "import threading\nsys.setswitchinterval(1e-6)\nsys.excepthook = lambda *a: print('user', flush=True)\n"
        "gate, seen = threading.Barrier(12), []\n"
        "def work(): gate.wait(); m = attach(); m.start_section('x'); m.end_section('x'); seen.append(m)\n"
        "threads = [threading.Thread(target=work) for _ in range(12)]\nfor t in threads: t.start()\nfor t in threads: t.join()\n"
        "print(len(set(seen)), len(seen), flush=True)\nraise KeyError\n",
        attach=False,
    )
    assert rank.communicate(timeout=60)[0] == "1 12\nuser\n"
    assert page.sample().open == () and page.sample().misuse == {}


# -- cost


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); b = set(sys.modules); import monitors.client; print(*sorted(set(sys.modules) - b))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "monitors.client" in loaded, done.stderr
    assert not loaded & {
        "torch",
        "numpy",
        "dataclasses",
        "typing",
        "inspect",
        "re",
        "json",
        "subprocess",
        "threading",
        "pathlib",
        "tempfile",
        "logging",
        "struct",
    }
    assert len(loaded) < 35, loaded


WRITE = {"x86_64": 1, "aarch64": 64}
ONLY_WRITE = f"""
import ctypes, platform, struct
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, {WRITE}[platform.machine()]), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x80000000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
prog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, prog, 0, 0) == 0
"""


@pytest.mark.skipif(os.uname().machine not in WRITE, reason="system call numbers of another architecture")
def test_the_hot_path_makes_no_system_call(start_rank: StartRank) -> None:
    """A seccomp filter kills the rank at any system call but write; that it was in force shows at the exit, which is one."""
    rank = start_rank(
        "assert mon.attached\ndef use(i):\n    with mon.section('step', iteration=i): pass\n"
        "    mon.start_section('x'); mon.end_section('x'); mon.set_iteration(i); mon.end_section('y'); return mon.commit_allowed()\n"
        "for i in range(100): use(i)\n" + ONLY_WRITE + "for i in range(100, 1100): use(i)\nos.write(1, b'done')\n"
    )
    out, err = rank.communicate(timeout=60)
    assert (out, rank.returncode) == ("done", -signal.SIGSYS), err


def test_sections_are_small_objects(monitor: Monitor) -> None:
    assert not hasattr(monitor.section("a"), "__dict__") and isinstance(monitor.section("a"), Section)
