"""Program of one of two ranks for test_telemetry.py: a loss with miners that know the global batch, and telemetry.

usage: mining_ranks.py FOLDER RANK. Writes FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmdata.train import losses, miners
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.telemetry import mining_telemetry
from mmdata.train.ranks import collectives

ROWS, RANKS = 6, 2
VALID = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
SAME = torch.tensor([0, 1, 2, 3, 4, 0, 6, 1, 8, 9, 10, 11])


def rows_of_all() -> list[Tensor]:
    """Images and texts of the model, then of the teacher."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(ROWS * RANKS, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [F.normalize(draw, dim=-1) for draw in draws]


def results(rows: slice) -> dict[str, Any]:
    """What a process finds that holds these rows of the global batch."""
    images, texts, teacher_images, teacher_texts = (x[rows] for x in rows_of_all())
    teacher = miners.TeacherMask.gather(teacher_images, teacher_texts, 0.1)
    miner = miners.Chain([teacher, miners.SameGroup(3, 2)])
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    inputs = [images.requires_grad_(), texts.requires_grad_(), scale]
    keys = {"valid": VALID[rows], "same": [SAME[rows]]}
    loss = losses.clip_loss(*inputs, miner=miner, **keys)
    unmined = losses.clip_loss(*inputs, **keys)
    assert not torch.isclose(loss, unmined)
    return {
        "loss": loss.detach(),
        "gradients": torch.autograd.grad(loss, inputs),
        "telemetry": mining_telemetry(GlobalBatch.gather(images, texts, **keys), scale, miner),
    }


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.save(results(slice(rank * ROWS, (rank + 1) * ROWS)), folder / f"{rank}.pt")
    collectives.finish()


if __name__ == "__main__":
    main()
