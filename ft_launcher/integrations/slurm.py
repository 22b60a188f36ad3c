"""Slurm, from inside the batch script: `python -m ft_launcher.integrations.slurm after-run ...` and what it needs.

    before=$(python -m ft_launcher.integrations.slurm generation --log-dir DIR)
    srun --no-kill --kill-on-bad-exit=0 --wait=0 ... ft-launch ... ; code=$?
    exec python -m ft_launcher.integrations.slurm after-run --code "$code" --newer-than "$before" --log-dir DIR

`after-run` reads the verdict, applies the rule of `slurm_rule`, calls `scontrol` and ends with the job's own exit code. Slurm changes the
list of excluded nodes of a *pending* job only, so the order is: requeue and hold, exclude, release. Slurm ends the batch script with TERM
as soon as the job is requeued, and with KILL after KillWait (30 s by default); the TERM is ignored here, for a job that nobody releases would
wait for ever. What went wrong on the way is said in one line, and then the job is released all the same: a requeue without an exclusion is
bounded, a forgotten job is not.

Knows scontrol's words and the variables that Slurm gives to a batch script. Never imports torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from ft_launcher.errors import ConfigError, PlatformError
from ft_launcher.integrations import slurm_rule
from ft_launcher.integrations.slurm_rule import Ending, Order, Requeue
from ft_launcher.state.names import checked_run_id

MOST_REQUEUES = 5
_ASK_S = 60.0
"""How long one scontrol may take, in seconds: the controller may be busy, the batch script has KillWait left."""
_EXCLUDED = re.compile(r"\bExcNodeList=(\S+)")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The command; ends the process with the job's exit code (`after-run`), or with 2 after one line for a wrong call."""
    try:
        code = _commands().main(args, prog_name="python -m ft_launcher.integrations.slurm", standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except (click.ClickException, ConfigError) as error:
        say(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}")
        code = 2
    sys.exit(code)


def say(text: str) -> None:
    """One line for the job's output."""
    click.echo(f"ft-launch (slurm): {text}", err=True)


def generation(log_dir: Path, run_id: str) -> int:
    """`generation`: prints the newest generation of the run, -1 where there is none."""
    try:
        click.echo(slurm_rule.newest_generation(log_dir, run_id))
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir}: cannot be read ({error.strerror})") from None
    return 0


def after_run(log_dir: Path, run_id: str, code: int, newer_than: int, most: int) -> int:
    """`after-run`: decides and tells Slurm; the job's exit code."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError("after-run: SLURM_JOB_ID is not set; this belongs into a job script of Slurm, behind its srun")
    end = _ending(log_dir, run_id, newer_than, code)
    if end.code not in slurm_rule.REQUEUED:
        say(slurm_rule.decide(end, (), (), most).why)
        return end.code
    past_file = slurm_rule.past_file(log_dir, run_id)
    past = _past(past_file)
    order = slurm_rule.decide(end, past, _names(os.environ.get("SLURM_JOB_NODELIST", "")), most)
    say(order.why)
    if order.requeue and _remember(past_file, Requeue(end.code, order.exclude), most):
        _carry_out(order, job)
    return end.code


def _ending(log_dir: Path, run_id: str, newer_than: int, code: int) -> Ending:
    try:
        return slurm_rule.ending(log_dir, run_id, newer_than, code)
    except OSError as error:
        return Ending(code, f"--log-dir {log_dir} cannot be read: {error.strerror}")


def _past(path: Path) -> list[Requeue]:
    """Where the file cannot be read, Slurm's own count of starts still bounds the loop."""
    try:
        return slurm_rule.read_past(path)
    except OSError as error:
        say(f"{path} cannot be read ({error.strerror}): Slurm's own count of starts is taken instead")
        return [Requeue(0, ())] * _restarts()


def _remember(path: Path, requeue: Requeue, most: int) -> bool:
    """Whether the requeue may be carried out: it is written down, or Slurm's own count of starts bounds it."""
    try:
        slurm_rule.remember(path, requeue)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}): Slurm's own count of starts, {_restarts()}, is taken instead")
        return _restarts() < most
    return True


def _restarts() -> int:
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def _carry_out(order: Order, job: str) -> None:
    """Requeues, with the exclusions where there are any."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        before = _excluded(job) if order.exclude else ""
        known = _names(before)
        missing = [name for name in order.exclude if name not in known]
        scontrol("requeuehold" if missing else "requeue", job)
    except PlatformError as error:
        say(f"the job is not requeued: {error}")
        return
    if missing:
        _exclude_and_release(job, ",".join(filter(None, [before, *missing])))


def _exclude_and_release(job: str, names: str) -> None:
    try:
        scontrol("update", f"JobId={job}", f"ExcNodeList={names}")
        say(f"excluded from now on: {names}")
    except PlatformError as error:
        say(f"nothing is excluded: {error}")
    try:
        scontrol("release", job)
    except PlatformError as error:
        say(f"the job stays held: {error}; release it with: scontrol release {job}")


def _excluded(job: str) -> str:
    """What the job excludes already, in Slurm's own notation (`n[1-3],n7`). Raises PlatformError: a new list would replace one that is not known."""
    found = _EXCLUDED.search(scontrol("--oneliner", "show", "job", job))
    return "" if found is None or found[1] == "(null)" else found[1]


def _names(listed: str) -> list[str]:
    """The nodes that Slurm's notation means; none where that cannot be asked."""
    try:
        return scontrol("show", "hostnames", listed).split() if listed else []
    except PlatformError:
        return []


def scontrol(*words: str) -> str:
    """One call; its output. Raises PlatformError with what Slurm said."""
    what = "scontrol " + " ".join(words)
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except OSError as error:
        raise PlatformError(f"{what}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PlatformError(f"{what}: no answer within {_ASK_S:g} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PlatformError(f"{what}: {said}")
    return done.stdout


def _commands() -> click.Group:
    where = [
        click.Option(["--log-dir"], type=click.Path(path_type=Path), required=True, help="ft-launch's --log-dir."),
        click.Option(
            ["--run-id"],
            envvar=["FT_RUN_ID", "SLURM_JOB_ID"],
            required=True,
            callback=_run_id,
            help="ft-launch's --run-id (default: SLURM_JOB_ID).",
        ),
    ]
    before = click.Command(
        "generation", callback=generation, params=list(where), help="Print the newest generation of the run, -1 for none."
    )
    after = click.Command(
        "after-run",
        callback=after_run,
        params=[
            *where,
            click.Option(["--code"], type=int, required=True, help="srun's exit code."),
            click.Option(["--newer-than"], type=int, required=True, help="What `generation` printed before srun."),
            click.Option(
                ["--max-requeues", "most"], type=click.IntRange(0), default=MOST_REQUEUES, show_default=True, help="Requeues of one job."
            ),
        ],
        help="Requeue the job on 16 and 75, exclude the named machine on 16, end with the job's exit code.",
    )
    return click.Group("slurm", commands=[before, after], help="What a Slurm batch script asks before and after ft-launch.")


def _run_id(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return checked_run_id(value)


if __name__ == "__main__":
    main()
