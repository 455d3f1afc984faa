"""Program of one rank for test_training.py: loss and gradients of its part of a global batch, under real DDP.

usage: ranks.py FOLDER RANK WORLD_SIZE. FOLDER has settings.json; the rank writes WORLD_SIZE-RANK.pt.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mmdata
from mmdata.train import DualEncoder, losses, miners, train_step

CLIP: dict[str, Any] = {"clip": None, "clip with hard negatives": miners.TopK(3)}
SIGLIP = "siglip"


def loss_of(name: str, output: Any, batch: Any) -> torch.Tensor:
    """The loss of this name, over the rows of all ranks."""
    features = output.image_features, output.text_features, output.logit_scale
    if name == SIGLIP:
        return losses.siglip_loss(*features, output.logit_bias, valid=batch["valid"])
    return losses.clip_loss(*features, valid=batch["valid"], miner=CLIP[name])


def gradients(name: str, batch: Any, world_size: int) -> dict[str, torch.Tensor]:
    """The loss, and each parameter's gradient, in float64."""
    torch.manual_seed(1)
    settings = {"name": "micro", "logit_bias_init": -10.0 if name == SIGLIP else None}
    model = DualEncoder.from_config(settings, vocab_size=1000).double()
    several = DistributedDataParallel(model) if world_size > 1 else model
    step = train_step(several, batch, partial(loss_of, name), micro_batch_size=3)
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": step.loss.detach(), **found}


def main(folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    settings = json.loads((folder / "settings.json").read_text())
    loader = mmdata.Loader.from_config(settings, rank=rank, world_size=world_size)
    batch = next(iter(loader))
    found = {name: gradients(name, batch, world_size) for name in (*CLIP, SIGLIP)}
    torch.save({"valid": batch["valid"], "losses": found}, folder / f"{world_size}-{rank}.pt")
    loader.close()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
