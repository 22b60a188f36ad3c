"""Dumps as real interpreters write them: read, normalised, grouped, and what they say about a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ft_launcher.core.topology import Topology
from monitors.attribution_places import Place, classify, place_of
from monitors.stacks import Frame, group, main_thread, names, outliers, parse, ranks_text, shared, spans, summary

SITE = "/opt/venv/lib/python3.11/site-packages"
POOL = f"""Thread 0x00007fa947fff6c0 (most recent call first):
  File "{SITE[:-14]}/threading.py", line 982 in run
  File "{SITE[:-14]}/threading.py", line 1045 in _bootstrap_inner
  File "{SITE[:-14]}/threading.py", line 1002 in _bootstrap

"""
C10D = f'  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in %s\n  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
HEAD = "Current thread 0x00007fa9789f5b80 (most recent call first):\n"
TAIL = '  File "/home/me/run/train.py", line 11 in step\n  File "/home/me/run/train.py", line 22 in <module>\n'


def dump(*inner: str) -> str:
    return POOL + HEAD + "".join(inner) + TAIL


def frame(path: str, function: str, line: int = 7) -> str:
    return f'  File "{path}", line {line} in {function}\n'


def place(text: str, line: str = "    x = compute(x)") -> Place:
    found = place_of(parse(text), lambda file, number: line)
    assert found is not None
    return found


def test_the_main_thread_is_the_one_that_began_with_a_module() -> None:
    threads = parse(dump(C10D % "all_reduce"))
    assert [t.current for t in threads] == [False, True]
    main = main_thread(threads)
    assert main is not None and main.ident == 0x7FA9789F5B80
    assert names(main) == (
        "torch/distributed/distributed_c10d.py:all_reduce", "torch/distributed/c10d_logger.py:wrapper", "run/train.py:step", "run/train.py:<module>",
    )  # fmt: skip


def test_the_signal_may_be_handled_by_any_thread() -> None:
    text = dump(C10D % "all_reduce").replace("Current thread", "Thread").replace("Thread 0x00007fa947", "Current thread 0x00007fa947")
    main = main_thread(parse(text))
    assert main is not None and not main.current and main.frames[0].function == "all_reduce"


def test_a_deep_stack_is_cut_and_the_oldest_thread_is_taken() -> None:
    deep = "".join(frame("/home/me/run/model.py", "forward", n) for n in range(100)) + "  ...\n"
    main = main_thread(parse(POOL + HEAD + deep))
    assert main is not None and main.cut and len(main.frames) == 100
    autograd = "Thread 0x00007fa900000000 (most recent call first):\n" + frame("/home/me/run/fn.py", "backward")
    assert (found := main_thread(parse(POOL + autograd + "\n" + HEAD + deep))) is not None and found.cut


def test_of_several_dumps_the_last_counts_and_the_launchers_lines_end_it() -> None:
    first, second = dump(frame("/home/me/run/train.py", "load")), dump(C10D % "barrier")
    for text in (first + second, first + "-- ft-launch: process 7: state S, waits in 0\n" + second + "-- ft-launch: process 7: state S\n"):
        threads = parse(text)
        assert len(threads) == 2
        assert threads[-1].frames[0].function == "barrier"


@pytest.mark.parametrize(
    "text", ["", "Killed\n", "Thread 0x (most recent call first):\n", '  File "x", line 1 in y\n', "\0\udcff garbage", HEAD, POOL]
)
def test_anything_else_is_passed_over(text: str) -> None:
    main = main_thread(parse(text))
    assert main is None or place_of(parse(text), lambda file, line: "") is not None


def test_a_real_dump_of_this_interpreter() -> None:
    code = (
        "import faulthandler, os, queue, signal, sys, threading\nfaulthandler.register(40, file=sys.stderr, all_threads=True)\n"
        "def load(): return queue.Queue().get()\ndef tell():\n    import time\n    time.sleep(0.3); os.kill(os.getpid(), 40); time.sleep(0.3); os._exit(0)\n"
        "threading.Thread(target=tell, daemon=True).start()\nload()\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    main = main_thread(parse(done.stderr))
    assert main is not None and [f.function for f in main.frames[-2:]] == ["load", "<module>"]
    assert str(place(done.stderr)) == "dataloader:queue.get <string>:load"


@pytest.mark.parametrize(
    ("inner", "line", "expected"),
    [
        (C10D % "all_reduce", "", "collective:all_reduce train.py:step"),
        ((C10D % "all_gather") + (C10D % "all_gather_object"), "", "collective:all_gather_object train.py:step"),
        (C10D % "barrier", "", "barrier:barrier train.py:step"),
        (C10D % "recv", "", "p2p:recv train.py:step"),
        (C10D % "_store_based_barrier", "", "rendezvous:_store_based_barrier train.py:step"),
        (C10D % "init_process_group", "", "rendezvous:init_process_group train.py:step"),
        ((C10D % "all_reduce") + frame(f"{SITE}/megatron/core/tensor_parallel/mappings.py", "_reduce"), "", "collective:all_reduce@tp mappings.py:_reduce"),
        (
            (C10D % "batch_isend_irecv") + frame(f"{SITE}/megatron/core/pipeline_parallel/p2p_communication.py", "_communicate"), "",
            "p2p:batch_isend_irecv@pp p2p_communication.py:_communicate",
        ),
        (frame(f"{SITE}/megatron/core/pipeline_parallel/p2p_communication.py", "_communicate"), "    req.wait()", "p2p:_communicate@pp p2p_communication.py:_communicate"),
        (frame(f"{SITE}/megatron/core/distributed/param_and_grad_buffer.py", "finish_grad_sync"), "    self.grad_reduce_handle.wait()",
         "collective:wait@dp param_and_grad_buffer.py:finish_grad_sync"),
        (frame(f"{SITE}/torch/utils/data/dataloader.py", "_try_get_data"), "", "dataloader:dataloader._try_get_data train.py:step"),
        (frame(f"{SITE}/torch/cuda/__init__.py", "synchronize"), "", "device:__init__.synchronize train.py:step"),
        (frame(f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"), "", "autograd:graph._engine_run_backward train.py:step"),
        (frame(f"{SITE}/torch/serialization.py", "save"), "", "file:serialization.save train.py:step"),
        ("", "    loss = forward(batch)", "user train.py:step"),
        ("", "    work.wait()", "wait train.py:step"),
        ("", "    value = loss.item()", "wait train.py:step"),
        ("", "    os.fsync(f.fileno())", "file train.py:step"),
        ("", "", "unread train.py:step"),
        (frame("/usr/lib/python3.11/threading.py", "wait") + frame("/usr/lib/python3.11/threading.py", "join"), "", "user:wait train.py:step"),
    ],
)  # fmt: skip
def test_what_a_stack_says(inner: str, line: str, expected: str) -> None:
    found = place(dump(inner), line)
    assert str(found) == expected
    assert Place.of(expected) == found


def test_a_local_wait_is_judged_by_the_thread_it_may_wait_for() -> None:
    waiting = dump(frame("/usr/lib/python3.11/queue.py", "get"))
    assert place(waiting).kind == "dataloader"
    helper = "Thread 0x0000000000000009 (most recent call first):\n" + (C10D % "all_reduce") + frame("/home/me/run/comm.py", "run") + "\n"
    assert place(helper + waiting).kind == "lock", "its helper waits for other ranks: nothing is known about whose fault that is"


def test_autograd_on_a_device_calls_back_from_a_thread_of_its_own() -> None:
    backward = dump(frame(f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"))
    inside = (
        "Thread 0x0000000000000009 (most recent call first):\n"
        + (C10D % "all_reduce")
        + frame(f"{SITE}/megatron/core/tensor_parallel/layers.py", "backward")
        + "\n"
    )
    assert str(place(inside + backward)) == "collective:all_reduce@tp layers.py:backward"


def test_no_python_frame_is_the_interpreters_own_exit() -> None:
    assert classify((), lambda file, line: "").kind == "exit"


def test_only_transparent_frames_are_a_lock() -> None:
    assert classify((Frame("/usr/lib/python3.11/threading.py", 1, "wait"),), lambda file, line: "").kind == "lock"


@pytest.mark.parametrize("text", ["", "nonsense", "collective", "user x y z", "p2p:recv@pp a.py:b"])
def test_a_place_survives_its_text(text: str) -> None:
    found = Place.of(text)
    assert found is None or Place.of(str(found)) == found


def test_groups_outliers_and_shared_coordinates() -> None:
    topology = Topology.build(world=8, tp=2, pp=2)
    groups = group({0: ("a",), 1: ("b",), 2: ("a",), 3: ("b",), 4: ("a",), 5: ("a",), 6: ("a",), 7: ("a",)})
    assert [g.ranks for g in groups] == [(0, 2, 4, 5, 6, 7), (1, 3)]
    assert outliers(groups) == (1, 3)
    assert outliers(group({0: ("a",), 1: ("b",)})) == ()
    assert shared((1, 3), topology) == "tp 1, pp 0"
    assert shared((1, 3, 5, 7), topology) == "tp 1"
    assert shared((0, 1, 4, 5), topology) == "dp 0"
    assert shared(tuple(range(8)), topology) == "all ranks"
    assert shared((0, 3), topology) is None
    assert ranks_text((1, 3), Topology.build(world=4, tp=2)) == "ranks 1,3 = tp 1"
    assert spans([7, 0, 1, 2, 3]) == "0-3,7"


def test_the_summary_names_groups_outliers_and_who_is_missing() -> None:
    topology = Topology.build(world=5)
    texts = {r: dump(C10D % "all_reduce") for r in range(3)} | {
        3: dump(frame("/home/me/run/train.py", "load")),
        4: "-- ft-launch: process 9: state T\n",
    }
    said = summary(texts, topology, lambda threads: "here")
    assert "4 of 5 ranks dumped their stacks; 2 different ones\noutliers: rank 3\nwithout stacks: rank 4\n" in said
    assert "ranks 0-2 = dp 0-2 (3): here\n    torch/distributed/distributed_c10d.py:all_reduce\n" in said
