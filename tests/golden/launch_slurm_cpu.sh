#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/first/log/slurm.log
export JAX_PLATFORMS=cpu
export SPANAX_HOST_DEVICES=4
exec python -P -m spanax launch workers --hosts 2 --restarts 5 --start 'srun --kill-on-bad-exit=1 --open-mode=append --output=/runs/first/log/rank%t.log python -P -m spanax' -- \
  train gpt2 --data 'my texts' --output-dir /runs/first
