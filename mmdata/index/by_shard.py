"""Groups the rows of a request by shard, so that each shard's columns are indexed once, and restores their order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LONG_RUN = 16
"""Rows are not sorted where runs of rows of the same shard have at least this mean length, as in a window of shards."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class RowsByShard(NamedTuple):
    """The rows of a request, grouped by shard.

    Attributes:
        order: int64 (n,), the permutation that groups the request; None: the request is grouped as it is.
        parts: (shard, which rows of the grouped request, their numbers within the shard: (k,) or a slice). Without a
            permutation a shard may have several parts.
    """

    order: Rows | None
    parts: list[tuple[int, slice, Rows | slice]]

    def restore(self, values: Array) -> Array:
        """Values (n,) of the grouped rows, in the order of the request."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result


def group_by_shard(shards: Rows, local: Rows) -> RowsByShard:
    """Group rows by shard.

    Args:
        shards: (n,), the shard of each row.
        local: (n,), the number of each row within its shard.
    """
    order, cuts = None, np.flatnonzero(np.diff(shards)) + 1
    if len(cuts) * LONG_RUN > len(shards):
        order = np.argsort(shards, kind="stable")
        shards, local = shards[order], local[order]
        cuts = np.flatnonzero(np.diff(shards)) + 1
    bounds = np.unique([0, *cuts.tolist(), len(shards)])
    # A part without a break is a range of consecutive rows: a slice reads it without a copy.
    breaks = np.searchsorted(np.flatnonzero(np.diff(local) != 1), [bounds[:-1], bounds[1:] - 1])
    parts: list[tuple[int, slice, Rows | slice]] = []
    for (a, b), consecutive in zip(pairwise(bounds.tolist()), (breaks[0] == breaks[1]).tolist(), strict=True):
        within = slice(int(local[a]), int(local[a]) + b - a) if consecutive else local[a:b]
        parts.append((int(shards[a]), slice(a, b), within))
    return RowsByShard(order, parts)
