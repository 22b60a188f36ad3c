"""What `make` calls: the set-up that says what is wrong, the look-up of etcd, and the test session that notices what a test left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 180


def run(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the set-up reads, in a folder of its own; PATH there leads to a few system tools only."""
    for name in ("tools", "requirements"):
        shutil.copytree(TREE / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TREE / "pyproject.toml", tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "env", "cat", "cut", "dirname", "head", "sha256sum", "mkdir", "chmod", "ls"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path / "clone"


def fake_python(path: Path, version: tuple[int, int], log: Path) -> Path:
    """Answers the version question, makes a venv of itself, and notes what pip was asked for."""
    old = "1" if version < (3, 11) else "0"
    return executable(
        path,
        f'#!/bin/bash\necho "$@" >> {log}\n'
        f'case "$1 $2" in -c*) exit {old} ;; --version*) echo "Python {version[0]}.{version[1]}.0" ;;\n'
        f'"-m venv") mkdir -p .venv/bin; cat "$0" > .venv/bin/python; chmod +x .venv/bin/python ;; esac\n',
    )


def test_no_python_at_all(clone: Path) -> None:
    done = run(["bash", "tools/setup_venv.sh", "test"], clone, PATH=str(clone.parent / "bin"), PYTHON="")
    assert done.returncode == 2
    assert done.stderr.startswith("setup: no Python >= 3.11 found on PATH")
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_an_old_python_named_by_the_user(clone: Path) -> None:
    python = fake_python(clone.parent / "old", (3, 9), clone.parent / "log")
    done = run(["bash", "tools/setup_venv.sh", "test"], clone, PATH=str(clone.parent / "bin"), PYTHON=str(python))
    assert (done.returncode, done.stderr) == (2, f"setup: PYTHON={python} is not a Python >= 3.11 (Python 3.9.0)\n")
    assert not (clone / ".venv").exists()


def test_set_up_once_and_again_when_the_pins_change(clone: Path) -> None:
    log, path = clone.parent / "log", str(clone.parent / "bin")
    fake_python(clone.parent / "bin" / "python3", (3, 11), log)

    def installed(name: str) -> list[str]:
        log.write_text("")
        done = run(["bash", "tools/setup_venv.sh", name], clone, PATH=path, PYTHON="")
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split("install ")[1] for line in log.read_text().splitlines() if "install " in line]

    project = "--no-deps --no-build-isolation -e ."
    assert installed("demo") == ["-r requirements/demo.txt", project]
    assert installed("demo") == []
    assert installed("test") == ["-r requirements/test.txt", project]
    assert installed("test") == []
    assert installed("demo") == []
    (clone / "requirements" / "demo.txt").write_text("click\n")
    assert installed("demo") == ["-r requirements/demo.txt", project]


def test_a_failed_install_is_not_taken_for_done(clone: Path) -> None:
    log, path = clone.parent / "log", str(clone.parent / "bin")
    python = fake_python(clone.parent / "bin" / "python3", (3, 11), log)
    python.write_text(python.read_text() + '[[ "$*" = *install* ]] && exit 1\nexit 0\n')
    for _ in range(2):
        done = run(["bash", "tools/setup_venv.sh", "test"], clone, PATH=path, PYTHON="")
        assert done.returncode == 1
        assert "pip could not install requirements/test.txt" in done.stderr


def test_every_requirement_is_pinned_and_covers_the_project() -> None:
    pins: dict[str, str] = {}
    for name in ("demo", "test"):
        for line in (TREE / "requirements" / f"{name}.txt").read_text().splitlines():
            text = line.partition("#")[0].strip()
            if text and not text.startswith("-r "):
                match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][^\s]*)", text)
                assert match, f"{name}.txt: not an exact pin: {line}"
                assert match[1].lower() not in pins, f"{name}.txt: {match[1]} is pinned twice"
                pins[match[1].lower()] = match[2]
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    assert {re.split(r"[<>=\[ ]", need)[0].lower() for need in asked} <= set(pins)


def test_an_etcd_server_is_found_and_is_a_binary() -> None:
    done = run(["bash", "tools/etcd.sh"], TREE)
    assert done.returncode == 0, done.stderr
    server = Path(done.stdout.strip())
    assert server.read_bytes()[:4] == b"\x7fELF"
    assert "etcd Version: 3." in run([str(server), "--version"], TREE).stdout


def test_etcd_from_the_path_but_never_a_wrapper_script(clone: Path) -> None:
    """A script that starts the server would leave it running when it is killed."""
    if not (real := os.environ.get("FT_ETCD") or run(["bash", "tools/etcd.sh"], TREE).stdout.strip()):
        pytest.fail("no etcd to test with")
    bin_ = clone.parent / "bin"
    executable(bin_ / "first" / "etcd", "#!/bin/bash\nexit 0\n")
    (bin_ / "second").mkdir()
    (bin_ / "second" / "etcd").symlink_to(real)
    done = run(["bash", "tools/etcd.sh"], clone, PATH=f"{bin_}/first:{bin_}/second:{bin_}", FT_ETCD="")
    assert (done.stdout.strip(), done.stderr) == (f"{bin_}/second/etcd", "")
    wrong = run(["bash", "tools/etcd.sh"], clone, FT_ETCD=f"{bin_}/first/etcd")
    assert (wrong.returncode, wrong.stderr) == (2, f"etcd: FT_ETCD={bin_}/first/etcd is no etcd server binary\n")


def test_make_knows_its_targets() -> None:
    done = run(["make", "help"], TREE)
    assert re.findall(r"^make ([a-z-]+)", done.stdout, re.MULTILINE) == [
        "help", "demo", "test", "check", "format", "bench", "sim", "soak", "gpu-check", "clean", "distclean",
    ]  # fmt: skip


LEAVES_A_PROCESS = """
import subprocess, sys
def test_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
LEAVES_FILES = """
from pathlib import Path
def test_leaves_files():
    (Path(__file__).parent / "forgotten.txt").touch()
    Path("/dev/shm/ft_test_forgotten").touch()
"""
LEAVES_NOTHING = """
import subprocess, sys
def test_leaves_nothing(tmp_path):
    (tmp_path / "x").touch()
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.serial
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "xdist"])
@pytest.mark.parametrize(
    ("source", "found"),
    [
        (LEAVES_A_PROCESS, ["process ", "time.sleep(600)"]),
        (LEAVES_FILES, ["tests/forgotten.txt", "/dev/shm/ft_test_forgotten"]),
        (LEAVES_NOTHING, []),
    ],
    ids=["a process", "files", "nothing"],
)
def test_a_session_that_leaves_something_behind_fails(tmp_path: Path, source: str, found: list[str], workers: list[str]) -> None:
    (tmp_path / "tests").mkdir()
    text = (TREE / "tests" / "conftest.py").read_text()
    (tmp_path / "tests" / "conftest.py").write_text(text.replace("GRACE_S = 10.0", "GRACE_S = 1.0"))
    (tmp_path / "tests" / "test_it.py").write_text(source)
    try:
        done = run([sys.executable, "-m", "pytest", "-q", *workers, "tests"], tmp_path, FT_TEST_CHECK_TREE="1")
    finally:
        Path("/dev/shm/ft_test_forgotten").unlink(missing_ok=True)
    assert "1 passed" in done.stdout
    assert done.returncode == (1 if found else 0), done.stdout
    assert [text for text in found if text not in done.stdout] == []
    assert ("LEFT BEHIND" in done.stdout) == bool(found)
