"""The order in which DDP adds up gradients, the same in a run and after it is resumed.

DDP reduces gradients in flat buffers ("buckets"). It lays them out by the order in which the gradients of its first
backward pass come. The place of a number in its buffer decides in which order the ranks' values are added: from three
ranks on another layout gives other rounding. So the first backward pass is one of zeros, in an order that is fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def fix_reduction_order(ddp: DistributedDataParallel) -> None:
    """Make DDP reduce the last parameter first, from the first step on. A collective; call it before the first step.

    It runs one backward pass without code of the model; gradients are None after it.
    """
    trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    inner = ddp.module
    try:
        ddp.module = _Zeros(trained)
        cast(Tensor, ddp(torch.zeros((), device=trained[0].device))).backward()
    finally:
        ddp.module = inner
    for parameter in trained:
        parameter.grad = None


class _Zeros(nn.Module):
    """Parameters whose gradients, all 0, are computed from the last to the first."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)

    def forward(self, total: Tensor) -> Tensor:
        for parameter in self._in_order:  # backward begins with what was added last
            total = total + 0.0 * parameter.sum()
        return total
