"""Program of one rank for test_two_ranks.py: the trainer on a stream.

usage: ranks.py '{"shards": FOLDER, "data": {…}, "steps_per_epoch": 6, "output": FOLDER, "stop_at": 8}'

Writes a line for each batch, its place and keys, to OUTPUT/keys-rankN.jsonl; rank 1 sends itself SIGTERM with batch
number `stop_at`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from mmdata.batch import Batch
from mmdata.config import DataConfig, ModelConfig, TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.launcher import Ranks
from mmdata.loader.growing.tars import TarFiles
from mmdata.loader.stream import Stream, find_shards
from mmdata.train import DualEncoder
from mmdata.train.ranks import collectives
from mmdata.train.run.trainer import Trainer


class Watched(Stream):
    """Keeps a file of the keys of each batch, also of one that is taken ahead and not trained on before a stop."""

    def __iter__(self) -> Iterator[Batch]:
        rank = collectives.rank()
        for number, batch in enumerate(super().__iter__()):
            state = self.state_dict()
            with (output / f"keys-rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps([state["epoch"], state["step"], batch["keys"]]) + "\n")
            if rank == 1 and number == spec.get("stop_at"):
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def main() -> int:
    """Two epochs; returns the trainer's exit code."""
    torch.set_num_threads(1)
    collectives.init("cpu")
    data = parse(DataConfig, {**spec["data"], "shards": spec["shards"]}, origin="test")
    ranks, tars = Ranks(collectives.rank(), collectives.world_size()), TarFiles(find_shards(spec["shards"]), data)
    stream = Watched(tars, data, ranks, steps_per_epoch=spec["steps_per_epoch"])
    torch.manual_seed(0)
    model = DualEncoder.from_config(ModelConfig(), vocab_size=300)
    config = parse(TrainConfig, {"epochs": 2, "log_every_steps": 1, "warmup_steps": 1}, origin="test")
    return Trainer(model, stream, config, output=output).run()


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    output = Path(spec["output"])
    output.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
