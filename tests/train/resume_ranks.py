"""Program of one rank for test_reduction.py: runs that nothing disturbed, and runs that were stopped and resumed.

usage: resume_ranks.py FOLDER RANK WORLD_SIZE. Writes FOLDER/WAY/whole and FOLDER/WAY/cut for each way to train.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmdata.train.ranks import collectives
from mmdata.train.run.trainer import Trainer
from tests.train.small_run import SmallBatches, small_model, train_config

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_micro": {"micro_batch_size": 1},
    "fsdp": {"parallel": "fsdp"},
}
STOPS = {"ddp": [1, 5, 7], "ddp_micro": [2], "fsdp": [5]}
"""Steps after which a run is stopped: the first is before DDP lays out its buckets anew."""


def run(output: Path, settings: dict[str, Any], stop: int | None) -> None:
    def before(number: int, rows: list[int]) -> None:
        if stop is not None and number == stop - 1 and collectives.rank() == 0:
            signal.raise_signal(signal.SIGTERM)

    batches = SmallBatches(before)
    code = Trainer(small_model(), batches, train_config(**settings), output=output).run()
    assert code == (0 if stop is None else 128 + signal.SIGTERM), code


def main() -> None:
    torch.set_num_threads(1)
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    for way, settings in WAYS.items():
        run(folder / way / "whole", settings, None)
        for stop in (*STOPS[way], None):
            run(folder / way / "cut", settings, stop)
    collectives.finish()


if __name__ == "__main__":
    main()
