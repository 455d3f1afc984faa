"""python uneven_ranks.py FOLDER RANK: two ranks, whose third batches have different numbers of rows.

Writes the error of a run and that of an evaluation to FOLDER/run-RANK and FOLDER/evaluation-RANK.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import small_run as small
import torch.distributed as dist

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.run.trainer import Trainer


def batches(rank: int) -> small.SmallBatches:
    """Four batches of four rows, and on rank 1 a third one of three."""

    def shorten(number: int, batch: Batch) -> None:
        if (rank, number) == (1, 2):
            batch.update(cast(Any, {name: cast(Any, value)[:3] for name, value in batch.items()}))

    made = small.SmallBatches()
    made.spoil = shorten
    return made


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        Trainer(small.small_model(), batches(rank), small.train_config(epochs=1), output=folder / "out").run()
    except TrainingError as error:
        (folder / f"run-{rank}").write_text(str(error))
    try:
        small.evaluate_retrieval(small.small_model(), batches(rank))
    except TrainingError as error:
        (folder / f"evaluation-{rank}").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
