"""Whether tensors are equal, bit for bit: the crop of a row without an image is NaN, which is unequal to itself."""

from __future__ import annotations

import torch
from torch import Tensor


def equal(a: Tensor, b: Tensor) -> bool:
    """As `torch.equal`, where NaN is equal to NaN."""
    if a.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return torch.equal(a, b)
