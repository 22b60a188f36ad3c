from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ft_launcher.errors import ConfigError
from ft_launcher.state.names import checked_node_id, checked_run_id
from ft_launcher.state.run_folder import create_run_folder, generations, parse_folder_name

BAD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "/etc",
    "../x",
    "-x",
    ".hidden",
    "a b",
    "a\nb",
    "a\0b",
    "jöb",
    "ﬀ",
    "x" * 129,
    "\ud800",
    "a*",
    "a'b",
    "~",
    "١",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_unfit_for_a_path_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--run-id .*allowed are") as caught:
        create_run_folder(tmp_path / "logs", name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert not (tmp_path / "logs").exists()
    with pytest.raises(ConfigError, match="--node-id"):
        checked_node_id(name)


@pytest.mark.parametrize("name", ["7", "12345_7", "12345[7].pbs01", "gpt-3.1", "a.b.c", "llama=70b@x", "x" * 128])
def test_schedulers_ids_are_fine(tmp_path: Path, name: str) -> None:
    assert checked_run_id(name) == name
    made = create_run_folder(tmp_path, name)
    assert made.path == tmp_path / f"{name}.0"
    assert parse_folder_name(made.path.name) == (name, 0)


def test_the_next_generation_is_the_highest_plus_one_of_this_run_id_alone(tmp_path: Path) -> None:
    for name in ("job.0", "job.7", "job.1.9", "job.x", "job.", "job.007", "jobs.30", "job.9.bak", "ft_state.json"):
        (tmp_path / name).mkdir()
    assert generations(tmp_path, "job") == [0, 7]
    made = create_run_folder(tmp_path, "job")
    assert (made.path, made.generation) == (tmp_path / "job.8", 8)
    assert create_run_folder(tmp_path, "job.1").generation == 10
    assert generations(tmp_path / "nope", "job") == []


def test_a_generation_given_by_the_store_is_shared_by_the_nodes(tmp_path: Path) -> None:
    first, second = (create_run_folder(tmp_path / "deep" / "er", "job", 4) for _ in range(2))
    assert first == second
    assert first.rank_log(0, 3) == first.path / "cycle_0000" / "rank_00003.log"
    assert first.journal("n1").name == "journal.n1.jsonl"
    assert os.listdir(first.path) == []


def test_launchers_started_together_never_share_a_generation(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from ft_launcher.state.run_folder import *; sys.stdin.read(1)\n"
    code += "for _ in range(20): print(create_run_folder(Path(sys.argv[1]), 'job').generation)"
    command = [sys.executable, "-c", code, str(tmp_path / "logs")]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        racer.stdin.write("x")
        racer.stdin.flush()
    given = [int(line) for racer in racers for line in racer.communicate(timeout=60)[0].split()]
    assert sorted(given) == list(range(80))


def test_an_unusable_log_dir_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope"), tmp_path / ("n" * 300)):
        for generation in (None, 3):
            with pytest.raises(ConfigError, match=r"^--log-dir .*cannot be written") as caught:
                create_run_folder(log_dir, "job", generation)
            assert "\n" not in str(caught.value)


def test_a_read_only_log_dir_is_the_users_to_mend(tmp_path: Path) -> None:
    libc, disk = ctypes.CDLL(None, use_errno=True), tmp_path / "disk"
    disk.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("cannot mount a tmpfs")
    try:
        create_run_folder(disk, "job", 3)
        assert libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", 1 | 32, None) == 0
        for generation in (None, 3, 4):
            with pytest.raises(ConfigError, match="Read-only file system"):
                create_run_folder(disk, "job", generation)
    finally:
        libc.umount2(os.fsencode(disk), 2)
