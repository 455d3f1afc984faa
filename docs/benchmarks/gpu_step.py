"""Training steps of CLIP's towers on one device: samples a second, share of the device's peak, memory.

PYTHONPATH=. python docs/benchmarks/gpu_step.py --device cuda --models vit_b_32 vit_b_16 vit_l_14
PYTHONPATH=. python docs/benchmarks/gpu_step.py --device cpu --small          # rehearses the script; says nothing

A step is the trainer's: bfloat16 autocast, the tiled loss, clipping, fused AdamW; the batch lies on the device. A row
is a line of JSON. Texts have as many tokens as captions of web images (log-normal, median 13 with the special tokens,
sigma 0.5, at most 77), and masks that say so: "padded" pads all to 77; "bucketed" to the plan's four bounds for these
lengths, whose steps count with their share of the rows. Steps are queued on a GPU one behind the other, as in training,
and timed there. The share of the peak counts the towers' products, forward and backward, as torch's FlopCounterMode
counts them in that form of the batch, each of attention's once: a fused kernel computes one again in backward. Each
form of the step halves the rows until a batch fits. A row before the steps times the kernels of attention alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmdata.config import ModelConfig, TrainConfig
from mmdata.train import DualEncoder, miners
from mmdata.train.compiler import compiler_error
from mmdata.train.log.utilization import peak_flops
from mmdata.train.models.clip_sizes import CLIP_SIZES
from mmdata.train.precision import AUTOCAST, choose_precision, numerics
from mmdata.train.ranks import parallel, sharding
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.train.run.optimizer import make_optimizer
from mmdata.train.run.step import train_step

ROWS = {"vit_b_32": 1536, "vit_b_16": 640, "vit_l_14": 224}
"""Rows of a batch that 80 GB hold with room: 57, 58 and 65 GiB by torch's MemTracker, with the optimizer's averages."""
LONGEST, VOCABULARY = 77, 49408
BOUNDS = [12, 20, 34, 77]
"""What `mmdata.plan.choose.choose_lengths` gives for `caption_lengths`; importing it needs more than torch."""


@cache
def caption_lengths() -> NDArray[np.int64]:
    """Tokens of a million captions."""
    lengths = np.random.default_rng(0).lognormal(math.log(13), 0.5, 1_000_000)
    return lengths.round().clip(4, LONGEST).astype(np.int64)


def text_lengths() -> dict[int, float]:
    """The plan's bounds for these captions, and the share of the rows that each pads."""
    histogram = np.bincount(caption_lengths())
    cumulative = np.cumsum(histogram)[BOUNDS] / histogram.sum()
    return dict(zip(BOUNDS, np.diff(cumulative, prepend=0.0).tolist(), strict=True))


class Step:
    """Updates of one model.

    Args:
        name: of the model.
        device: to train on.
        compiled: its blocks go through torch.compile.
        side: of the images, in pixels.
    """

    def __init__(self, name: str, device: torch.device, *, compiled: bool, side: int) -> None:
        torch.manual_seed(0)
        self.device, self.side = device, side
        self.model = DualEncoder.from_config(ModelConfig(name=name), vocab_size=VOCABULARY).to(device).train()
        if compiled:
            parallel.compile_blocks(self.model)
        self.optimizer = make_optimizer(self.model, TrainConfig(steps=1))
        self.dtype = AUTOCAST[choose_precision("auto", device)]
        self.precision = "bf16" if self.dtype == torch.bfloat16 else "auto"  # as a run in that precision has it
        self.loss = ContrastiveLoss("clip", loss_precision=self.precision)

    def batch(self, rows: int, length: int, *, above: int = 0) -> dict[str, Tensor]:
        """Texts of more than `above` tokens, padded to `length`: without padding attention takes another kernel."""
        captions = caption_lengths()
        tokens = np.random.default_rng(0).choice(captions[(captions > above) & (captions <= length)], rows)
        mask = (torch.arange(length) < torch.from_numpy(tokens)[:, None]).long().to(self.device)  # (rows, length)
        pixels = torch.randint(0, 256, (rows, 3, self.side, self.side), dtype=torch.uint8, device=self.device)
        ids = torch.randint(1, VOCABULARY - 2, (rows, length), device=self.device)
        return {
            "pixel_values": pixels,
            "input_ids": ids * mask,
            "attention_mask": mask,
            "valid": torch.ones(rows, dtype=torch.bool, device=self.device),
        }

    def update(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        train_step(self.model, batch, self.loss, autocast_dtype=self.dtype)
        sharding.clip_grad_norm(self.model.parameters(), 1.0)
        self.optimizer.step()

    def flops(self, length: int) -> float:
        """Operations of a row, forward and backward; counted before anything is compiled."""
        rows = 4
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = self.model(self.batch(rows, length))
            (output.image_features.sum() + output.text_features.sum()).backward()
        self.optimizer.zero_grad(set_to_none=True)
        return counter.get_total_flops() / rows


def seconds(work: Callable[[], object], device: torch.device, *, warm: int, times: int) -> float:
    """Median time of `work`; on a GPU from the end of one to the end of the next, none of which is waited for."""
    for _ in range(warm):
        work()
    if device.type == "cuda":
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        ends[0].record()
        for end in ends[1:]:
            work()
            end.record()
        ends[-1].synchronize()
        return median(1e-3 * one.elapsed_time(other) for one, other in pairwise(ends))
    found: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return median(found)


def measured(step: Step, rows: int, lengths: dict[int, float], flops: dict[int, float], times: int) -> dict[str, Any]:
    """One row of the table: steps of each text length, weighed by their share."""
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
    taken, operations = 0.0, 0.0
    for above, length in reversed(list(pairwise([0, *sorted(lengths)]))):  # the largest first: memory is taken once
        batch, part = step.batch(rows, length, above=above), lengths[length]
        taken += part * seconds(lambda batch=batch: step.update(batch), step.device, warm=3, times=times)
        operations += part * rows * flops[length]
    share: float | str | None = None
    if step.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(step.device))
        share = "unknown peak" if peak is None else round(operations / taken / peak, 4)
    return {
        "rows": rows,
        "step_ms": round(1e3 * taken, 2),
        "samples_per_s": round(rows / taken, 1),
        "tflops": round(operations / taken / 1e12, 2),
        "share_of_peak": share,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if step.device.type == "cuda" else None,
    }


def that_fit(step: Step, rows: int, lengths: dict[int, float], flops: dict[int, float], times: int) -> dict[str, Any]:
    """As `measured`, with half of the rows as often as needed."""
    while True:
        try:
            return measured(step, rows, lengths, flops, times)
        except torch.cuda.OutOfMemoryError:
            if rows <= 16:
                raise
        rows //= 2
        step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Of torch's attention: the one that torch takes by default on these GPUs, and the other that could be faster."""


def attention_rows(name: str, rows: int, side: int, device: torch.device, times: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of one layer's attention in the towers of a size, by each kernel."""
    vision, text = CLIP_SIZES[name]["vision_config"], CLIP_SIZES[name]["text_config"]
    shapes = {"images": (vision, 1 + (side // vision["patch_size"]) ** 2, False), "texts": (text, LONGEST, True)}
    dtype = AUTOCAST[choose_precision("auto", device)]
    for kind, (tower, tokens, causal) in shapes.items():
        heads = tower["num_attention_heads"]
        shape = (rows, tokens, heads, tower["hidden_size"] // heads)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

        def work(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> None:
            result = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
            torch.autograd.grad(result, (q, k, v), torch.ones_like(result))

        row: dict[str, Any] = {"name": f"attention of {name}, {kind}", "rows": rows}
        for kernel, backend in KERNELS.items():
            if device.type == "cuda" or backend is SDPBackend.FLASH_ATTENTION:
                with sdpa_kernel(backend):
                    row[f"{kernel}_ms"] = round(1e3 * seconds(work, device, warm=3, times=times), 3)
        yield row


def rows_of(name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of one model, those that take longest last: a shape is compiled for each bound."""
    device = torch.device(given.device)
    side, rows, times = (32, 8, 1) if given.small else (224, ROWS[name], given.times)
    padded, bucketed = {LONGEST: 1.0}, text_lengths()
    if given.small:
        bucketed = {min(bucketed): 0.5, max(bucketed): 0.5}
    step = Step(name, device, compiled=False, side=side)
    flops = {length: step.flops(length) for length in sorted({*padded, *bucketed})}

    if name in CLIP_SIZES:
        yield from attention_rows(name, rows, side, device, times)
    fits = rows

    def row(form: str, lengths: dict[int, float]) -> dict[str, Any]:
        nonlocal fits
        values = that_fit(step, rows, lengths, flops, times)
        fits = values["rows"]
        return {"name": f"{name}, {form}", **values}

    yield row("padded to 77, eager", padded)
    if given.small:  # goes the same way, without the minutes of a compiler
        parallel.BACKEND = "aot_eager"
    missing = compiler_error(device, parallel.BACKEND)
    if missing:
        yield {"name": f"{name}, compiled", "error": f"torch.compile builds no code here: {missing}"}
    else:
        parallel.compile_blocks(step.model)
        yield row("padded to 77, compiled", padded)
        if name in ("vit_b_32", "tiny"):
            plain, step.loss = step.loss, ContrastiveLoss("clip", miner=miners.TopK(64))
            yield row("padded to 77, compiled, mining top_k 64", padded)
            step.loss = plain
    if given.profile and name in ("vit_b_16", "tiny"):
        write_profile(step, fits, given.profile)
    yield row(f"bucketed, {'eager' if missing else 'compiled'}", bucketed)
    if name == "vit_b_32" and find_spec("open_clip") is not None:
        del step  # its memory is the other model's
        yield of_open_clip(fits, device, times)


def of_open_clip(rows: int, device: torch.device, times: int) -> dict[str, Any]:
    """A step of open_clip's own ViT-B/32 as its trainings make it: autocast, its loss, clipping, fused AdamW."""
    package = import_module("open_clip")
    model = package.create_model("ViT-B-32", precision="amp_bf16", device=device).train()
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), package.ClipLoss()
    images = torch.randn(rows, 3, 224, 224, device=device)
    texts = torch.randint(1, VOCABULARY - 2, (rows, LONGEST), device=device)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(*model(images, texts)[:3])
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    taken = seconds(update, device, warm=3, times=times)
    values = {"rows": rows, "step_ms": round(1e3 * taken, 2), "samples_per_s": round(rows / taken, 1)}
    return {"name": "open_clip ViT-B-32, padded to 77, eager", **values}


def write_profile(step: Step, rows: int, path: Path) -> None:
    """The kernels of a step that take most of its time."""
    batch = step.batch(rows, LONGEST)
    step.update(batch)
    with torch.profiler.profile() as profile:
        step.update(batch)
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
    key = "self_device_time_total" if step.device.type == "cuda" else "self_cpu_time_total"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=80) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", nargs="+", default=list(ROWS), choices=[*ROWS, "micro", "tiny"])
    parser.add_argument("--times", type=int, default=8, help="timed steps of each shape")
    parser.add_argument("--profile", type=Path, help="file for the kernels of a step of ViT-B/16")
    parser.add_argument("--small", action="store_true", help="few rows of small images, to rehearse this script")
    given = parser.parse_args()
    device = torch.device(given.device)
    with numerics(choose_precision("auto", device), device):
        for name in given.models:
            for row in rows_of(name, given):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
