"""Program of one rank for test_training.py: loss and gradients of its part of a global batch, under real DDP.

usage: ranks.py FOLDER RANK WORLD_SIZE. FOLDER has settings.json; the rank writes WORLD_SIZE-RANK.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mmdata
from mmdata.train import ContrastiveLoss, DualEncoder, miners, train_step

LOSSES = {
    "clip": ContrastiveLoss("clip"),
    "clip with hard negatives": ContrastiveLoss("clip", miner=miners.TopK(3)),
    "siglip": ContrastiveLoss("siglip"),
}


def gradients(loss: ContrastiveLoss, batch: Any, world_size: int) -> dict[str, torch.Tensor]:
    """The loss, and each parameter's gradient, in float64."""
    torch.manual_seed(1)
    model = DualEncoder.from_config({"name": "micro", "logit_bias_init": -10.0, "dropout": 0.0}, vocab_size=1000)
    model = model.double().train()
    several = DistributedDataParallel(model, find_unused_parameters=True) if world_size > 1 else model
    step = train_step(several, batch, loss, micro_batch_size=3)
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": step.loss.detach(), **found}


def main(folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    settings = json.loads((folder / "settings.json").read_text())
    loader = mmdata.Loader.from_config(settings, rank=rank, world_size=world_size)
    batch = next(iter(loader))
    found = {name: gradients(loss, batch, world_size) for name, loss in LOSSES.items()}
    torch.save({"valid": batch["valid"], "losses": found}, folder / f"{world_size}-{rank}.pt")
    loader.close()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
