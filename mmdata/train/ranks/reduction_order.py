"""The order in which DDP adds up gradients, kept over a resume.

DDP reduces gradients in flat buffers ("buckets"). It lays them out by the order of the parameters until its first
backward pass is over, and after that by the order in which the gradients came. The place of a number in its buffer
decides in which order the ranks' values are added: from three ranks on another layout gives other rounding. A run that
goes on from a checkpoint therefore takes over the layout that it had.

DDP has no public way to read its layout: this file reads private parts of torch (tested: 2.15). If they have changed, a
checkpoint holds no layout, and a resumed run of three or more ranks may differ in the last digits.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("mmdata")

LAYOUT = "rebuilt_per_bucket_param_indices"
"""Key of DDP's log: numbers of the parameters in each bucket, "4 3 2, 1 0"."""


def reduction_order(model: nn.Module) -> list[int] | None:
    """Numbers of the parameters that are trained, in the order in which DDP reduces their gradients. A collective.

    Call it between two steps: this call makes DDP adopt the order of the first backward pass, if it has not yet.

    Args:
        model: as `distributed.wrap` returns it.

    Returns:
        None without DDP, before the first backward pass, or if this version of torch does not show the layout.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    ddp = cast(Any, model)
    try:
        rebuild, note = ddp.reducer._rebuild_buckets, ddp.logger.set_runtime_stats_and_log
        read = ddp._get_ddp_logging_data
    except AttributeError as error:  # on all ranks, since they have the same version of torch
        logger.debug("torch %s does not tell the layout of DDP's buckets (%s)", torch.__version__, error)
        return None
    rebuild()  # the next forward would begin with this
    layout = str(read().get(LAYOUT, ""))
    if not layout:  # DDP writes it to its log two forwards later
        note()
        layout = str(read().get(LAYOUT, ""))
    numbers = layout.replace(",", " ").split()
    if not all(number.isdecimal() for number in numbers):
        logger.debug("torch %s tells the layout of DDP's buckets in another form: %r", torch.__version__, layout)
        return None
    return [int(number) for number in numbers] or None


def restore_reduction_order(model: nn.Module, order: list[int] | None) -> None:
    """Make DDP reduce gradients in an order from the first step on. A collective; call it before the first step.

    It runs one backward pass of zeros in that order, without code of the model; gradients are None after it.

    Args:
        model: as `distributed.wrap` returns it.
        order: from `reduction_order` of an equal model; None: leave the choice to DDP.
    """
    if not isinstance(model, DistributedDataParallel) or order is None:
        return
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if sorted(order) != list(range(len(trained))):
        return  # other parameters were trained then
    inner = model.module
    try:
        model.module = _Zeros(trained[number] for number in order)
        cast(Tensor, model(torch.zeros((), device=trained[0].device))).backward()
    finally:
        model.module = inner
    for parameter in trained:
        parameter.grad = None


class _Zeros(nn.Module):
    """Parameters whose gradients, all 0, are computed in the order given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self._in_order = tuple(parameters)

    def forward(self, total: Tensor) -> Tensor:
        # Backward begins with what was added last.
        for parameter in reversed(self._in_order):
            total = total + 0.0 * parameter.sum()
        return total
