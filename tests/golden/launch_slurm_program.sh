#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/first/log/slurm.log
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
exec python -P -m spanax launch workers --hosts 4 --logs /runs/first --start 'srun --kill-on-bad-exit=1 --open-mode=append --output=/runs/first/log/rank%t.log' -- \
  sh train.sh --name 'my run'
