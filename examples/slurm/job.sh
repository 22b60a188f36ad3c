#!/bin/bash
# One training run under Slurm: sbatch examples/slurm/job.sh train.py --its --own --arguments
#
# Each node runs one ft-launch; they meet in etcd. Slurm requeues the job only where a new start can help (exit codes 16 and 75), and on 16 the
# machine that the verdict names is excluded. See docs/slurm.md. Settings, as variables of the submitting shell:
#   FT_STORE    etcd://store-1:2379,store-2:2379,store-3:2379   where the agents meet (several nodes need it)
#   FT_LOG_DIR  on a file system that every node sees; default: ft_logs where the job was submitted
#   FT_...      any other option of ft-launch, as FT_TP=8
#   SPARES      nodes of the job that wait as spares; default 1 with four or more nodes
#   REQUEUES    how often the job may requeue itself; default 5
#   PYTHON      a Python on every node that has ft-launcher and the training's packages; default python3

#SBATCH --job-name=pretrain
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
# --no-kill: a lost node is ft-launch's business, not the job's end. --signal: USR1 reaches every agent, and through it every rank, 120 s before
# the time limit (and before pre-emption, where the site has PreemptParameters=send_user_signal); TERM follows, and --term-grace after it.

set -uo pipefail

PYTHON="${PYTHON:-python3}"
SPARES="${SPARES:-$((SLURM_NNODES >= 4 ? 1 : 0))}"
export FT_LOG_DIR="${FT_LOG_DIR:-$SLURM_SUBMIT_DIR/ft_logs}"

if [ "$SLURM_NNODES" -gt 1 ] && [ -z "${FT_STORE:-}" ]; then
    echo "job.sh: FT_STORE is not set: several nodes need an etcd, as in FT_STORE=etcd://store-1:2379 sbatch job.sh ..." >&2
    exit 2
fi

slurm() { "$PYTHON" -m ft_launcher.integrations.slurm "$@"; }

before="$(slurm generation --log-dir "$FT_LOG_DIR")" || exit

# Nodes, their order and the run id are read from Slurm's environment. The node id is Slurm's own name, so that the verdict names machines as
# Slurm knows them. srun shall end when all agents have ended, and not before: whatever happens to one of them, the others go on.
# shellcheck disable=SC2016
srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    bash -c 'exec "$0" -m ft_launcher --node-id "$SLURMD_NODENAME" "$@"' \
    "$PYTHON" --nnodes "$((SLURM_NNODES - SPARES)):$SLURM_NNODES" "$@"
code=$?

# exec: Slurm ends the batch script with TERM once the job is requeued, and a shell would die of it half way; after-run does not.
exec "$PYTHON" -m ft_launcher.integrations.slurm after-run --code "$code" --newer-than "$before" --log-dir "$FT_LOG_DIR" --max-requeues "${REQUEUES:-5}"
