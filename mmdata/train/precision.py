"""Number formats: which one a run takes on its device, and what it means for the towers and for float32 products."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, cast

import torch

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
"""A number format that a device computes in."""
AUTOCAST: dict[Precision, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": None,
    "fp32": None,
}
"""Type of the towers' autocast."""


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """The number format that a setting stands for: auto is bf16 on a GPU that has it, else fp32.

    Args:
        wanted: "auto", or a `Precision`.
        device: to compute on.
    """
    if wanted != "auto":
        return cast(Precision, wanted)
    return "bf16" if device.type == "cuda" and _has_bf16(device) else "fp32"


def _has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def numerics(precision: Precision, device: torch.device) -> Generator[None]:
    """How a GPU computes inside a `with` block: products of float32 in TF32 unless `precision` is fp32.

    Convolutions take the algorithm that is fastest for their shape, which is tried once a shape. torch's own settings
    return when the block ends. On a CPU nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    try:
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        cudnn.allow_tf32, cudnn.benchmark = precision != "fp32", True
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


@contextmanager
def full_float32(device: torch.device) -> Generator[None]:
    """Products of float32 in float32 inside a `with` block: TF32 has ten bits, and would make ties of near scores."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
