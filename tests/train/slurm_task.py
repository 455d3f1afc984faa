"""A task of a submitit job that trains a small run; its ranks come from Slurm's variables."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import submitit
import torch

from mmdata.train.ranks import collectives
from mmdata.train.run.trainer import Trainer
from tests.train.small_run import SmallBatches, evaluate, small_model, train_config


class Task:
    """Trains in a folder; both tasks get submitit's signal at batch 6 of the first start."""

    def __call__(self, output: Path) -> int:
        job = submitit.JobEnvironment()
        task = {"STEP_NUM_TASKS": job.num_tasks, "PROCID": job.global_rank, "LOCALID": job.local_rank}
        os.environ |= {f"SLURM_{name}": str(value) for name, value in task.items()}  # as srun sets them
        os.environ["SLURM_STEP_NODELIST"] = "127.0.0.1"
        torch.set_num_threads(1)
        collectives.init("cpu")
        is_first = not (output / "checkpoints").exists()

        def before(number: int, rows: list[int]) -> None:
            if number == 6 and is_first:
                signal.raise_signal(signal.SIGUSR2)

        return Trainer(small_model(), SmallBatches(before), train_config(), output=output, evaluate=evaluate).run()

    def checkpoint(self, output: Path) -> submitit.helpers.DelayedSubmission:
        """What submitit queues again."""
        (output / "queued_again").write_text("")
        return submitit.helpers.DelayedSubmission(self, output)
