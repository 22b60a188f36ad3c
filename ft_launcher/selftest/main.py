"""Runs the job, reads its journal, prints the table. Knows what each fault should lead to; a different decision fails the selftest (exit 1)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ft_launcher.config import SelftestOptions
from ft_launcher.errors import PlatformError
from ft_launcher.printing import out
from ft_launcher.shell.journal import read_run

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 180.0
HANG_S = 1.0
RANKS = 4


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to try: what the worker does, on which rank, and what the launcher is expected to call it and to decide."""

    do: str
    rank: int
    cause: str
    decision: str = "restart"


FAULTS = (
    Fault("SIGKILL", 1, "crash"),
    Fault("exception", 2, "crash"),
    Fault("SIGSEGV", 0, "crash"),
    Fault("exit code 3", 3, "crash"),
    Fault("strays", 1, "crash"),
    Fault("hang", 2, "hang"),
    Fault("SIGSTOP", 0, "hang"),
    Fault("wrong number once", 3, "transient fault"),
    Fault("wrong number again", 1, "rerun"),
    Fault("zygote killed", 3, "platform"),
    Fault("zygote stopped", 1, "platform"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; seconds are None where nothing was to be measured. A hang is detected `HANG_S` after it began at the earliest."""

    fault: str
    rank: int | None
    decided: str
    detect_s: float | None
    recover_s: float | None
    passed: bool
    reason: str


def run(options: SelftestOptions) -> int:
    """Print the table (or JSON); 0 when everything was decided as it should be, else 1. Raises PlatformError when the job itself cannot be run."""
    with tempfile.TemporaryDirectory(prefix="ft-selftest-") as name:
        rows = [*_restarts(Path(name)), _drain(Path(name)), _agent_killed(Path(name))]
    failed = [row for row in rows if not row.passed]
    if options.json:
        out(json.dumps({"rows": [asdict(row) for row in rows], "failed": len(failed)}))
    else:
        _print_table(rows)
    return 1 if failed else 0


def _command(folder: Path, *options: str) -> list[str]:
    files = ["--log-dir", str(folder / "logs"), "--tee", "none", "--run-id", "selftest", "--preload", "json"]
    limits = ["--timeouts", f"setup=60,step={HANG_S:g}", "--out-of-section", "60"]
    return [
        sys.executable,
        "-m",
        "ft_launcher",
        "--nproc-per-node",
        str(RANKS),
        "--tp",
        "2",
        *files,
        *limits,
        *options,
        str(WORKER),
        str(folder),
    ]


def _environment() -> dict[str, str]:
    """The user's, without what would configure the launcher."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("FT_", "SLURM_"))}


def _plan(folder: Path, faults: Sequence[Fault]) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({str(cycle): {"rank": f.rank, "do": f.do} for cycle, f in enumerate(faults)}))
    return folder


def _restarts(parent: Path) -> list[Row]:
    """All faults that end in a restart, one a cycle, in one job."""
    folder = _plan(parent / "faults", FAULTS)
    with (folder / "said.txt").open("wb") as said:
        command = _command(folder, "--max-restarts", "100", "--no-progress-cycles", "100")
        try:
            code = subprocess.run(
                command, env=_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise PlatformError(f"selftest: the job did not end within {LIMIT_S:g} s; its output: {_tail(folder)}") from None
    found = list((folder / "logs").glob("selftest.*"))
    if not found:
        raise PlatformError(f"selftest: the job could not be started (exit {code}): {_tail(folder)}")
    entries = [entry.data for entry in read_run(found[0]).entries]
    rows = [_row(folder, entries, cycle, fault) for cycle, fault in enumerate(FAULTS)]
    finished = Row("(then it finishes)", None, f"exit {code}", None, None, code == 0, _tail(folder) if code else "all ranks finished")
    return [*rows, finished]


def _tail(folder: Path) -> str:
    return " | ".join((folder / "said.txt").read_text(errors="replace").splitlines()[-3:])


def _row(folder: Path, entries: Sequence[dict[str, Any]], cycle: int, fault: Fault) -> Row:
    try:
        at_ns = int((folder / f"fault.{cycle}").read_text())
    except (OSError, ValueError):
        return Row(fault.do, fault.rank, "never reached", None, None, False, "the job ended before this fault")
    ended = next((e for e in entries if e["kind"] == "job" and e["cycle"] == cycle and e["job"]["phase"] == "ending"), None)
    decision = next((e for e in entries if e["kind"] == "decision" and e["cycle"] == cycle), None)
    back = next((e for e in entries if e["kind"] == "recovered" and e["cycle"] == cycle + 1), None)
    if ended is None or decision is None:
        return Row(fault.do, fault.rank, "not noticed", None, None, False, "no decision in the journal")
    culprit = (decision["culprit"] or {}).get("rank")
    named = culprit == fault.rank or fault.cause == "platform"
    decided = f"{decision['cause']}: {decision['decision']}"
    passed = (decision["cause"], decision["decision"]) == (fault.cause, fault.decision) and named and back is not None
    recover_s = (back["mono_ns"] - at_ns) / 1e9 if back is not None else None
    return Row(fault.do, fault.rank, decided, (ended["mono_ns"] - at_ns) / 1e9, recover_s, passed, decision["reason"])


def _start_and_wait(folder: Path) -> subprocess.Popen[bytes]:
    """A job without faults, once all its ranks make steps."""
    process = subprocess.Popen(
        _command(folder), env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.glob("progress.*"))) < RANKS:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise PlatformError(f"selftest: the job did not start (exit {process.wait()})")
        time.sleep(0.01)
    return process


def _endless(parent: Path, name: str) -> Path:
    """A plan whose fault never comes: the ranks train on."""
    return _plan(parent / name, [Fault("nothing", RANKS, "none")])


def _drain(parent: Path) -> Row:
    """SIGTERM to the launcher: passed on, everything leaves, 143."""
    process = _start_and_wait(_endless(parent, "drain"))
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(LIMIT_S)
    seconds = time.monotonic() - began_s
    return Row(
        "SIGTERM to the launcher",
        None,
        f"drain: exit {code}",
        None,
        seconds,
        code == 143,
        "forwarded to all ranks, which leave; no restart",
    )


def _agent_killed(parent: Path) -> Row:
    """SIGKILL to the launcher: nothing below it survives."""
    process = _start_and_wait(_endless(parent, "killed"))
    below = _descendants(process.pid)
    began_s = time.monotonic()
    process.kill()
    process.wait()
    while (left := [pid for pid in below if _alive(pid)]) and time.monotonic() - began_s < 10:
        time.sleep(0.005)
    reason = f"{len(below)} processes below the launcher ended" if not left else f"still alive: {left}"
    return Row(
        "SIGKILL to the launcher", None, "nothing is left" if not left else "orphans", None, time.monotonic() - began_s, not left, reason
    )


def _descendants(root: int) -> list[int]:
    """Pids below `root`, by /proc; gone ones are skipped."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents[int(name)] = int(fields[1])
    below, known = [], {root}
    while more := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        known.update(more)
        below += more
    return below


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _print_table(rows: Sequence[Row]) -> None:
    head = ("fault", "rank", "decided", "detected", "training again", "")
    lines = [head] + [
        (
            row.fault,
            "-" if row.rank is None else str(row.rank),
            row.decided,
            "-" if row.detect_s is None else f"{row.detect_s:.3f} s",
            "-" if row.recover_s is None else f"{row.recover_s:.3f} s",
            "ok" if row.passed else f"FAILED: {row.reason}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    for line in lines:
        out("  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)).rstrip())
    out(
        f"hangs were given {HANG_S:g} s (--timeouts step={HANG_S:g}); 'training again' counts from the fault to the first step of all ranks"
    )
