"""The first moments of a rank's process: from "a copy of the zygote" to "a program that the agent has started".

`become_rank` runs in the forked child once the zygote's stack is unwound, and leaves nothing of the zygote behind: own session, death with the zygote, own
descriptors, signals, limits, environment, seeds, title; then the section page is claimed. With `spawn` the same is done up to the exec of a fresh
interpreter, which keeps pid, death signal and descriptors. Everything here is on the path of every restart: no import that the zygote could have done, no
listing that can be avoided. It knows a rank's specification and process attributes; it must never know cycles, policies or the agent.
"""

from __future__ import annotations

import faulthandler  # noqa: F401  imported once here, used by monitors.hooks in every rank
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import setproctitle

from ft_launcher.core.command import Command
from ft_launcher.shell import baseline, linux, rank_output
from ft_launcher.shell.baseline import Baseline
from ft_launcher.shell.process_events import START_FAILED, RankSpec
from monitors import client, layout, rank_page
from rerun import megatron_hook

PAGE, STACKS = layout.ENV_PAGE, layout.ENV_STACKS_FD
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_TITLE_BYTES = 240


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the zygote knows and each of its ranks needs."""

    command: Command
    zygote_pid: int
    start: Baseline
    flags: tuple[str, ...] = ()
    imported_fds: frozenset[int] = frozenset()
    blas_threads: Callable[[], None] | None = None
    abandon: Callable[[], None] | None = None


def become_rank(spec: RankSpec, around: Surroundings) -> None:
    """Turns this forked child into the rank: afterwards only the user's code is missing. Never returns when that fails: exit status 71."""
    try:
        env = _isolate(spec, around)
        baseline.replace_environment(env)
        time.tzset()
        _restore_interpreter(spec, around)
        if spec.page_fd is not None:
            client.install_hooks()
            megatron_hook.install()
    except Exception as error:  # noqa: BLE001  whatever it is, this child must not go on as a second zygote
        _give_up(spec, error)


def exec_rank(spec: RankSpec, around: Surroundings) -> NoReturn:
    """Turns this forked child into the rank by exec of a fresh interpreter. Exit status 71 when that fails."""
    try:
        env = _isolate(spec, around)
        baseline.default_signals()
        os.execve(sys.executable, [sys.executable, *around.flags, *around.command.argv], env)
    except Exception as error:  # noqa: BLE001  as above
        _give_up(spec, error)


def _isolate(spec: RankSpec, around: Surroundings) -> dict[str, str]:
    """All that both start methods share; returns the rank's environment."""
    if not linux.die_with_parent(signal.SIGKILL, around.zygote_pid):
        os._exit(START_FAILED)
    os.setsid()
    if around.abandon is not None:
        around.abandon()
    _open_standard(spec.log_path)
    passed = _passed_descriptors(spec)
    baseline.keep_only(passed.values(), around.imported_fds)
    around.start.restore()
    overrides: dict[str, str | None] = dict(spec.env)
    if PAGE in passed:
        rank_page.claim(passed[PAGE])
        overrides[PAGE] = f"{layout.FD_PREFIX}{passed[PAGE]}"
    if STACKS in passed:
        overrides[STACKS] = str(passed[STACKS])
    return baseline.merged(around.start.env, overrides)


def _passed_descriptors(spec: RankSpec) -> dict[str, int]:
    """Environment variable -> descriptor, inheritable and with a high number."""
    passed = {}
    if spec.page_fd is not None:
        passed[PAGE] = baseline.move_high(spec.page_fd)
    if spec.stacks_path is not None:
        passed[STACKS] = baseline.move_high(os.open(spec.stacks_path, _APPEND, 0o644))
    return passed


def _open_standard(log_path: str) -> None:
    try:
        log = os.open(log_path, _APPEND, 0o644)
    except FileNotFoundError:  # the first rank of a cycle makes its folder: storage is the ranks' to wait for, never the agent's
        os.makedirs(os.path.dirname(log_path), exist_ok=True)
        log = os.open(log_path, _APPEND, 0o644)
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)


def _restore_interpreter(spec: RankSpec, around: Surroundings) -> None:
    command = around.command
    sys.orig_argv[:] = [sys.executable, *around.flags, *command.argv]
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=False)  # as for a file, whatever the zygote's own output is
    rank_output.begin_log()
    _own_seeds()
    if around.blas_threads is not None:
        around.blas_threads()
    _own_thread_count()
    mark = f" [rank {spec.rank}]"
    title = " ".join((sys.executable, *around.flags, *command.argv)).encode(errors="replace")[: _TITLE_BYTES - len(mark)]
    setproctitle.setproctitle(title.decode(errors="ignore") + mark)


def _own_seeds() -> None:
    """Whatever a fresh process draws from the system at start or import: without this all ranks would share it. (random, uuid, ssl, tempfile see to themselves.)"""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        logging._startTime = time.time()


def _own_thread_count() -> None:
    """OMP_NUM_THREADS was read when torch was loaded. A value that only this rank has is applied to torch, which can still take it."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch: Any = sys.modules.get("torch")
    if torch is not None and wanted.isdigit() and int(wanted) > 0 and torch.get_num_threads() != int(wanted):
        torch.set_num_threads(int(wanted))


def _give_up(spec: RankSpec, error: Exception) -> NoReturn:
    try:
        text = f"ft-launch: rank {spec.rank} could not be started: {type(error).__name__}: {error}\n"
        os.write(2, text.encode(errors="replace"))
    finally:
        os._exit(START_FAILED)
