"""Program of one of two ranks for test_sogclr_ranks.py: four steps of the loss sogclr under real DDP.

usage: sogclr_ranks.py FOLDER RANK. Writes FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmdata.batch import Batch
from mmdata.train import RowNormalizers, train_step
from mmdata.train.objective import ContrastiveLoss
from mmdata.train.ranks import collectives
from mmdata.train.ranks.sharding import whole
from tests.train import ranks

ROWS, STEPS = 13, 4
VALID = [[1, 1, 1, 0], [1, 1, 0, 1]]


def batch_of(step: int, rank: int) -> Batch:
    """Steps 2 and 3 hold the rows of steps 0 and 1 again."""
    batch = ranks.make_batch(rank + 10 * (step % 2), {"valid": VALID * 20})
    batch["rows"] = torch.arange(4) + 4 * rank + 5 * (step % 2)
    batch["valid"] = torch.tensor(VALID[rank]).bool()
    return batch


def run(batches: list[Batch]) -> dict[str, Any]:
    """Loss and gradients of the last step, and the numbers of all rows after it."""
    model, normalizers = ranks.make_model(0.0), RowNormalizers(ROWS)
    wrapped = collectives.wrap(model, torch.device("cpu"))
    for number, batch in enumerate(batches):
        model.zero_grad()
        loss = ContrastiveLoss("sogclr", normalizers=normalizers, gamma=0.5)
        step = train_step(wrapped, batch, loss)
        if number == 1:  # as in a checkpoint
            saved = normalizers.state_dict()
            normalizers = RowNormalizers(ROWS)
            normalizers.load_state_dict(saved)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": step.loss, "gradients": gradients, "kept": whole(normalizers.state_dict()["log_normalizers"])}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(run([batch_of(step, rank) for step in range(STEPS)]), folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
