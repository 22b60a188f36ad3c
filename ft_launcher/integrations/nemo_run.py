"""NeMo-Run: `FTLaunchPlugin` for every executor, `FTLaunch` for Slurm alone. One line in a recipe.

    from ft_launcher.integrations.nemo_run import FTLaunchPlugin
    run.run(task, executor=executor, plugins=[FTLaunchPlugin(tp=8, pp=4, store="etcd://store-1:2379")])

NeMo-Run knows its own launchers by type, and asks a foreign one (`Launcher.transform`) on one executor only: on SlurmExecutor, and there only
if it is a SlurmTemplate, which is why FTLaunch is one. On every other executor a launcher of ours would be ignored without a word. A plugin
is asked everywhere: it rewrites the script's command (on Slurm it sets FTLaunch, which serves run.Partial as well), and what the executor would
do against us: on Slurm several tasks a node, an srun that ends the job when one agent is lost, a batch script that requeues after any failure.

Both have every option of `ft-launch` as a field (`options.LaunchOptions`) and check them where the recipe is written. Without NeMo-Run this
module can be imported; only using it raises the line that says what to install. Never imports torch.
"""

from __future__ import annotations

import os
import posixpath
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ft_launcher.errors import ConfigError
from ft_launcher.integrations import nemo_command
from ft_launcher.integrations.options import LaunchOptions

INSTALL = "pip install nemo-run==0.11.1 leptonai==0.27.3"
RUNDIR = "/nemo_run"
"""The experiment's folder as NeMo-Run's jobs see it; without a container NeMo-Run puts the real path in its place."""
LOGS = "ft_logs"
SRUN_ARGS = ("--no-kill", "--wait=0", "--kill-on-bad-exit=0")
"""A lost agent or node is the launcher's business. NeMo-Run says --wait=60 --kill-on-bad-exit=1 before; srun takes the last."""

if TYPE_CHECKING:

    class TemplateBase:
        """NeMo-Run's SlurmTemplate."""

    class PluginBase:
        """NeMo-Run's Plugin."""

    _missing: ImportError | None = None
else:
    try:
        from nemo_run import Plugin as PluginBase
        from nemo_run import SlurmTemplate as TemplateBase

        _missing = None
    except ImportError as error:
        TemplateBase = PluginBase = object
        _missing = error


def _need_nemo_run() -> Any:
    """The package, or one line that says what is missing."""
    if _missing is not None:
        raise ConfigError(f"NeMo-Run cannot be imported here ({_missing}): {INSTALL}") from _missing
    import nemo_run

    return nemo_run


@dataclass(kw_only=True)
class FTLaunch(LaunchOptions, TemplateBase):
    """The launcher for SlurmExecutor: `SlurmExecutor(..., ntasks_per_node=1, launcher=FTLaunch(tp=8))`.

    Nodes, run id and order come from Slurm's environment. It only sees the command, not the executor: `ntasks_per_node=1`, the srun arguments
    (`SRUN_ARGS`) and the requeue rule are yours to set; FTLaunchPlugin sets them. Raises ConfigError for a value that ft-launch would refuse.
    """

    def __post_init__(self) -> None:
        _need_nemo_run()
        unused = [name for name in ("template_path", "template_inline", "template_vars") if getattr(self, name, None)]
        if unused:
            raise ConfigError(f"FTLaunch makes its own script: {unused[0]} has no meaning here, leave it out")
        self.check()

    def transform(self, cmd: list[str]) -> Any:
        """NeMo-Run's hook: the script that replaces the command on each node."""
        options = self if self.log_dir is not None else _with(self, log_dir=f"{RUNDIR}/{LOGS}")
        return _need_nemo_run().Script(inline=nemo_command.slurm_script(options.flags(), cmd))


@dataclass(kw_only=True)
class FTLaunchPlugin(LaunchOptions, PluginBase):
    """The plugin for every executor: the task runs under ft-launch instead of torchrun or NVRx's ft_launcher.

    `nnodes` and `nproc_per_node` come from the executor where they are not given, logs go into the experiment's folder. On Slurm the
    executor's `retries` becomes the number of requeues, for exit codes 16 and 75 alone; `host_python` is a Python on the node of the batch
    script (outside any container) that has ft_launcher, needed only when `retries` > 0.
    """

    host_python: str = "python3"

    def __post_init__(self) -> None:
        _need_nemo_run()

    def setup(self, task: Any, executor: Any) -> None:
        """NeMo-Run's hook. Raises ConfigError, one line, for a task or an option that cannot be."""
        run = _need_nemo_run()
        on_slurm, is_local = isinstance(executor, run.SlurmExecutor), isinstance(executor, run.LocalExecutor)
        if on_slurm and executor.run_as_group:
            raise ConfigError("FTLaunchPlugin runs one task in a Slurm job, not a group of them: add each task to the experiment by itself")
        options = self._filled(executor, on_slurm, is_local)
        script_args = task.args if isinstance(task, run.Script) else []
        options.check(script_args, None if on_slurm else {**(os.environ if is_local else {}), **executor.env_vars})
        profile = _freed_of_launchers(executor, run)
        if isinstance(task, run.Script):
            _check_script(task, is_local)
        if on_slurm:
            executor.launcher = FTLaunch(**options.option_values(), **profile)
            self._settle_slurm(executor, options)
        elif isinstance(task, run.Script):
            _retarget(task, options, quoted=not is_local)
            executor.launcher = run.core.execution.launcher.Launcher(**profile)
        else:
            raise ConfigError(
                f"a run.Partial cannot be started by ft-launch with {type(executor).__name__}: NeMo-Run builds its command itself. Give"
                " run.Script(path='train.py', entrypoint='python'), or use SlurmExecutor"
            )

    def _filled(self, executor: Any, on_slurm: bool, is_local: bool) -> LaunchOptions:
        """What the recipe leaves open and the executor knows."""
        known: dict[str, Any] = {"nproc_per_node": executor.nproc_per_node(), "nnodes": executor.nnodes()}
        if on_slurm:
            known["log_dir"] = f"{RUNDIR}/{LOGS}"
        else:
            task = posixpath.basename(executor.job_dir.rstrip("/"))
            known["run_id"] = nemo_command.run_id_of(executor.experiment_id or "", task)
            known["log_dir"] = posixpath.join(executor.job_dir or ".", LOGS) if is_local else f"{RUNDIR}/{LOGS}"
        return LaunchOptions(**{**{name: value for name, value in known.items() if value is not None}, **self.option_values()})

    def _settle_slurm(self, executor: Any, options: LaunchOptions) -> None:
        executor.srun_args = [*(arg for arg in executor.srun_args or [] if arg not in SRUN_ARGS), *SRUN_ARGS]
        executor.ntasks_per_node = 1
        executor.torchrun_nproc_per_node = executor.torchrun_nproc_per_node or _count(options.nproc_per_node)
        if executor.retries:
            lines = nemo_command.requeue_lines(self.host_python, _host_logs(executor, options), options.run_id, executor.retries)
            executor.setup_lines = "\n".join(text for text in (executor.setup_lines, lines) if text)
            executor.retries = 0


def _check_script(task: Any, is_local: bool) -> None:
    if task.inline:
        raise ConfigError(
            "an inline script is a shell script: write ft-launch into it, or give run.Script(path='train.py', entrypoint='python')"
        )
    python = nemo_command.interpreter_words(task.entrypoint, f"run.Script({task.path!r})")
    if is_local and len(python) > 1:
        raise ConfigError(f"LocalExecutor starts one program, not {task.entrypoint!r}: give entrypoint as one word")


def _retarget(task: Any, options: LaunchOptions, quoted: bool) -> None:
    """The script becomes `python -m ft_launcher OPTIONS script arguments`, in place.

    The local executor starts these words as they are; of all others NeMo-Run makes a line of shell, and its own launchers quote each word.
    """
    _, _, *words = nemo_command.launch_words(options.flags(), [*(["-m"] if task.m else []), task.path, *task.args])
    task.path, task.m, task.args = nemo_command.MODULE, True, [shlex.quote(word) for word in words] if quoted else words


def _freed_of_launchers(executor: Any, run: Any) -> dict[str, Any]:
    """Makes sure that no launcher is put around ours. What any launcher can ask for, profiling with nsys, is returned."""
    launcher = executor.launcher
    kind = run.core.execution.launcher.LAUNCHER_MAP.get(launcher) if isinstance(launcher, str) else type(launcher)
    if kind is not None and issubclass(kind, run.SlurmTemplate) and not issubclass(kind, FTLaunch):
        raise ConfigError(f"{kind.__name__} starts the task in its own way and cannot be used together with FTLaunchPlugin: choose one")
    names = [field.name for field in fields(launcher) if field.name.startswith("nsys_")] if hasattr(launcher, "nsys_profile") else []
    return {name: getattr(launcher, name) for name in names}


def _with(options: LaunchOptions, **more: Any) -> LaunchOptions:
    return LaunchOptions(**{**options.option_values(), **more})


def _count(value: int | str | None) -> int | None:
    return int(value) if value is not None and str(value).isdigit() else None


def _host_logs(executor: Any, options: LaunchOptions) -> str:
    """Where the batch script, outside any container, finds what the agents write."""
    inside = f"{RUNDIR}/"
    if options.log_dir is None or not options.log_dir.startswith(inside):
        return options.log_dir or LOGS
    folder = posixpath.join(executor.tunnel.job_dir, posixpath.basename(executor.job_dir.rstrip("/")))
    return posixpath.join(folder, options.log_dir.removeprefix(inside))
