"""Who dies with whom, and that every end is told: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_launcher.shell.process import Command, Pong, RankEnded, RankStarted, Reaped, ZygoteLost
from tests.process.driver import Driver, base_env, gone, make_page, wait_until

# A rank with every way of leaving: a child, a grandchild, one in its own session, a double fork, one that ignores SIGTERM, one that was orphaned.
FAMILY = """
import os, signal, sys, time
def leave(*steps):
    pid = os.fork()
    if pid:
        return
    for step in steps:
        if step == 'setsid': os.setsid()
        if step == 'fork':
            middle = os.getpid()
            if os.fork(): os._exit(0)
            while os.getppid() == middle: time.sleep(0.001)  # it is gone before anybody counts
        if step == 'ignore': [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        if step == 'subreap':
            import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    os.write(1, b'child %d\\n' % os.getpid())
    while True: time.sleep(60)
leave(); leave('setsid'); leave('fork'); leave('fork', 'setsid', 'fork'); leave('ignore'); leave('subreap', 'setsid')
os.write(1, b'ready %d\\n' % os.getpid())
while True: time.sleep(60)
"""
MEMBERS = 6


def family(driver: Driver, cycle: int, rank: int = 0) -> list[int]:
    path = driver.rank_log(cycle, rank)
    return family_in(path)


def family_in(path: Path) -> list[int]:
    wait_until(
        lambda: path.exists() and path.read_text().count("child ") == MEMBERS and "ready" in path.read_text(), f"the family in {path}"
    )
    return [int(line.split()[1]) for line in path.read_text().splitlines()]


@contextmanager
def zygote(folder: Path, script: str, **options: Any) -> Iterator[Driver]:
    (folder / "main.py").write_text(script)
    with Driver(folder, Command(script="main.py"), **options) as driver:
        yield driver


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_reap_ends_every_descendant(tmp_path: Path, method: str) -> None:
    with zygote(tmp_path, FAMILY, start_method=method) as driver:
        cycle = driver.fork(3)
        pids = [pid for r in range(3) for pid in family(driver, cycle, r)]
        reaped = driver.reap(cycle)
        assert (reaped.left, reaped.strays) == ((), 3 * MEMBERS)
        assert all(gone(pid) for pid in pids)
        assert not [p for p in psutil.Process(driver.zygote.pid).children(recursive=True) if not gone(p.pid)]
        at = driver.events.index(reaped)
        assert sum(isinstance(e, RankEnded) for e in driver.events[:at]) == 3, "every rank's end comes before Reaped"


def test_reap_after_the_rank_itself_has_ended(tmp_path: Path) -> None:
    with zygote(tmp_path, FAMILY) as driver:
        cycle = driver.fork(1)
        pids = family(driver, cycle)
        driver.call(driver.zygote.kill, cycle, [0], signal.SIGKILL, group=False)
        assert driver.ended(cycle).signal == signal.SIGKILL
        assert driver.reap(cycle).strays == MEMBERS
        assert all(gone(pid) for pid in pids)


def test_close_ends_everything(tmp_path: Path, method: str) -> None:
    with zygote(tmp_path, FAMILY, start_method=method) as driver:
        pids = family(driver, driver.fork(1))
        zygote_pid = driver.zygote.pid
    assert all(gone(pid) for pid in [*pids, zygote_pid])


def test_stopped_rank_is_reaped(tmp_path: Path) -> None:
    with zygote(tmp_path, FAMILY) as driver:
        cycle = driver.fork(1)
        pids = family(driver, cycle)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert driver.reap(cycle).left == ()
        assert driver.ended(cycle).signal == signal.SIGKILL
        assert all(gone(pid) for pid in pids)


def test_forwarded_signal_reaches_the_rank_alone(tmp_path: Path) -> None:
    script = "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('got', os.getpid()))\nif os.fork():\n    print('ready')\nwhile True: time.sleep(60)"
    with zygote(tmp_path, script) as driver:
        cycle = driver.fork(2)
        for rank in (0, 1):
            driver.wait_text(cycle, "ready", rank)
        driver.call(driver.zygote.kill, cycle, [1], signal.SIGUSR1, group=False)
        driver.wait_text(cycle, f"got {driver.started(cycle, 1).pid}", 1)
        driver.reap(cycle)
        assert driver.rank_log(cycle, 1).read_text().count("got") == 1
        assert "got" not in driver.rank_log(cycle, 0).read_text()


def test_signal_right_after_the_fork_is_not_lost(tmp_path: Path) -> None:
    """Between fork and the rank's own handlers a signal must neither vanish in the zygote's handler nor wake the zygote: it acts as on a fresh process."""
    with zygote(tmp_path, "import time\ntime.sleep(600)") as driver:
        for _ in range(20):
            cycle = driver.fork(2)
            driver.call(driver.zygote.kill, cycle, None, signal.SIGTERM, group=True)
            assert [driver.ended(cycle, r).signal for r in (0, 1)] == [signal.SIGTERM, signal.SIGTERM]


def test_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    with zygote(
        tmp_path, "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\nwhile True: time.sleep(60)"
    ) as driver:
        cycle = driver.fork(1)
        driver.wait_text(cycle, "ready")
        driver.call(driver.zygote.kill, cycle, None, signal.SIGTERM, group=False)
        driver.call(driver.zygote.ping)
        driver.expect(Pong)
        assert not [e for e in driver.events if isinstance(e, RankEnded)]
        driver.call(driver.zygote.kill, cycle, None, signal.SIGKILL, group=True)
        assert driver.ended(cycle).signal == signal.SIGKILL


def test_kill_of_an_old_cycle_touches_nobody(tmp_path: Path) -> None:
    with zygote(tmp_path, "import time\nprint('ready')\ntime.sleep(600)") as driver:
        cycle = driver.fork(1)
        driver.wait_text(cycle, "ready")
        driver.call(driver.zygote.kill, cycle - 1, None, signal.SIGKILL, group=True)
        driver.call(driver.zygote.ping)
        driver.expect(Pong)
        assert not gone(driver.started(cycle).pid)


def test_ends_are_told_in_order_with_their_cause(tmp_path: Path) -> None:
    script = "import os, sys, time\nr = int(os.environ['RANK'])\nwhile r and not os.path.exists(f'{os.environ[\"CYCLE\"]}.{r - 1}'): time.sleep(0.01)\n"
    script += "print('go')\nif r == 1: os.kill(os.getpid(), 9)\nsys.exit(r)"
    with zygote(tmp_path, script) as driver:
        cycle = driver.fork(3, {"CYCLE": "x"})
        for rank in range(3):
            end = driver.ended(cycle, rank)
            assert (end.code, end.signal) == ((None, 9) if rank == 1 else (rank, None))
            assert end.at_ns > driver.started(cycle, rank).at_ns
            (tmp_path / f"x.{rank}").touch()
        assert [e.rank for e in driver.events if isinstance(e, RankEnded)] == [0, 1, 2]


def test_growing_tree_is_ended(tmp_path: Path) -> None:
    """Processes that fork faster than a walk of /proc, each in a session of its own: bounded in number here, not in speed."""
    script = (
        "import os, time\nprint('ready')\nend = time.monotonic() + 20\nn = 0\n"
        "while time.monotonic() < end and n < 110:\n    n += 1\n    if os.fork() == 0:\n        os.setsid()\n        n += 100\n    time.sleep(0.002)\ntime.sleep(600)"
    )
    with zygote(tmp_path, script, reap_s=60.0) as driver:
        cycle = driver.fork(1)
        driver.wait_text(cycle, "ready")
        wait_until(lambda: len(psutil.Process(driver.zygote.pid).children(recursive=True)) > 20, "a tree")
        reaped = driver.reap(cycle)
        assert reaped.left == ()
        assert reaped.strays >= 20
        assert psutil.Process(driver.zygote.pid).children(recursive=True) == []


def test_fifty_cycles_leave_descriptors_and_children_flat(tmp_path: Path) -> None:
    with zygote(tmp_path, "import os, time\nif os.fork() == 0:\n    os.setsid()\nprint('ready')\ntime.sleep(600)") as driver:
        ours, theirs = psutil.Process(), psutil.Process(driver.zygote.pid)
        before = ours.num_fds(), theirs.num_fds()
        for _ in range(50):
            page = make_page()
            cycle = driver.fork(2, stacks_path=str(tmp_path / "stacks"), page_fd=page)
            os.close(page)
            for rank in (0, 1):
                driver.wait_text(cycle, "ready", rank)
            assert driver.reap(cycle).left == ()
            wait_until(
                lambda: theirs.children() == [] and (ours.num_fds(), theirs.num_fds()) == before, f"descriptors as before: {before}", 30
            )
        assert theirs.num_threads() == 1


def test_stopped_zygote_never_blocks_the_agent(tmp_path: Path) -> None:
    with zygote(tmp_path, "print('ran')") as driver:
        os.kill(driver.zygote.pid, signal.SIGSTOP)
        for _ in range(3000):
            driver.call(driver.zygote.kill, 0, list(range(100)), signal.SIGTERM, group=False)
        cycle = driver.fork(1)
        os.kill(driver.zygote.pid, signal.SIGCONT)
        assert driver.ended(cycle).code == 0


def test_stopped_zygote_can_be_closed(tmp_path: Path) -> None:
    with zygote(tmp_path, "import time\nprint('ready')\ntime.sleep(600)") as driver:
        cycle = driver.fork(1)
        driver.wait_text(cycle, "ready")
        pids = [driver.zygote.pid, driver.started(cycle).pid]
        os.kill(driver.zygote.pid, signal.SIGSTOP)
        driver.loop.run_until_complete(driver.zygote.close(0.2, spare=psutil_children_but(pids)))
        wait_until(lambda: all(gone(pid) for pid in pids), "zygote and rank to end")


def psutil_children_but(pids: list[int]) -> list[int]:
    return [p.pid for p in psutil.Process().children() if p.pid not in pids]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_lost_zygote_is_told_and_ranks_end(tmp_path: Path, number: signal.Signals) -> None:
    with zygote(tmp_path, "import time\nprint('ready')\ntime.sleep(600)") as driver:
        cycle = driver.fork(2)
        for rank in (0, 1):
            driver.wait_text(cycle, "ready", rank)
        pids = [driver.started(cycle, r).pid for r in (0, 1)]
        os.kill(driver.zygote.pid, number)
        wait_until(lambda: (driver.turn(0.1), any(isinstance(e, ZygoteLost) for e in driver.events))[1], "ZygoteLost")
        assert isinstance(driver.events[-1], ZygoteLost)
        how = "exit code 0" if number == signal.SIGTERM else number.name
        assert how in driver.events[-1].reason
        wait_until(lambda: all(gone(pid) for pid in pids), "the ranks to die with the zygote")


def run_owner(folder: Path, **plan: Any) -> tuple[subprocess.Popen[str], list[dict[str, Any]]]:
    (folder / "main.py").write_text(FAMILY)
    text = json.dumps({"folder": str(folder), "script": "main.py", "ranks": 2, **plan})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.process.owner", text],
        stdout=subprocess.PIPE,
        text=True,
        env=base_env(),
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert process.stdout is not None
    events = []
    while sum(e["event"] == "RankStarted" for e in events) < 2:
        line = process.stdout.readline()
        assert line, events
        events.append(json.loads(line))
    return process, events


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_agent_takes_everything_along(tmp_path: Path, method: str, whole_group: bool) -> None:
    process, events = run_owner(tmp_path, options={"start_method": method})
    pids = [pid for r in range(2) for pid in family_in(tmp_path / f"r{r}.log")]
    zygote_pid = next(e["pid"] for e in events if e["event"] == "ZygoteReady")
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: all(gone(pid) for pid in [*pids, zygote_pid]), f"{[p for p in [*pids, zygote_pid] if not gone(p)]} to end", 30)


def test_agent_killed_while_the_zygote_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    (tmp_path / "main.py").write_text("")
    plan = json.dumps({"folder": str(tmp_path), "script": "main.py", "ranks": 0, "options": {"preload": ["slow_import"]}})
    process = subprocess.Popen([sys.executable, "-m", "tests.process.owner", plan], env=base_env(), cwd=Path(__file__).parents[2])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", "the import")
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: gone(pid), "the importing zygote to end", 30)


def test_killed_zygote_leaves_nothing_once_the_agent_has_swept(tmp_path: Path, method: str) -> None:
    process, events = run_owner(tmp_path, options={"start_method": method})
    pids = [pid for r in range(2) for pid in family_in(tmp_path / f"r{r}.log")]
    os.kill(next(e["pid"] for e in events if e["event"] == "ZygoteReady"), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    closed = json.loads(out.splitlines()[-1])
    assert closed == {"event": "Closed", "left": [], "children": []}
    assert "SIGKILL" in next(json.loads(line)["reason"] for line in out.splitlines() if "ZygoteLost" in line)
    assert all(gone(pid) for pid in pids)


def test_reaped_and_started_of_one_cycle_come_in_order(tmp_path: Path) -> None:
    """Wishes are carried out in order though a look at the sources delays the fork: a reap sent right behind a fork finds its ranks."""
    with zygote(tmp_path, "import time\ntime.sleep(600)") as driver:
        for _ in range(10):
            cycle = driver.fork(2)
            assert driver.reap(cycle).left == ()
            mine = [type(e) for e in driver.events if getattr(e, "cycle", None) == cycle]
            assert mine == [RankStarted, RankStarted, RankEnded, RankEnded, Reaped]
