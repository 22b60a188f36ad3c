"""Asks nvidia-resiliency-ext's own checks whether this node's GPUs and network cards are healthy, in a process of its own.

Runs only where there is an NVIDIA driver and the package: its GPU check reads what recovery the driver asks for (after an XID), its NIC check compares each card's counter of lost links
with the one before, which is why this process stays. Each line on standard input is one round of checks; the answer is one line of JSON, `{"failed": sentence or null}`. A check that
the installed version has not, or that refuses to start, is left out: it says nothing about the node.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ft_launcher.shell import linux

PACKAGE = "nvidia_resiliency_ext.shared_utils.health_check"


class _Heard(logging.Handler):
    """What the package logs while it checks: its only words for a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().strip().splitlines()[0] if record.getMessage().strip() else "")


Check = tuple[str, Callable[[], object]]


def main(arguments: Sequence[str]) -> None:
    """`arguments`: how many GPUs ranks of this node use."""
    linux.die_with_parent(signal.SIGKILL, os.getppid())
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the package prints is not an answer
    checks = available(int(arguments[0]))
    for _ in sys.stdin:
        answers.write(json.dumps({"failed": failed(checks, heard)}) + "\n")
        answers.flush()


def available(gpus: int) -> list[Check]:
    """The checks that this version of the package has and that can be set up."""
    try:
        package = importlib.import_module(PACKAGE)
    except Exception:  # noqa: BLE001 - a package that cannot be imported says nothing about the node
        return []
    found: list[Check] = []
    _add(found, "GPU check", lambda: package.GPUHealthCheck())
    for index in range(gpus):
        _add(found, f"network card of GPU {index}", functools.partial(_nic, package, index))
    return found


def _add(found: list[Check], name: str, make: Callable[[], Callable[[], object]]) -> None:
    try:
        found.append((name, make()))
    except Exception:  # noqa: BLE001 - not in this version, or not on this machine
        return


def _nic(package: Any, gpu: int) -> Callable[[], object]:
    check: Any = package.NicHealthCheck()
    check.set_nic_device(local_rank=gpu)
    if check.nic_name is None:
        raise LookupError(f"no network card is near GPU {gpu}")
    return check  # type: ignore[no-any-return]


def failed(checks: Sequence[Check], heard: _Heard) -> str | None:
    """The first failure as one sentence; None when all pass. A check that raises has failed to check, no more."""
    for name, check in checks:
        heard.lines.clear()
        try:
            passed = check()
        except Exception:  # noqa: BLE001 - see above
            continue
        if passed is False:
            return f"{name}: {heard.lines[-1] if heard.lines else 'failed without a word'}"
    return None
