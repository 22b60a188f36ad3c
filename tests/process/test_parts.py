"""Framing, descriptors, the walk of /proc, the events' JSON: the pieces, without a zygote."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from ft_launcher.core.command import Command
from ft_launcher.shell import baseline, blas, process_events, strays
from ft_launcher.shell.process_events import RankEnded, Reaped, ZygoteReady
from ft_launcher.shell.wire import Channel, WireError
from tests.process.driver import gone, wait_until


def channels() -> tuple[Channel, Channel]:
    a, b = socket.socketpair()
    return Channel(a), Channel(b)


def test_messages_and_descriptors_arrive_in_order() -> None:
    a, b = channels()
    files = [os.memfd_create(str(i)) for i in range(5)]
    before = psutil.Process().num_fds()
    a.send({"n": 0}, files[:2])
    a.send({"n": 1})
    a.send({"n": 2}, files[2:])
    got = b.receive()
    assert [m.body["n"] for m in got] == [0, 1, 2]
    links = [[os.readlink(f"/proc/self/fd/{fd}").split(":")[1][0] for fd in m.fds] for m in got]  # noqa: PTH115
    assert links == [["0", "1"], [], ["2", "3", "4"]]
    assert not any(os.get_inheritable(fd) for m in got for fd in m.fds)
    for fd in [fd for m in got for fd in m.fds]:
        os.close(fd)
    assert psutil.Process().num_fds() == before
    for fd in files:
        os.close(fd)
    a.close()
    assert (b.receive(), b.eof) == ([], True)
    b.close()


def test_peer_that_does_not_read_costs_memory_not_time() -> None:
    a, b = channels()
    fd = os.memfd_create("x")
    for n in range(200):
        a.send({"n": n, "text": "x" * 20_000}, [fd])
    os.close(fd)
    assert a.wants_write
    seen = []
    while len(seen) < 200:
        seen += b.receive()
        a.flush()
    assert [m.body["n"] for m in seen] == list(range(200))
    assert not a.wants_write
    for message in seen:
        os.close(message.fds[0])
    a.close()
    b.close()


def test_closing_forgets_no_descriptor() -> None:
    before = psutil.Process().num_fds()
    a, b = channels()
    fd = os.memfd_create("x")
    for n in range(100):
        a.send({"n": n, "text": "x" * 20_000}, [fd])
    os.close(fd)
    a.close()
    for message in b.receive():
        os.close(message.fds[0])
    b.close()
    assert psutil.Process().num_fds() == before


def test_peer_that_is_gone_is_no_error_for_a_sender() -> None:
    a, b = channels()
    b.close()
    a.send({"n": 1})
    assert (a.receive(), a.eof, a.wants_write) == ([], True, False)
    a.close()


def test_frame_out_of_proportion_is_refused() -> None:
    a, b = socket.socketpair()
    a.sendall(b"\xff" * 16)
    channel = Channel(b)
    with pytest.raises(WireError):
        channel.receive()
    channel.close()
    a.close()


def test_abandoned_channel_never_closes_a_number() -> None:
    a, b = channels()
    number = a.fileno()
    a.abandon()
    assert os.fstat(number)
    a.close()
    assert os.fstat(number)
    os.close(number)
    b.close()


@pytest.mark.parametrize(
    "event",
    [
        RankEnded(1, 2, 3, None, 9, 4, True),
        Reaped(1, 2, (3, 4), 0.5),
        ZygoteReady(1, "spawn", ("a",), 0.1, None, ()),
        process_events.Pong(),
    ],
)
def test_events_survive_the_wire(event: process_events.ProcessEvent) -> None:
    import json

    assert process_events.decode(json.loads(json.dumps(process_events.encode(event)))) == event


def test_command_is_a_script_or_a_module() -> None:
    assert Command(module="a.b", args=("x",)).argv == ("-m", "a.b", "x")
    assert Command(script="s.py").argv == ("s.py",)
    for wrong in ({}, {"module": "a", "script": "b"}):
        with pytest.raises(ValueError, match="a script or a module"):
            Command(**wrong)


TREE = "import os, sys, time\nfor _ in range(2):\n    if os.fork() == 0: os.setsid()\nsys.stdout.write('x'); sys.stdout.flush()\ntime.sleep(600)"


@pytest.mark.parametrize("scan", [False, True])
def test_walk_finds_what_psutil_finds_and_spares_what_it_should(monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    if scan:
        monkeypatch.setattr(strays, "children", strays._children_by_scan)
    trees = [subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for tree in trees:
            assert tree.stdout is not None
            assert tree.stdout.read(4) == b"xxxx"
        check_walk(trees[0].pid, trees[1].pid)
    finally:
        for tree in trees:
            strays.kill_all_below(tree.pid)
            tree.kill()
            tree.communicate()


def check_walk(first: int, second: int) -> None:
    below_first, below_second = ({p.pid for p in psutil.Process(pid).children(recursive=True)} for pid in (first, second))
    found = [p.pid for p in strays.descendants(os.getpid(), spare=[second])]
    assert set(found) >= below_first | {first}
    assert not set(found) & (below_second | {second})
    assert found.index(first) < min(found.index(pid) for pid in below_first)
    assert strays.kill_all_below(first, deadline_s=30) == strays.Swept(3, ())
    assert not any(gone(pid) for pid in [second, *below_second])
    wait_until(lambda: all(gone(pid) for pid in below_first), "the first tree to end")


def test_recycled_number_is_not_hit() -> None:
    process = subprocess.Popen(["sleep", "600"])
    real = strays.read_process(process.pid)
    assert real is not None
    assert not strays._kill(strays.Process(real.pid, real.ppid, real.start_ticks - 1))
    assert process.poll() is None
    assert strays._kill(real)
    assert process.wait() == -signal.SIGKILL


def test_what_cannot_be_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "600"])
    others = [p.pid for p in psutil.Process().children() if p.pid != process.pid]
    monkeypatch.setattr(strays.signal, "pidfd_send_signal", lambda *_: None)
    assert strays.kill_all_below(os.getpid(), spare=others, deadline_s=0.05) == strays.Swept(1, (process.pid,))
    process.kill()
    process.wait()


def test_merged_environment() -> None:
    assert baseline.merged({"a": "1", "b": "2"}, {"b": None, "c": "3", "a": "", "none": None}) == {"a": "", "c": "3"}


def test_openblas_threads_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert blas.wanted_threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert blas.wanted_threads() == 5
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "nonsense")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert blas.wanted_threads() == len(os.sched_getaffinity(0))


def test_agent_s_side_imports_no_torch() -> None:
    code = "import sys, ft_launcher.shell.process; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
