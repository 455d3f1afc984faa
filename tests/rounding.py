"""What rounding alone may make of a number, for the bounds of tests that compare two ways of computing it.

Processors differ in the order of their sums and in fused multiply-adds. Each of `sums` rounded operations on numbers
of magnitude `scale` is off by at most half a unit in the last place of the result; two ways differ by at most twice
that. The error is absolute: where large numbers cancel, a small difference keeps the error of the large ones, so a
bound relative to the difference promises more than the arithmetic does.
"""

from __future__ import annotations

import torch


def rounding(scale: float, *, sums: int, dtype: torch.dtype = torch.float32) -> float:
    """Largest absolute difference between two ways of computing a number.

    Args:
        scale: magnitude of the largest number that is added or subtracted on the way, such as a logit.
        sums: rounded operations one after another, such as the terms of a sum.
        dtype: of the arithmetic.

    Example:
        Logits of 14.3 in float32, 8 of them in a sum: 14.3 · 1.19e-7 · 8 = 1.4e-5.
    """
    return scale * sums * torch.finfo(dtype).eps


RUN_IN_DOUBLE = rounding(100.0, sums=100_000, dtype=torch.float64)
"""Bound for losses, weights and averages of two whole runs in float64: 2.2e-9.

Logits are at most 100, and fewer than so many rounded operations lie between them and the first input. Adam divides a
gradient by no less than its eps, 1e-8, and multiplies it by the learning rate: where the gradient is nothing but
rounding, 1e-16, a weight moves by 1e-10 in an update.
"""
