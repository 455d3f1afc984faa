"""Steps on a CPU: the optimizer's update, what torch.compile takes, and patch dropout.

PYTHONPATH=. python docs/benchmarks/host_work.py adamw --model vit_b_32          # fused against torch's default
PYTHONPATH=. python docs/benchmarks/host_work.py compile --model small           # by block against whole towers
PYTHONPATH=. python docs/benchmarks/host_work.py patches --model vit_b_16 --times 5    # half of the patches against all
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu_step import Step
from torch import nn

from mmdata.config import ModelConfig, TrainConfig
from mmdata.train import DualEncoder
from mmdata.train.models.transformers_towers import add_patch_dropout
from mmdata.train.ranks import parallel, sharding
from mmdata.train.run.optimizer import make_optimizer

SHAPES = [(64, 16), (64, 32), (96, 16)]
"""Side of the images and length of the texts of three batches."""


def taken(work: Callable[..., object], *given: Any) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started


def adamw(model: str, vocabulary: int, times: int) -> None:
    """Medians of updates of both, in turn."""
    weights = DualEncoder.from_config(ModelConfig(name=model), vocab_size=vocabulary)
    for parameter in weights.parameters():
        parameter.grad = torch.randn_like(parameter)
    fused = make_optimizer(weights, TrainConfig(steps=1))
    groups: Any = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in fused.param_groups]
    kinds = {"fused": fused, "torch's default": torch.optim.AdamW(groups)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(times + 1):
        for name, optimizer in kinds.items():
            found[name].append(taken(optimizer.step))
    for name, seconds in found.items():
        print(f"AdamW of {model}, {name}: {1e3 * median(seconds[1:]):.1f} ms an update")


def compile_(model: str, times: int) -> None:
    """Seconds of the first and of further steps of each shape."""
    device = torch.device("cpu")
    for whole in (False, True):
        torch._dynamo.reset()
        step = Step(model, device, compiled=not whole, side=SHAPES[0][0])
        for tower in sharding.towers_of(step.model) if whole else list[nn.Module]():
            tower.compile(backend=parallel.BACKEND, dynamic=False)
        for side, length in SHAPES:
            step.side = side
            batch = step.batch(16, length)
            first = taken(step.update, batch)
            further = median([taken(step.update, batch) for _ in range(times)])
            kind = "whole towers" if whole else "by block"
            print(f"{kind}, {side} x {length}: first {first:.1f} s, then {further:.3f} s", flush=True)


def patches(model: str, times: int) -> None:
    """Medians of whole steps with all patches and with half of them, in turn."""
    step = Step(model, torch.device("cpu"), compiled=False, side=224)
    add_patch_dropout(step.model.image_tower, 0.5, key="model.name")
    batch = step.batch(8, 20)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(times + 1):
        for half, seconds in found.items():
            step.model.image_tower.train(half)  # these towers have no other dropout
            seconds.append(taken(step.update, batch))
    whole, half = (median(seconds[1:]) for seconds in found.values())
    print(f"step of {model}, 8 rows, all patches / half: {whole:.2f} / {half:.2f} s, {whole / half:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["adamw", "compile", "patches"])
    parser.add_argument("--model", default="micro")
    parser.add_argument("--vocabulary", type=int, default=49408)
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args()
    if given.what == "adamw":
        adamw(given.model, given.vocabulary, given.times)
    elif given.what == "patches":
        patches(given.model, given.times)
    else:
        compile_(given.model, given.times)


if __name__ == "__main__":
    main()
