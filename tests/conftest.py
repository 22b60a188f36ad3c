"""What holds for all tests: markers, and that nothing is left behind.

`serial` marks tests that start processes, send signals or measure: `make test` runs them one by one, after the others have run in
parallel. Whole folders are `serial` (SERIAL_FOLDERS); elsewhere a test says so itself.

At the end of the session no process that the tests started may be alive, no new file may be in /dev/shm, and (with FT_TEST_CHECK_TREE=1,
as `make test` sets) no new file in the tree: the run fails and says what it found. Processes are recognised by a variable that every
child inherits, so one that changed its session or its parent is found as well; what is found is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

TREE = Path(__file__).resolve().parent.parent
SERIAL_FOLDERS = {"bench", "e2e", "examples", "integration", "multinode", "nvrx", "process", "selftest", "shell", "wrong_numbers"}
IGNORED = {
    ".git", ".venv", ".cache", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".import_linter_cache", ".hypothesis", "__pycache__", "build", "dist", ".demo",
}  # fmt: skip
MARK = "FT_TEST_SESSION"
GRACE_S = 10.0
"""How long what is on its way out may take, before it counts as left behind."""

_before = pytest.StashKey[dict[str, set[str]]]()
_left = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    _become_subreaper()
    _hear_signals()
    for marker in (
        "serial: starts processes, sends signals or measures; run one by one",
        "alone: may kill everything below its own process, as an agent does: never beside tests that keep a server",
        "soak: takes minutes",
        "gpu: needs a GPU",
    ):
        config.addinivalue_line("markers", marker)
    if not _is_worker(config):
        os.environ[MARK] = f"{os.getpid()}.{time.time_ns()}"
        config.stash[_before] = _files()


def _hear_signals() -> None:
    """Whoever starts the tests with `&` or nohup has them ignore SIGINT or SIGHUP, and with them every process that a test sends one to."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in SERIAL_FOLDERS:
            item.add_marker("serial")
            if item.path.relative_to(here).parts[0] == "process":
                item.add_marker("alone")
        if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Last of all, when xdist has ended its workers; each worker looks below itself."""
    if _is_worker(session.config):
        _worker_left(session.config)
        return
    deadline = time.monotonic() + GRACE_S
    while (left := _left_behind(session.config)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left += _worker_said
    if left:
        session.config.stash[_left] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for pid in _marked():
            _kill(pid)


def _worker_left(config: pytest.Config) -> None:
    """A worker tells the main process what its tests left, and kills it."""
    deadline = time.monotonic() + GRACE_S
    while (left := _below_worker()) and time.monotonic() < deadline:
        time.sleep(0.1)
    config.workeroutput["left"] = [f"process {pid}: {_cmdline(pid)}" for pid in left]  # type: ignore[attr-defined]
    for pid in left:
        _kill(pid)


def _below_worker() -> list[int]:
    return [p.pid for p in psutil.Process().children(recursive=True) if not _is_zombie(p.pid) and not _is_pytests_own(p.pid)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist: a worker has ended."""
    _worker_said.extend(getattr(node, "workeroutput", {}).get("left", []))


_worker_said: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_left, []):
        terminalreporter.write_line(f"LEFT BEHIND by the tests: {line}", red=True)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _left_behind(config: pytest.Config) -> list[str]:
    before, now = config.stash[_before], _files()
    files = [name for kind in now for name in sorted(now[kind] - before[kind])]
    return [f"process {pid}: {_cmdline(pid)}" for pid in _marked()] + [f"file {name}" for name in files if not _used_by_others(name)]


def _files() -> dict[str, set[str]]:
    """What a test could leave: shared memory, and files of the tree where the tree is the tests' alone."""
    shm = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if Path("/dev/shm").is_dir() else set()
    return {"shm": shm, "tree": _tree() if os.environ.get("FT_TEST_CHECK_TREE") == "1" else set()}


def _tree() -> set[str]:
    found: set[str] = set()
    for folder, folders, names in os.walk(TREE):
        folders[:] = [name for name in folders if name not in IGNORED and not name.endswith(".egg-info")]
        found.update(os.path.join(folder, name) for name in names)
    return found


def _become_subreaper() -> None:
    """Whatever the tests leave behind becomes a child of this process: a changed title hides the inherited variable, not the parent."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _marked() -> list[int]:
    """Living processes that the tests left: below this process, or with this session's mark; but for the helper that multiprocessing keeps for pytest itself."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    below = {p.pid for p in psutil.Process().children(recursive=True)}
    return [
        pid
        for pid in _pids()
        if (pid in below or mark in _read(pid, "environ").split(b"\0")) and not _is_zombie(pid) and not _is_pytests_own(pid)
    ]


def _is_zombie(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return not fields or fields[0] in (b"Z", b"X")


def _is_pytests_own(pid: int) -> bool:
    return _parent(pid) == os.getpid() and "multiprocessing" in _cmdline(pid)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _cmdline(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _used_by_others(name: str) -> bool:
    """Whether a new /dev/shm file belongs to a living process that the tests did not start: somebody else's on the same machine."""
    if not name.startswith("/dev/shm/"):
        return False
    marked = set(_marked())
    return any(name.encode() in _read(pid, "maps") for pid in _pids() if pid not in marked)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
