#!/bin/bash
# Train under Slurm, for longer than a job may run: sbatch examples/slurm.sh photos.yaml
#
# Five minutes before the time is over Slurm sends SIGUSR2 to this script. The ranks then write a checkpoint and end, and
# the job is queued again, where it resumes.

#SBATCH --job-name=mmdata
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --open-mode=append

requeue() {
    kill -USR2 "$step" # srun passes it on to its tasks
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap requeue USR2

# One task a GPU: each is a rank.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" python -m mmdata train "$@" &

# Or one torchrun a node, with --ntasks-per-node=1 and --cpus-per-task=96:
# host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
#     --rdzv-backend c10d --rdzv-endpoint "$host:29500" --rdzv-id "$SLURM_JOB_ID" \
#     --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 -m mmdata train "$@" &

step=$!
wait "$step"
