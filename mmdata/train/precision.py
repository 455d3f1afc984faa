"""Number formats: which one a run takes on its device, and what it means for the towers and for float32 products."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast

import torch

Setting = TypeVar("Setting")
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
    cudnn: Any = torch.backends.cudnn
    with _settings_return():
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        cudnn.allow_tf32, cudnn.benchmark = precision != "fp32", True
        # The old switch does not forbid what a new one for all operations allows.
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee" if precision == "fp32" else "tf32"
        yield


@contextmanager
def _settings_return() -> Generator[None]:
    """torch's settings of float32 are after a `with` block what they were before.

    torch has old switches, which this module sets, and new ones, which follow. Once a caller has set a new one, as
    `TrainingArguments(tf32=True)` does, to read the old one is an error. Were only the new ones set inside the block,
    others would get that error there, such as the compiler of torch 2.9.
    """
    backends: Any = torch.backends
    products, convolutions = (backends.cuda.matmul, backends.mkldnn.matmul), (backends.cudnn.conv, backends.cudnn.rnn)
    values = [(switch, switch.fp32_precision) for switch in (*products, *convolutions)]
    matmul = _read(torch.get_float32_matmul_precision, "highest")
    allow_tf32, benchmark = _read(lambda: backends.cudnn.allow_tf32, True), backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32, backends.cudnn.benchmark = allow_tf32, benchmark
        for switch in products:
            switch.fp32_precision = "none"  # torch's default: what is set for all operations
        for switch, value in values:
            if switch.fp32_precision != value:
                switch.fp32_precision = value


def _read(old_switch: Callable[[], Setting], default: Setting) -> Setting:
    """The old switch; torch's default where a new one says otherwise."""
    try:
        return old_switch()
    except RuntimeError:
        return default
