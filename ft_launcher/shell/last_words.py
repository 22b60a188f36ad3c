"""What a failed rank said of itself, read from its files: torch.distributed.elastic's error file, else the last lines of its log.

Runs on a thread of its own (storage is never in the loop). It interprets as little as it can: the first line that looks like an exception's, else the last one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ft_launcher.core.evidence import RankError
from ft_launcher.shell.logs import last_lines

MAX_TEXT = 4000
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Group)\b.*$|^[\w./-]+: error: .*$|.*can't open file .*")
_TRACEBACK = "Traceback (most recent call last):"


def read_error(error_file: Path, log: Path) -> RankError | None:
    """The rank's own account, None where it left none. Never raises: an unreadable file is no account."""
    return _from_error_file(error_file) or _from_log(log)


def _from_error_file(path: Path) -> RankError | None:
    """`{"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}` as @record writes it; a plain string message is accepted too."""
    try:
        told = json.loads(path.read_text(errors="replace"))["message"]
        if isinstance(told, str):
            return RankError(told[:MAX_TEXT])
        return RankError(str(told["message"])[:MAX_TEXT], str(told.get("extraInfo", {}).get("py_callstack", ""))[-MAX_TEXT:])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _from_log(path: Path) -> RankError | None:
    try:
        lines = [line.rstrip() for line in last_lines(path, 60)]
    except OSError:
        return None
    lines = [line for line in lines if line]
    if not lines:
        return None
    message = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    trace = "\n".join(lines[starts[-1] :])[-MAX_TEXT:] if starts else ""
    return RankError(message[:MAX_TEXT], trace)
