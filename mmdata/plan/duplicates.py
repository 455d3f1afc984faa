"""Counts the rows of a batch that have the image or the caption of another row. The loss can mask them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Hashes(NamedTuple):
    """Hashes of n rows, int64 (n,) each; rows with an equal image or an equal caption are duplicates."""

    image: Ints
    caption: Ints


HashesOf = Callable[[Ints, Ints], Hashes]
"""(rows, passes) -> their hashes; rows and passes are int64 (n,). The pass decides the caption."""


def count_duplicates(hashes: Hashes) -> int:
    """Rows of a batch with the image or the caption of an earlier row."""
    return int((_repeated(hashes.image) | _repeated(hashes.caption)).sum())


def _repeated(keys: Ints) -> NDArray[np.bool_]:
    """Which keys occur earlier in their batch; bool (n,), as `keys`."""
    repeated = np.ones(len(keys), np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
