"""A worker of Ray Train: mmdata's trainer on its share of the batches. One worker is killed in the first start."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

import mmdata
from mmdata.config import TrainConfig
from mmdata.train import DualEncoder
from mmdata.train.run.trainer import Trainer


def digests(batch: Any) -> dict[int, float]:
    """A number of the pixels of each row that counts."""
    sums = batch["pixel_values"].double().mul(torch.arange(1, 32 + 1)).sum(dim=(1, 2, 3)).tolist()
    rows = zip(batch["rows"].tolist(), sums, batch["valid"].tolist(), strict=True)
    return {row: each for row, each, valid in rows if valid}


def train(spec: dict[str, Any]) -> None:
    """Three epochs; OUT/seen-RANK.jsonl gets a line for each update."""
    torch.set_num_threads(1)
    out, rank = Path(spec["out"]), int(os.environ["RANK"])
    loader = mmdata.Loader.from_config(spec["data"])  # takes the ranks from Ray's variables
    torch.manual_seed(0)
    model = DualEncoder.from_config({"name": "micro"}, vocab_size=300)
    config = TrainConfig(epochs=3, checkpoint_every_steps=1, log_every_steps=1)
    is_first = not (out / "run" / "checkpoints").exists()
    trainer = Trainer(model, loader, config, output=out / "run")

    def look(module: Any, given: Any) -> None:
        with (out / f"seen-{rank}.jsonl").open("a") as file:
            line = {"start": 1 if is_first else 2, "step": trainer.step, "rows": digests(given[0])}
            file.write(json.dumps(line) + "\n")
        if rank == 1 and is_first and trainer.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(look)
    assert trainer.run() == 0
