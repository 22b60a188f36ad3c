"""What Slurm shall do with a job that has ended: the rule, without Slurm.

Requeue on 16 (run me again on other hardware) and 75 (not enough healthy nodes), on nothing else: 93 and 17 would end the same way again,
and the script's own code is its own business. On 16 the machine that the verdict names is excluded; machines that a verdict lists under
`exclude` are excluded on both. Exclusions accumulate, requeues are bounded.

The code that counts is the verdict's. `srun` reports the highest code of its tasks, and an agent whose node was lost has one too, although
the job may have ended well without it. A verdict counts only if this launch wrote it: the caller says which generation was there before.

Knows verdicts and the file of past requeues; runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher.state.run_folder import folder_name, generations

ELSEWHERE, NOT_ENOUGH_NODES = 16, 75
REQUEUED = (ELSEWHERE, NOT_ENOUGH_NODES)
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a launch ended: `code` is the job's, `reason` one sentence, `named` the machines that the verdict says to avoid."""

    code: int
    reason: str
    named: tuple[str, ...] = ()
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Requeue:
    """One requeue that was asked for: a line of the file of past ones."""

    code: int
    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """What to do now: requeue or not, whom to exclude (all of them, earlier ones too), and why, for a person."""

    requeue: bool
    exclude: tuple[str, ...]
    why: str


def newest_generation(log_dir: Path, run_id: str) -> int:
    """The highest generation that has a folder, -1 where there is none. Raises OSError where the log-dir cannot be read."""
    return max(generations(log_dir, run_id), default=-1)


def ending(log_dir: Path, run_id: str, newer_than: int, srun_code: int) -> Ending:
    """How the launch ended: by its verdict, or, where it wrote none, by the code of srun alone."""
    newest = newest_generation(log_dir, run_id)
    if newest > newer_than:
        verdict = _read(log_dir / folder_name(run_id, newest) / "verdict.json")
        if isinstance(verdict.get("exit_code"), int):
            code = int(verdict["exit_code"])
            return Ending(code, str(verdict.get("reason", "")), tuple(_named(verdict, code)), newest)
    return Ending(srun_code, "this launch left no verdict.json")


def decide(end: Ending, past: Sequence[Requeue], allocated: Iterable[str], most: int) -> Order:
    """The order for Slurm. `allocated` are the job's nodes by Slurm's names: a machine that is not among them cannot be excluded by name."""
    if end.code == 0:
        return Order(False, (), "the job is done")
    if end.code not in REQUEUED:
        return Order(False, (), f"exit code {end.code} is not requeued ({end.reason})")
    if len(past) >= most:
        return Order(
            False, (), f"exit code {end.code}, but the job has been requeued {len(past)} times, the most that was allowed ({end.reason})"
        )
    known = set(allocated)
    earlier = dict.fromkeys(name for requeue in past for name in requeue.exclude)
    exclude = tuple(dict.fromkeys([*earlier, *(name for name in end.named if name in known)]))
    strange = [name for name in end.named if name not in known and name not in earlier]
    why = f"exit code {end.code}: requeue {len(past) + 1} of at most {most} ({end.reason})"
    if strange:
        why += f'; not excluded, for the job has no node of that name: {", ".join(strange)} (--node-id "$SLURMD_NODENAME" makes the names Slurm\'s)'
    return Order(True, exclude, why)


def read_past(path: Path) -> list[Requeue]:
    """Requeues asked for before; damaged lines are passed over. Raises OSError where an existing file cannot be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            doc = json.loads(line)
            found.append(Requeue(int(doc["code"]), tuple(name for name in doc["exclude"] if _is_node(name))))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def remember(path: Path, requeue: Requeue) -> None:
    """Appends one line. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"code": requeue.code, "exclude": list(requeue.exclude)}) + "\n")


def past_file(log_dir: Path, run_id: str) -> Path:
    """Where a run's requeues are kept, beside its folders."""
    return log_dir / f"slurm_requeues.{run_id}.jsonl"


def _read(path: Path) -> dict[str, Any]:
    try:
        doc = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return doc if isinstance(doc, dict) else {}


def _named(verdict: dict[str, Any], code: int) -> Iterable[str]:
    """`exclude: [{"node": ..., "slot": ..., "device": ..., "why": ...}]` where there is one; on 16 the node of the first cause too."""
    listed = verdict.get("exclude")
    names: list[Any] = [entry.get("node") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    cause = verdict.get("first_cause")
    if code == ELSEWHERE and isinstance(cause, dict):
        names.append(cause.get("node"))
    return dict.fromkeys(name for name in names if _is_node(name))


def _is_node(name: Any) -> bool:
    return isinstance(name, str) and _NODE.fullmatch(name) is not None
