"""A NeMo-Run recipe whose task runs under ft-launch. What makes it so is one line: `plugins=[FTLaunchPlugin(...)]`.

    pip install nemo-run==0.11.1 leptonai==0.27.3
    python examples/nemo/recipe.py                                          four ranks on this machine
    python examples/nemo/recipe.py --slurm --account me --dryrun            prints the batch script, submits nothing

The training script is examples/toy_train.py, or another one with its arguments behind `--`.
"""

import argparse
from pathlib import Path

import nemo_run as run

from ft_launcher.integrations.nemo_run import FTLaunchPlugin

TOY = Path(__file__).resolve().parent.parent / "toy_train.py"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slurm", action="store_true", help="submit to Slurm instead of running here")
    parser.add_argument("--account", default="me", help="Slurm's account")
    parser.add_argument("--store", default="etcd://store-1:2379", help="where the agents of several nodes meet")
    parser.add_argument("--preload", default="torch", help="modules imported once a node")
    parser.add_argument("--dryrun", action="store_true", help="show what would be started")
    parser.add_argument("script", nargs="*", default=[str(TOY), "--steps", "200"], help="the training script and its arguments")
    return parser.parse_args()


def executor_of(args: argparse.Namespace) -> run.Executor:
    """Where it runs. `retries` are requeues on exit codes 16 and 75, once the plugin has seen it."""
    if not args.slurm:
        return run.LocalExecutor(ntasks_per_node=4)
    return run.SlurmExecutor(account=args.account, nodes=4, gpus_per_node=8, ntasks_per_node=8, retries=3, packager=run.Packager())


def plugin_of(args: argparse.Namespace) -> FTLaunchPlugin:
    """How it is launched. Nodes and ranks a node come from the executor."""
    options = {"max_restarts": 5, "timeouts": {"setup": 900, "step": 120}, "preload": args.preload.split(",")}
    return FTLaunchPlugin(tp=8, store=args.store, **options) if args.slurm else FTLaunchPlugin(tp=2, **options)


def main() -> None:
    """One task in one experiment."""
    args = parse()
    task = run.Script(path=args.script[0], args=args.script[1:], entrypoint="python")
    with run.Experiment("ft-launch-example") as experiment:
        experiment.add(task, executor=executor_of(args), name="train", plugins=[plugin_of(args)], tail_logs=True)
        if args.dryrun:
            experiment.dryrun()
        else:
            experiment.run(detach=False, tail_logs=True)


if __name__ == "__main__":
    main()
