#!/usr/bin/env bash
# One run over all GPUs of a Slurm job: sbatch experiments/launch/slurm.sh --dataset emoji_styles --stations 8 ...
#SBATCH --job-name=fedjax-dg
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4    # one process a GPU
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@60     # a killed run goes on with --resume
set -euo pipefail
# the folder must be on a file system that every node sees
out=${OUT:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
srun fedjax-dg run --distributed --out "$out" "$@"
