"""Program of one rank for test_on_gpu.py: runs with DDP and with FSDP2 over nccl, whose losses are those without ranks.

usage: torchrun --nproc-per-node 1 nccl_rank.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mmdata.train.ranks import collectives
from mmdata.train.run.trainer import Trainer
from tests.train.small_run import SmallBatches, small_model, train_config


def losses(device: torch.device, output: Path, **settings: str) -> list[float]:
    """Of a run of two epochs, which writes checkpoints."""
    config = train_config(epochs=2, precision="fp32", compile=False, **settings)
    trainer = Trainer(small_model(0.0).to(device), SmallBatches(), config, output=output)
    assert trainer.run() == 0
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def main() -> None:
    folder = Path(sys.argv[1])
    expected = losses(torch.device("cuda"), folder / "alone")
    assert len(expected) > 3
    device = collectives.init("cuda")
    assert dist.get_backend() == "nccl"
    for parallel in ("ddp", "fsdp"):
        found = losses(device, folder / parallel, parallel=parallel)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        print(f"{parallel}: {len(found)} losses")


if __name__ == "__main__":
    main()
