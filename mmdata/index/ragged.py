"""Lists of different lengths in one flat array: list i is values[offsets[i]:offsets[i + 1]]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> Ints:
    """Offsets (n + 1,) of lists with these lengths: [2, 0, 3] -> [0, 2, 2, 5]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def spans(begins: npt.NDArray[np.integer[Any]], lengths: Ints) -> Ints:
    """Positions begins[i] … begins[i] + lengths[i] − 1 of all i, concatenated: ([3, 9], [2, 1]) -> [3, 4, 9]."""
    return np.arange(int(lengths.sum())) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
