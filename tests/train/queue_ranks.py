"""Program of one of two ranks for test_queue_ranks.py: three steps with a queue under real DDP.

usage: queue_ranks.py FOLDER RANK. Writes FOLDER/NAME.RANK.pt for each case.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmdata.batch import Batch
from mmdata.train import miners, train_step
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.ranks import collectives
from mmdata.train.run.objective import ContrastiveLoss
from tests.train import ranks

ALL, SOME, FEW, NONE = [1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]
CASES: dict[str, dict[str, Any]] = {
    "equal": {"valid": [ALL, ALL]},
    "unequal_micro": {"valid": [SOME, FEW], "micro_batch_size": 3},
    "one_empty": {"valid": [NONE, ALL], "negative_captions": True},
    "mined": {"valid": [SOME, ALL], "miner": miners.TopK(5)},
}
QUEUE_ROWS, STEPS = 13, 3


def batch_of(step: int, rank: int, case: dict[str, Any]) -> Batch:
    """A step's rows of a rank: other images than the step before, some with its captions."""
    batch = ranks.make_batch(rank + 10 * step, {**case, "valid": [*case["valid"]] * 20})
    batch["image_hash"] = batch["image_hash"] + 1000 * step
    batch["valid"] = torch.tensor(case["valid"][rank]).bool()
    return batch


def run(case: dict[str, Any], batches: list[Batch]) -> dict[str, Any]:
    """Loss and gradients of the last step, and what the queue holds after it."""
    model = ranks.make_model(0.0)
    wrapped = collectives.wrap(model, torch.device("cpu"))
    queue = FeatureQueue(QUEUE_ROWS)
    for number, batch in enumerate(batches):
        model.zero_grad()
        loss = ContrastiveLoss(miner=case.get("miner"), queue=queue)
        step = train_step(wrapped, batch, loss, micro_batch_size=case.get("micro_batch_size"))
        queue.keep(step.output, batch, number)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": step.loss, "gradients": gradients, "queue": queue.state_dict()}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name, case in CASES.items():
        result = run(case, [batch_of(step, rank, case) for step in range(STEPS)])
        torch.save(result, folder / f"{name}.{rank}.pt")
    collectives.finish()


if __name__ == "__main__":
    main()
