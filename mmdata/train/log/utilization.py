"""The operations of a model for a batch, counted on a copy that has shapes and no numbers; and the most of a GPU."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmdata.batch import Batch, to_device

logger = logging.getLogger("mmdata")

PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 150.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""10¹² operations a second in dense products of bfloat16 with sums in float32; the makers' data sheets."""
_OTHER = re.compile(r"laptop|max-q|mobile|ti\b|super|\bD\b|MIG", re.IGNORECASE)
"""A part that has another peak than the one whose name it bears."""
_ROWS = 2
"""Rows whose operations are counted: a batch norm refuses one."""


class FlopCounter:
    """Counts the operations of batches.

    Args:
        model: as it is before it is compiled or sharded; not kept.

    Attributes:
        knows: False once the model cannot be counted: that of a user may hold a lock, or need numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.knows = True
        self._of_a_row: dict[tuple[object, ...], float] = {}
        try:
            self._copy = without_numbers(model)
        except Exception as error:
            self._fail(error)

    def count(self, batch: Batch) -> float:
        """Operations of a batch's products, forward and backward; 0 where they are not known."""
        entries = cast("dict[str, Any]", batch)
        shape = tuple((name, value.shape[1:]) for name, value in entries.items() if isinstance(value, Tensor))
        if self.knows and shape not in self._of_a_row:
            first = {name: value[:_ROWS] for name, value in entries.items()}
            try:
                self._of_a_row[shape] = count_flops(self._copy, first) / len(first["valid"])
            except Exception as error:
                self._fail(error)
        return self._of_a_row[shape] * len(batch["valid"]) if self.knows else 0.0

    def _fail(self, error: Exception) -> None:
        self.knows = False
        logger.info(
            "the log shows no operations a second: the model cannot be copied and run without numbers (%s)", error
        )


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's "meta" device, which takes no memory for weights."""
    memo: dict[int, object] = {}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    found = copy.deepcopy(model, memo)
    part: Any
    for part in found.modules():
        if getattr(part, "gradient_checkpointing", False):  # what is computed a second time is no progress
            part.gradient_checkpointing = False
    return found


def count_flops(model: nn.Module, batch: Mapping[str, object]) -> float:
    """Operations of a batch's products, forward and backward: a multiplication and an addition are two.

    Args:
        model: from `without_numbers`.
        batch: on any device; its numbers are not read.
    """
    # The fused kernels compute products of attention again in backward, and are counted by other rules.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.enable_grad():
        output = model(to_device(batch, "meta"))  # type: ignore[arg-type]
        features = [part.float().sum() for part in output if isinstance(part, Tensor) and part.requires_grad]
        if features:
            torch.stack(features).sum().backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


def peak_flops(name: str) -> float | None:
    """Operations a second of a device in dense products of bfloat16; None: not in the table.

    Example:
        "NVIDIA H100 80GB HBM3" gives 989e12; "NVIDIA L40" gives 181e12, not that of the L4.
    """
    if _OTHER.search(name):
        return None
    known = [each for each in PEAK_TFLOPS if re.search(rf"(?<![\w-]){re.escape(each)}(?![\w])", name)]
    return 1e12 * PEAK_TFLOPS[max(known, key=len)] if known else None
