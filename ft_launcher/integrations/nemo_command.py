"""From what NeMo-Run would start to what `ft-launch` shall start: pure text, no NeMo-Run.

NeMo-Run's unit is a command, `[interpreter, script, arguments]` or `[interpreter, -m, module, arguments]`; ours becomes
`[interpreter, -m, ft_launcher, options, script, arguments]`, so that the launcher runs in the very environment that the recipe chose and
nothing has to be on PATH. Only Python can be started, so a shell script is refused with what to do instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from ft_launcher.errors import ConfigError

MODULE = "ft_launcher"
_RUN_ID_CHARS = 120
_ON_EACH_NODE = """\
if [ "${SLURM_STEP_NUM_TASKS:-1}" != "${SLURM_STEP_NUM_NODES:-1}" ]; then
    echo "ft-launch: error: one task a node is needed (ntasks_per_node=1): this step has ${SLURM_STEP_NUM_TASKS} tasks on ${SLURM_STEP_NUM_NODES} nodes" >&2
    exit 2
fi
if [ -n "${SLURMD_NODENAME:-}" ]; then export FT_NODE_ID="${FT_NODE_ID:-$SLURMD_NODENAME}"; fi
"""


def interpreter_words(entrypoint: str, what: str) -> list[str]:
    """The words that start Python: `python3`, `uv run python`. Raises ConfigError where `entrypoint` starts something else."""
    try:
        words = shlex.split(entrypoint)
    except ValueError:
        words = []
    if not words or not PurePosixPath(words[-1]).name.startswith("python"):
        raise ConfigError(
            f"ft-launch starts Python scripts, but {what} has the entrypoint {entrypoint!r}: say entrypoint='python' for a Python script;"
            " a shell script may call ft-launch itself"
        )
    return words


def launch_words(flags: Sequence[str], target: Sequence[str]) -> list[str]:
    """What stands behind the interpreter: `target` is `[-m] script arguments`."""
    return ["-m", MODULE, *flags, *target]


def slurm_script(flags: Sequence[str], command: Sequence[str]) -> str:
    """The shell script that each node of a Slurm step runs: `command` as NeMo-Run made it, under ft-launch. Raises ConfigError."""
    python = interpreter_words(command[0], "this task")
    launch = shlex.join([*python, *launch_words(flags, command[1:])])
    return f"{_ON_EACH_NODE}exec {launch}\n"


def run_id_of(*names: str) -> str | None:
    """Names of experiment and task as one run id: what a run id cannot hold becomes `-`."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(name for name in names if name))[-_RUN_ID_CHARS:].lstrip("._-")
    return text or None


def requeue_lines(python: str, log_dir: str, run_id: str | None, most: int) -> str:
    """Lines of the batch script, before its srun: requeue on 16 and 75 alone, the named machine excluded on 16 (`integrations.slurm`)."""
    module = f"{python} -m ft_launcher.integrations.slurm"
    run = shlex.quote(run_id) if run_id else '"$SLURM_JOB_ID"'
    where = f"--log-dir {shlex.quote(log_dir)} --run-id {run}"
    return (
        f'ft_before="$({module} generation {where})"\n'
        "ft_after_run() {\n"
        f'    {module} after-run --code "$1" --newer-than "${{ft_before:--1}}" --max-requeues {most} {where}\n'
        "    exit $?\n"
        "}\n"
        "trap 'ft_after_run \"$?\"' EXIT\n"
    )
