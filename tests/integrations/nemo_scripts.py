"""The batch scripts that the real NeMo-Run (0.11.1) generates: `python -m tests.integrations.nemo_scripts FOLDER` writes them; `recorded/nemo_*.sh` are its output.

For the same task: NeMo-Run's own FaultTolerance launcher, our plugin with a script, with a module task (run.Partial), and the launcher alone. What differs from run to run is replaced.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

HOME = tempfile.mkdtemp()
os.environ["NEMORUN_HOME"] = HOME

import nemo_run as run  # noqa: E402

from ft_launcher.integrations.nemo_run import FTLaunch, FTLaunchPlugin  # noqa: E402


def executor(**given):
    tunnel = run.LocalTunnel(job_dir="/cluster/experiments")
    return run.SlurmExecutor(
        account="me", nodes=4, gpus_per_node=8, ntasks_per_node=8, retries=3, packager=run.Packager(), tunnel=tunnel, **given
    )


def task():
    return run.Script(path="train.py", args=["--lr", "1e-3", "two words"], entrypoint="python")


def write(folder, name, where, what, plugins=()):
    with run.Experiment("exp", base_dir=HOME) as experiment:
        experiment.add(what, executor=where, name="train", plugins=list(plugins))
        experiment.dryrun(log=False, delete_exp_dir=False)
        home = Path(experiment._exp_dir)
        (batch,) = home.glob("*_sbatch.sh")
        inline = sorted(home.glob("**/scripts/*.sh"))
        text = batch.read_text() + "".join(f"\n# ==== {path.name}\n{path.read_text()}" for path in inline)
    text = text.replace(experiment._id, "EXP").replace(str(HOME), "/home/nemo")
    text = re.sub(r"--rdzv-id \d+", "--rdzv-id N", text)
    Path(folder, f"nemo_{name}.sh").write_text(text)


def main():
    options = {"tp": 8, "store": "etcd://store-1:2379,store-2:2379", "max_restarts": 0, "health_check": "check all"}
    write(sys.argv[1], "faulttolerance", executor(launcher=run.FaultTolerance(max_restarts=0)), task())
    write(sys.argv[1], "plugin", executor(), task(), [FTLaunchPlugin(**options)])
    write(sys.argv[1], "partial", executor(container_image="image"), run.Partial(json.dumps, obj=1), [FTLaunchPlugin(**options)])
    write(sys.argv[1], "launcher", executor(launcher=FTLaunch(**options)), task())


if __name__ == "__main__":
    main()
