"""Do gradients under FSDP2 and bf16 differ from those of DDP, and by how much do those of float32?

PYTHONPATH=. torchrun --nproc-per-node 2 docs/benchmarks/sharded_bf16.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.train import DualEncoder, train_step
from mmdata.train.ranks import collectives, sharding
from mmdata.train.run.objective import ContrastiveLoss

ROWS, LENGTH, VOCABULARY = 16, 16, 1000


def gradients(*, shard: bool, dtype: torch.dtype | None) -> Tensor:
    """The whole gradient of one batch, the same weights and rows each time."""
    torch.manual_seed(0)
    model = DualEncoder.from_config(ModelConfig(name="small"), vocab_size=VOCABULARY)
    device = torch.device("cpu")
    wrapped = model if shard else collectives.wrap(model, device)
    if shard:
        sharding.shard(model, device, autocast_dtype=dtype)
    generator = torch.Generator().manual_seed(collectives.rank())
    batch: Batch = {
        "pixel_values": torch.randint(0, 256, (ROWS, 3, 64, 64), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
        "valid": torch.ones(ROWS, dtype=torch.bool),
        "rows": torch.arange(ROWS),
        "keys": [str(row) for row in range(ROWS)],
    }
    train_step(wrapped, batch, ContrastiveLoss("clip"), autocast_dtype=dtype)
    return torch.cat([sharding.whole(p.grad).flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    """Print both differences, relative to the norm of the gradient."""
    collectives.init("cpu")
    torch.set_num_threads(1)
    ddp = gradients(shard=False, dtype=torch.bfloat16)
    fsdp = gradients(shard=True, dtype=torch.bfloat16)
    float32 = gradients(shard=False, dtype=None)
    if collectives.rank() == 0:
        for name, other in (("FSDP2 in bf16", fsdp), ("DDP in float32", float32)):
            print(f"{name}: {float((other - ddp).norm() / ddp.norm()):.2%} from DDP in bf16")


if __name__ == "__main__":
    main()
