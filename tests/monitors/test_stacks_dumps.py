"""Gathering from real processes: who answers, who must not be signalled, who cannot answer, and that nothing waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ft_launcher.core.topology import Topology
from ft_launcher.shell import incident
from ft_launcher.shell.dumps import FILE_BYTES, GATHER_S, Dumps, Seen, Target, catches, kernel_view, process_state
from ft_launcher.shell.stack_files import IncidentWithStacks, StackFiles, remove_empty
from monitors.hooks import STACKS_SIGNAL
from monitors.stacks import SEPARATOR

HOOKED = (
    "import faulthandler, sys, time\nfaulthandler.register({number}, file=open(sys.argv[1], 'ab'), all_threads=True)\n"
    "def stand_still():\n    print('ready', flush=True)\n    time.sleep(1000)\nstand_still()\n"
)
BARE = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"


class Ranks:
    """Child processes in the place of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, code: str) -> None:
        script = self.folder / f"rank{rank}.py"
        script.write_text(code.replace("{number}", str(STACKS_SIGNAL)))
        self.children[rank] = subprocess.Popen([sys.executable, "-S", str(script), str(self.path(rank))], stdout=subprocess.PIPE, text=True)
        assert self.children[rank].stdout.readline() == "ready\n"  # type: ignore[union-attr]

    def path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.stacks"

    def targets(self, env: Mapping[str, str] | None = None) -> list[Target]:
        return [Target(r, child.pid, self.path(r), True, env or {}) for r, child in self.children.items()]

    def signal(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.children[rank].send_signal(STACKS_SIGNAL)

    async def gather(self, env: Mapping[str, str] | None = None) -> dict[int, Seen]:
        """What a whole gathering delivers; it has ended, files and all, when this returns."""
        seen: dict[int, Seen] = {}
        dumps = Dumps(self.signal)
        assert dumps.gather(self.targets(env), seen.update)
        while dumps._current is not None and dumps._current.alive:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        return seen


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for child in made.children.values():
        child.kill()
        child.communicate()


@pytest.mark.serial
def test_who_answers_is_placed_and_who_cannot_is_left_alone(ranks: Ranks) -> None:
    ranks.start(0, HOOKED)
    ranks.start(1, BARE)
    ranks.start(2, HOOKED)
    os.kill(ranks.children[2].pid, signal.SIGSTOP)
    seen = asyncio.run(ranks.gather())
    assert seen[0].place == "user rank0.py:stand_still" and seen[0].state in ("S", "")
    assert seen[1].place == "" and ranks.children[1].poll() is None, "without a handler the signal would have killed it"
    assert seen[2] == Seen("T", "")
    text = ranks.path(0).read_text()
    assert "in stand_still" in text and f"{SEPARATOR}process {ranks.children[0].pid}: state S, waits in " in text
    assert "state T" in ranks.path(2).read_text()


@pytest.mark.serial
def test_a_second_dump_is_told_from_the_first_and_the_file_is_bounded(ranks: Ranks) -> None:
    ranks.start(0, HOOKED)
    first, second = asyncio.run(ranks.gather()), asyncio.run(ranks.gather())
    assert first[0].place == second[0].place == "user rank0.py:stand_still"
    assert ranks.path(0).read_text().count("most recent call first") == 2
    with ranks.path(0).open("ab") as file:
        file.truncate(FILE_BYTES + 1)
    assert asyncio.run(ranks.gather())[0].place == "user rank0.py:stand_still"
    assert ranks.path(0).stat().st_size < 10_000


@pytest.mark.serial
def test_one_at_a_time_and_nothing_after_a_stop(ranks: Ranks) -> None:
    ranks.start(0, BARE)

    async def twice() -> None:
        delivered: list[Mapping[int, Seen]] = []
        dumps = Dumps(lambda _: None)
        assert dumps.gather([Target(0, ranks.children[0].pid, ranks.path(0), False)], delivered.append)
        assert not dumps.gather([Target(0, ranks.children[0].pid, ranks.path(0), False)], delivered.append)
        dumps.stop()
        while dumps._current is not None and dumps._current.alive:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert delivered == []
        assert not dumps.gather([], delivered.append)

    asyncio.run(twice())


@pytest.mark.serial
def test_a_rank_that_does_not_answer_does_not_hold_up_the_others(ranks: Ranks) -> None:
    ranks.start(0, HOOKED)
    ranks.start(1, "import signal\nsignal.signal({number}, lambda *_: None)\n" + BARE)
    began = time.monotonic()
    seen = asyncio.run(ranks.gather())
    assert seen[0].place == "user rank0.py:stand_still" and seen[1].place == ""
    assert time.monotonic() - began >= GATHER_S * 0.9, "it waited for the whole of its time, and no longer"


@pytest.mark.serial
def test_the_flight_recorder_is_asked_and_its_dump_kept(ranks: Ranks) -> None:
    stem = str(ranks.folder / "trace_")
    os.mkfifo(f"{stem}0.pipe")
    answer = f"import os\nfd = os.open({stem + '0.pipe'!r}, os.O_RDONLY | os.O_NONBLOCK)\n"
    loop = (
        "def stand_still():\n    print('ready', flush=True)\n    import time\n    while not os.read(fd, 1): time.sleep(0.001)\n"
        f"    open({stem + '0'!r}, 'w').write('pickle')\n    time.sleep(1000)\nstand_still()\n"
    )
    ranks.start(0, "".join(HOOKED.splitlines(keepends=True)[:2]) + answer + loop)
    asyncio.run(ranks.gather({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem}))
    assert (ranks.folder / "trace_0").read_text() == "pickle"
    assert ranks.path(0).with_suffix(".flight").read_text() == "pickle"
    assert "flight recorder: rank_00000.flight, 6 bytes" in ranks.path(0).read_text()


@pytest.mark.serial
def test_the_kernels_view_of_processes_that_are_there_and_not(ranks: Ranks) -> None:
    ranks.start(0, HOOKED)
    pid = ranks.children[0].pid
    assert process_state(pid) in "SRD" and catches(pid, STACKS_SIGNAL) and not catches(pid, STACKS_SIGNAL + 1)
    assert f"thread {pid} " in kernel_view(pid)
    ranks.children[0].kill()
    ranks.children[0].wait()
    assert process_state(pid) == "X" and not catches(pid, STACKS_SIGNAL)
    assert "state X" in kernel_view(pid)


def test_an_incident_holds_stacks_and_their_summary_and_touches_no_file_before(tmp_path: Path) -> None:
    def path(rank: int) -> Path:
        return tmp_path / f"rank_{rank:05d}.stacks"

    files = StackFiles(3, path)
    state = incident.RankAtIncident(1, "step", 2.0, None)
    found = incident.Incident(0, "hang", "why", "restart", None, dict.fromkeys(range(3), state), stacks=files)
    job = IncidentWithStacks(tmp_path / "incidents", found, Topology.build(world=3))
    for rank in range(2):
        path(rank).write_text('Current thread 0x0000000000000001 (most recent call first):\n  File "/x/train.py", line 1 in <module>\n')
    path(2).touch()
    job()
    folder = tmp_path / "incidents" / "0001" / "stacks"
    assert sorted(p.name for p in folder.iterdir()) == ["rank_00000.txt", "rank_00001.txt", "summary.txt"]
    assert "without stacks: rank 2" in (folder / "summary.txt").read_text()
    remove_empty([path(r) for r in range(4)])
    assert [path(r).exists() for r in range(3)] == [True, True, False]
