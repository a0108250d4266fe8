#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --partition=long
#SBATCH --account=lab
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/first/log/slurm.log
#SBATCH --qos=high
module load cuda
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
exec python -P -m spanax launch workers --hosts 4 --start 'srun --kill-on-bad-exit=1 --cpus-per-task=16 --open-mode=append --output=/runs/first/log/rank%t.log python -P -m spanax' -- \
  train gpt2 --data 'my texts' --output-dir /runs/first
