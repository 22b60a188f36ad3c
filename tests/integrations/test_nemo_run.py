"""Launcher and plugin for NeMo-Run: by the stand-in always, by the real package too where it is installed."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ft_launcher.errors import ConfigError
from ft_launcher.integrations.nemo_command import requeue_lines, run_id_of, slurm_script
from ft_launcher.integrations.options import LaunchOptions
from tests.integrations.nemo import OURS, STANDINS, is_real, ours

RECORDED = Path(__file__).resolve().parent / "recorded"


@pytest.fixture(params=["stand-in", "real"])
def nemo(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleType, ModuleType]]:
    if request.param == "real" and not is_real():
        pytest.skip("nemo_run is not installed")
    with ours(real=request.param == "real") as modules:
        yield modules


Nemo = tuple[Any, Any]


def local(run: Any, tmp_path: Path, **given: Any) -> Any:
    executor = run.LocalExecutor(**given)
    executor.experiment_id, executor.job_dir = "exp_17", str(tmp_path / "exp_17" / "train")
    return executor


def on_slurm(run: Any, tmp_path: Path, **given: Any) -> Any:
    executor = run.SlurmExecutor(**{"account": "me", "nodes": 2, "ntasks_per_node": 8, **given})
    executor.job_dir = str(tmp_path / "here" / "train")
    executor.tunnel.job_dir = "/cluster/exp 17"
    return executor


def script(run: Any, **given: Any) -> Any:
    return run.Script(**{"path": "train.py", "args": ["--lr", "1e-3", "two words"], "entrypoint": "python", **given})


def partial_of(run: Any) -> Any:
    return run.Partial() if str(STANDINS) in str(run.__file__) else run.Partial(sorted, [1])


def test_a_local_script_runs_under_the_launcher(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    executor, task = local(run, tmp_path, ntasks_per_node=4, launcher="torchrun"), script(run)
    module.FTLaunchPlugin(tp=2, max_restarts=0, timeouts={"step": 60}, health_check="true; true").setup(task, executor)
    logs = str(tmp_path / "exp_17" / "train" / "ft_logs")
    flags = [
        "--tp", "2", "--nnodes", "1", "--nproc-per-node", "4", "--run-id", "exp_17.train", "--timeouts", "step=60", "--max-restarts", "0", "--health-check", "true; true", "--log-dir", logs,
    ]  # fmt: skip
    assert task.to_command(with_entrypoint=True) == ["python", "-m", "ft_launcher", *flags, "train.py", "--lr", "1e-3", "two words"]
    assert type(executor.launcher) is run.core.execution.launcher.Launcher, "nothing around it"
    dataclasses.replace(task)  # as NeMo-Run does when it builds it again: its own checks hold


def test_a_module_stays_a_module(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    task = script(run, path="pkg.train", m=True, args=["x"])
    module.FTLaunchPlugin().setup(task, local(run, tmp_path))
    assert task.to_command()[-3:] == ["-m", "pkg.train", "x"]
    assert task.to_command()[:2] == ["-m", "ft_launcher"]


def test_what_the_recipe_says_goes_before_what_the_executor_knows(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    task = script(run)
    module.FTLaunchPlugin(nproc_per_node=2, run_id="mine", log_dir="/elsewhere").setup(task, local(run, tmp_path, ntasks_per_node=4))
    words = task.to_command()
    assert [words[words.index(flag) + 1] for flag in ("--nproc-per-node", "--run-id", "--log-dir")] == ["2", "mine", "/elsewhere"]


def test_on_slurm_words_are_quoted_and_the_executor_is_settled(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    executor, task = on_slurm(run, tmp_path, srun_args=["--mpi=pmix", "--wait=0"]), script(run)
    module.FTLaunchPlugin(tp=8, store="etcd://a:1,b:2", health_check="check all").setup(task, executor)
    assert task.to_command() == ["train.py", "--lr", "1e-3", "two words"], "the launcher sees the task as it is"
    line = executor.launcher.transform(task.to_command(with_entrypoint=True)).inline
    assert shlex.split(line)[-4:] == ["train.py", "--lr", "1e-3", "two words"]
    assert "--health-check 'check all'" in line
    assert "--nnodes 2 --nproc-per-node 8 --store etcd://a:1,b:2" in line
    assert "--log-dir /nemo_run/ft_logs" in line
    assert "--run-id" not in line, "Slurm's job id is the run id, over requeues too"
    assert executor.srun_args == ["--mpi=pmix", "--no-kill", "--wait=0", "--kill-on-bad-exit=0"]
    assert (executor.ntasks_per_node, executor.torchrun_nproc_per_node, executor.retries) == (1, 8, 0)
    assert executor.setup_lines is None, "nothing is requeued, so nothing is asked"


def test_retries_become_requeues_on_16_and_75_alone(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    executor = on_slurm(run, tmp_path, retries=4, setup_lines="module load cuda")
    module.FTLaunchPlugin(store="etcd://a:1", host_python="/opt/py 3/bin/python3").setup(script(run), executor)
    assert executor.retries == 0, "NeMo-Run's own rule requeues after any failure"
    assert executor.setup_lines.startswith("module load cuda\n")
    assert "--max-requeues 4" in executor.setup_lines
    assert "--log-dir '/cluster/exp 17/train/ft_logs'" in executor.setup_lines


def test_a_partial_is_started_on_slurm_through_the_launcher(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    executor = on_slurm(run, tmp_path)
    task = partial_of(run)
    module.FTLaunchPlugin(tp=8, store="etcd://a:1").setup(task, executor)
    assert isinstance(executor.launcher, module.FTLaunch)
    assert executor.supports_launcher_transform()
    made = executor.launcher.transform(["python", "-m", "nemo_run.core.runners.fdl_runner", "-n", "train", "/nemo_run/configs/x"])
    options = "--tp 8 --nnodes 2 --nproc-per-node 8 --store etcd://a:1 --log-dir /nemo_run/ft_logs"
    expected = f"exec python -m ft_launcher {options} -m nemo_run.core.runners.fdl_runner -n train /nemo_run/configs/x\n"
    assert made.inline.endswith(expected)


def test_profiling_is_kept_whatever_launcher_asked_for_it(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    executor = local(run, tmp_path, launcher=run.Torchrun(nsys_profile=True, nsys_folder="here"))
    module.FTLaunchPlugin().setup(script(run), executor)
    assert (executor.launcher.nsys_profile, executor.launcher.nsys_folder) == (True, "here")


def test_executors_that_make_a_line_of_shell_get_quoted_words(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    image = {} if str(STANDINS) in str(run.__file__) else {"container_image": "image"}
    executor = run.DockerExecutor(ntasks_per_node=2, **image)
    executor.experiment_id, executor.job_dir = "exp", str(tmp_path / "train")
    task = script(run)
    module.FTLaunchPlugin(health_check="check all").setup(task, executor)
    assert shlex.split(" ".join(task.to_command())) == [
        "-m", "ft_launcher", "--nnodes", "1", "--nproc-per-node", "2", "--run-id", "exp.train", "--health-check", "check all", "--log-dir", "/nemo_run/ft_logs",
        "train.py", "--lr", "1e-3", "two words",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "executor", "plugin", "said"),
    [
        ({"path": "", "inline": "echo hi"}, {}, {}, "an inline script is a shell script"),
        ({"entrypoint": "bash"}, {}, {}, "say entrypoint='python'"),
        ({"entrypoint": "uv run python"}, {}, {}, "LocalExecutor starts one program"),
        ({"entrypoint": "'"}, {}, {}, "say entrypoint='python'"),
        ({}, {"nodes": 2}, {}, "several nodes need --store"),
        ({}, {"ntasks_per_node": 4}, {"tp": 3}, "does not divide the world of 4 ranks"),
        ({"args": ["--tensor-model-parallel-size", "4"]}, {"ntasks_per_node": 4}, {"tp": 2}, "differs from --tensor-model-parallel-size"),
        ({}, {"launcher": "slurm_ray"}, {}, "SlurmRay starts the task in its own way"),
    ],
)
def test_what_cannot_be_is_one_line(
    nemo: Nemo, tmp_path: Path, given: dict[str, Any], executor: dict[str, Any], plugin: dict[str, Any], said: str
) -> None:
    run, module = nemo
    with pytest.raises(ConfigError) as caught:
        module.FTLaunchPlugin(**plugin).setup(script(run, **given), local(run, tmp_path, **executor))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_partials_and_groups_that_cannot_be_are_refused(nemo: Nemo, tmp_path: Path) -> None:
    run, module = nemo
    partial = partial_of(run)
    with pytest.raises(ConfigError, match=r"a run.Partial cannot be started by ft-launch with LocalExecutor"):
        module.FTLaunchPlugin().setup(partial, local(run, tmp_path))
    group = on_slurm(run, tmp_path)
    group.run_as_group = True
    with pytest.raises(ConfigError, match="one task in a Slurm job"):
        module.FTLaunchPlugin().setup(script(run), group)


def test_the_launcher_has_every_option_and_refuses_templates_and_mistakes(nemo: Nemo) -> None:
    _, module = nemo
    for kind in (module.FTLaunch, module.FTLaunchPlugin):
        assert {field.name for field in dataclasses.fields(LaunchOptions)} <= {field.name for field in dataclasses.fields(kind)}
    with pytest.raises(ConfigError, match="template_inline has no meaning here"):
        module.FTLaunch(template_inline="x")
    with pytest.raises(ConfigError, match="hang_action 'stop'"):
        module.FTLaunch(hang_action="stop")
    with pytest.raises(ConfigError, match="say entrypoint='python'"):
        module.FTLaunch().transform(["bash", "/nemo_run/scripts/x.sh"])


def test_without_nemo_run_the_module_is_importable_and_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['nemo_run'] = None\n"
        f"import {OURS} as ours\nfrom ft_launcher.errors import ConfigError\n"
        "for kind in (ours.FTLaunch, ours.FTLaunchPlugin):\n"
        "    try: kind(tp=2)\n"
        "    except ConfigError as error: print(error)\n"
        "print([name for name in ('torch', 'fiddle') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install nemo-run==0.11.1 leptonai==0.27.3") == 2
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.serial
@pytest.mark.parametrize(("tasks", "code"), [("2", 0), ("16", 2)])
def test_the_script_of_a_node_starts_one_agent_a_node(tmp_path: Path, tasks: str, code: int) -> None:
    options = LaunchOptions(nnodes=1, nproc_per_node=1, preload=[], run_id="r", log_dir=str(tmp_path / "my logs"))
    path = tmp_path / "node.sh"
    path.write_text(slurm_script([*options.flags(), "--dry-run"], [sys.executable, "-m", "json.tool", "a b", "$HOME"]))
    steps = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": "2", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(STANDINS.parents[2])}
    done = subprocess.run(["bash", str(path)], env=steps, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("my logs (flag)" in done.stdout) is (code == 0)
    assert ("one task a node is needed (ntasks_per_node=1): this step has 16 tasks on 2 nodes" in done.stderr) is (code == 2)


@pytest.mark.serial
@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_lines_in_the_batch_script_ask_after_the_run(tmp_path: Path, code: int) -> None:
    """As NeMo-Run's template uses them: setup lines, srun, `exit $exitcode`."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)
    lines = requeue_lines(shlex.quote(sys.executable), str(tmp_path / "job dir"), None, 2)
    batch = tmp_path / "batch.sh"
    batch.write_text(
        f"set -evx\nset +e\n{lines}\nbash -c 'exit {code}'\nexitcode=$?\nset -e\nif [ $exitcode -ne 0 ]; then exit $exitcode; fi\n"
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "5", "PYTHONPATH": str(STANDINS.parents[2])}
    done = subprocess.run(["bash", str(batch)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert asked == (["requeue 5"] if code == 75 else [])


@pytest.mark.parametrize(
    ("names", "run_id"),
    [(("exp_17", "train"), "exp_17.train"), (("", "a b/ü"), "a-b-"), (("", ""), None), (("x" * 300, "t"), "x" * 118 + ".t")],
)
def test_names_become_run_ids(names: tuple[str, str], run_id: str | None) -> None:
    made = run_id_of(*names)
    assert made == run_id
    if made is not None:
        LaunchOptions(run_id=made).check()


SCRIPTS = ("faulttolerance", "plugin", "partial", "launcher")


def recorded(name: str) -> str:
    return (RECORDED / f"nemo_{name}.sh").read_text()


def steps(text: str) -> list[list[str]]:
    """The srun commands of a batch script that start the task, as words."""
    return [shlex.split(line) for line in text.splitlines() if line.startswith("srun --output")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_generated_scripts_are_shell(name: str) -> None:
    assert subprocess.run(["bash", "-n"], input=recorded(name), text=True, check=False).returncode == 0


def test_the_generated_script_differs_from_nemo_runs_own_where_it_must() -> None:
    """What NeMo-Run makes of its FaultTolerance launcher, beside ours: the same job otherwise."""
    ((*their_step,),), ((*our_step,),) = steps(recorded("faulttolerance")), steps(recorded("plugin"))
    assert "ft_launcher" in their_step and "--max-restarts" not in their_step, "NeMo-Run drops a 0"
    assert "--max-restarts 0" in recorded("plugin"), "we do not"
    at = {flag: our_step.index(flag) for flag in ("--kill-on-bad-exit=1", "--kill-on-bad-exit=0", "--wait=60", "--wait=0", "--no-kill")}
    assert at["--kill-on-bad-exit=0"] > at["--kill-on-bad-exit=1"] and at["--wait=0"] > at["--wait=60"], "srun takes the last"
    assert "TORCHX_MAX_RETRIES=3" in recorded("faulttolerance") and "TORCHX_MAX_RETRIES=0" in recorded("plugin")
    their_flags, our_flags = (
        {line for line in recorded(name).splitlines() if line.startswith("#SBATCH")} for name in ("faulttolerance", "plugin")
    )
    assert their_flags == our_flags, "one task a node, as NeMo-Run does it for its own launchers"
    assert "train.py --lr 1e-3 'two words'" in recorded("faulttolerance") and "train.py --lr 1e-3 'two words'" in recorded("plugin")
    assert "after-run" in recorded("plugin") and "after-run" not in recorded("launcher"), "the launcher alone cannot reach the batch script"


def test_in_a_container_logs_have_two_names() -> None:
    text = recorded("partial")
    assert "--log-dir /nemo_run/ft_logs -m nemo_run.core.runners.fdl_runner" in text
    assert "after-run" in text and "--log-dir /cluster/experiments/exp/EXP/train/ft_logs" in text


@pytest.mark.serial
def test_the_real_package_generates_the_recorded_scripts(tmp_path: Path) -> None:
    if not is_real():
        pytest.skip("nemo_run is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.nemo_scripts", str(tmp_path)],
        cwd=STANDINS.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in SCRIPTS:
        assert (tmp_path / f"nemo_{name}.sh").read_text() == recorded(name), name


def test_the_stand_in_is_like_the_real_package() -> None:
    if not is_real():
        pytest.skip("nemo_run is not installed")
    with ours(real=False) as (stand_in, _):
        kinds = {
            name: getattr(stand_in, name)
            for name in ("Script", "SlurmTemplate", "Plugin", "LocalExecutor", "SlurmExecutor", "Torchrun", "SlurmRay")
        }
    with ours(real=True) as (real, _):
        for name, kind in kinds.items():
            known = {field.name: field for field in dataclasses.fields(getattr(real, name))}
            for field in dataclasses.fields(kind):
                assert field.name in known, (name, field.name)
                if field.default is not dataclasses.MISSING:
                    assert known[field.name].default == field.default, (name, field.name)
        assert set(real.core.execution.launcher.LAUNCHER_MAP) == {"torchrun", "ft", "slurm_ray", "slurm_template"}
        assert issubclass(real.SlurmTemplate, real.core.execution.launcher.Launcher)
