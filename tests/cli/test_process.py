"""`ft-launch` as a process: one line and exit 2 for bad input, no traceback, nothing left on disk, and a start that imports little."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 120
HEAVY = {"torch", "numpy", "yaml", "rich", "jsonschema", "grpc", "google", "etcd3", "psutil", "megatron", "asyncio", "multiprocessing"}


def environment(**extra: str) -> dict[str, str]:
    """This one, without what says anything to a launcher."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("FT_", "SLURM_", "MASTER_"))}
    return kept | {"FT_TEST_SESSION": os.environ["FT_TEST_SESSION"]} | extra


def launch(cwd: Path, *args: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ft_launcher", *args]
    return subprocess.run(command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    return tmp_path


BAD = [
    ["nosuch.py"],
    ["."],
    ["--nproc-per-node", "4", "--tp", "3", "train.py"],
    ["--tpp", "3", "train.py"],
    ["--timeouts", "step=-1", "train.py"],
    ["--timeouts", "nosuch=1", "train.py"],
    ["--out-of-section", "nan", "train.py"],
    ["--config", "/no/such/file.yaml", "train.py"],
    ["--config", "train.py", "train.py"],
    ["--log-dir", "/proc/xyz", "train.py"],
    ["--log-dir", "train.py", "train.py"],
    ["--nproc-per-node", "0", "train.py"],
    ["--tee", "1", "--nproc-per-node", "1", "train.py"],
    ["--tp", "1", "train.py", "--tensor-model-parallel-size", "2"],
]


@pytest.mark.parametrize("args", BAD, ids=lambda args: " ".join(args))
def test_bad_input(folder: Path, args: list[str]) -> None:
    done = launch(folder, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ft-launch: error: ")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(folder, "--node-addr", f"127.0.0.1:{port}", "train.py")
    assert done.returncode == 2
    assert done.stderr == (
        f"ft-launch: error: --node-addr '127.0.0.1:{port}': port {port} is in use; choose another, or leave the port out and the kernel chooses one\n"
    )


def test_a_current_directory_that_is_gone(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "ft-launch"
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {script} /dev/null"
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), shell=True, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the current directory cannot be used" in done.stderr


def test_another_rerun_in_the_way(folder: Path) -> None:
    """What PyPI's rerun-sdk installs: a folder that a .pth file puts on the path, with a `rerun` in it."""
    (folder / "site" / "rerun").mkdir(parents=True)
    (folder / "site" / "rerun" / "__init__.py").write_text("")
    done = launch(folder, "--dry-run", "train.py", PYTHONPATH=str(folder / "site"))
    assert done.returncode == 2
    assert f"{folder}/site/rerun/__init__.py also calls itself 'rerun'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run(folder: Path) -> None:
    done = launch(folder, "--dry-run", "--nproc-per-node", "2", "--log-dir", "logs", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 ranks = tp 1 x cp 1 x dp 2 x pp 1" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_the_console_script_is_the_same(folder: Path) -> None:
    script = Path(sys.executable).parent / "ft-launch"
    done = subprocess.run(
        [script, "nosuch.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (2, launch(folder, "nosuch.py").stderr)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["-h"],
        ["--version"],
        ["--dry-run", "--nproc-per-node", "2", "train.py"],
        ["simulate", "-h"],
        ["simulate", "--ranks", "4", "--hours", "0.01"],
    ],
)
def test_a_full_standard_output_is_one_line(folder: Path, args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ft_launcher", *args]
        child = subprocess.run(
            command, cwd=folder, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    assert child.returncode == 1
    assert child.stderr == "ft-launch: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", ["--help", "--version", "--dry-run --nproc-per-node 2 train.py", "simulate --ranks 4 --hours 0.01"])
def test_a_closed_standard_output_is_no_traceback(folder: Path, words: str) -> None:
    command = f"exec {sys.executable} -m ft_launcher {words} >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m ft_launcher --help | head -1",
        cwd=folder,
        env=environment(),
        shell=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stderr == ""


LOADED = """
import contextlib, io, json, sys
from ft_launcher import cli
with contextlib.redirect_stdout(io.StringIO()):
    code = cli.run(sys.argv[1:])
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.mark.parametrize("args", [["--help"], ["--dry-run", "train.py"]], ids=["help", "launch"])
def test_the_start_imports_nothing_heavy(folder: Path, args: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, *args]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    code, loaded = json.loads(done.stdout)
    assert code == 0
    assert not HEAVY & set(loaded)
