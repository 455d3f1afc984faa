"""Chooses the text length bounds that leave the least padding. Imports numpy alone: the GPU half may use it too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_lengths(histogram: NDArray[np.int64], count: int) -> list[int]:
    """The text length bounds that leave the least padding.

    Args:
        histogram: (L,), captions by length: entry i counts those of i tokens. The longest length that occurs is always
            a bound.
        count: largest number of bounds.

    Returns:
        Rising bounds, `count` or fewer.

    Raises:
        ValueError: the histogram is empty.

    Example:
        Lengths 4 (ten captions), 5 (ten) and 20 (one), two bounds: [5, 20] pads 10 tokens; [4, 20] would pad 150.

    Method: dynamic programming over the length at which each bound begins, O(count · lengths²).
    """
    if not np.any(histogram):
        raise ValueError("choose_lengths: the histogram is empty")
    lengths = np.flatnonzero(histogram)
    captions_below = np.concatenate([[0.0], np.cumsum(np.asarray(histogram, np.float64)[lengths])])
    # group[i, j]: tokens of the captions of lengths i … j-1, all padded to the longest of them
    group = (captions_below[None, :] - captions_below[:, None]) * np.concatenate([[0], lengths])[None, :]
    group[np.tril_indices(len(group))] = np.inf
    # cost[j]: least tokens for the first j lengths, with as many bounds as rounds have passed
    cost = np.full(len(lengths) + 1, np.inf)
    cost[0] = 0.0
    begins: list[NDArray[np.int64]] = []  # of each round, [j]: where the last bound's lengths begin
    for _ in range(min(count, len(lengths))):
        total = cost[:, None] + group  # [i, j]: the last bound holds lengths i … j-1
        begins.append(total.argmin(axis=0))
        cost = total.min(axis=0)
    bounds: list[int] = []
    end = len(lengths)
    for begin in reversed(begins):  # back from the last bound to the first
        bounds.append(int(lengths[end - 1]))
        end = int(begin[end])
    return bounds[::-1]
