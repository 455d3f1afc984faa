"""What mining costs at a batch of 4,096, as a share of a ViT-B/32 step.

PYTHONPATH=. python docs/benchmarks/mining_cost.py

The losses are measured at the whole batch. The step of the towers (CLIP's ViT-B/32 with its text tower of 77 tokens,
transformers' default configuration) is measured forward and backward on `--tower-rows` rows, and multiplied: its time
goes with the rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from mmdata.config import ModelConfig
from mmdata.train import DualEncoder, losses, miners


def seconds(work: Callable[[], torch.Tensor], rounds: int, device: str) -> float:
    """Median time of `work` and its backward."""
    found: list[float] = []
    for _ in range(rounds + 1):  # the first one warms up
        started = time.perf_counter()
        work().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tower-rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)

    def features() -> torch.Tensor:
        return F.normalize(torch.randn(given.rows, given.dim, device=given.device), dim=1).requires_grad_()

    images, texts = features(), features()
    scale = torch.tensor(50.0, device=given.device, requires_grad=True)
    kinds: dict[str, miners.AnyMiner | None] = {
        "none": None,
        "top_k 64": miners.TopK(64),
        "semi_hard": miners.SemiHard(0.2),
        "gumbel_top_k 64": miners.GumbelTopK(64),
    }
    model = DualEncoder.from_config(ModelConfig(name="pretrained", clip={"model_type": "clip"})).to(given.device)
    batch = {
        "pixel_values": torch.randint(0, 256, (given.tower_rows, 3, 224, 224), dtype=torch.uint8, device=given.device),
        "input_ids": torch.randint(1, 49_000, (given.tower_rows, 77), device=given.device),
        "attention_mask": torch.ones(given.tower_rows, 77, dtype=torch.int64, device=given.device),
    }

    def step() -> torch.Tensor:
        output = model(batch)
        return output.image_features.sum() + output.text_features.sum()

    towers = seconds(step, given.rounds, given.device) * given.rows / given.tower_rows
    print(f"ViT-B/32 step of {given.rows:,} rows, from {given.tower_rows}: {towers:,.1f} s")
    alone = 0.0
    for name, miner in kinds.items():
        spent = seconds(
            lambda miner=miner: losses.clip_loss(images, texts, scale, miner=miner), given.rounds, given.device
        )
        alone = alone or spent
        print(f"loss, miner {name}: {spent:.2f} s; mining costs {(spent - alone) / towers:.2%} of the step")


if __name__ == "__main__":
    main()
