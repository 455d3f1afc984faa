"""Lanes: the shards dealt into stripes that stay the same over epochs, each read in windows of an order of its own.

A lane feeds its stripe of every global batch, so a node that holds the ranks of a lane reads that lane's shards only.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.seeding import Purpose, permutation

Ints = NDArray[np.int64]


class Window(NamedTuple):
    """Shards whose rows are shuffled together.

    Attributes:
        shards: int64 (s,), in the order of the epoch.
        position: of the window among all windows of all lanes; no two share it.
    """

    shards: Ints
    position: int


def deal(sizes: Ints, num_lanes: int, *, seed: int) -> list[Ints]:
    """Deal shards to lanes so that the lanes have about equally many rows.

    Args:
        sizes: int64 (num_shards,), rows of each shard.
        num_lanes: C.
        seed: of the run; the epoch plays no part.

    Returns:
        C arrays of shard numbers, each rising. Two lanes differ by at most the rows of the largest shard.

    Method: the largest shard that is left goes to the lane with the fewest rows; equal shards in a random order.
    """
    if num_lanes == 1:
        return [np.arange(len(sizes))]
    shuffled = permutation(len(sizes), seed=seed, epoch=0, purpose=Purpose.LANES)
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    fill = [(0, lane) for lane in range(num_lanes)]
    for shard, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        rows, lane = fill[0]
        lanes[lane].append(shard)
        heapq.heapreplace(fill, (rows + size, lane))
    return [np.sort(np.asarray(lane, np.int64)) for lane in lanes]


def cut_windows(sizes: Ints, window_rows: int) -> list[slice]:
    """Consecutive shards with at least `window_rows` rows together; the last window may have fewer.

    Example:
        cut_windows([3, 3, 3, 3, 1], 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    """
    reached = np.cumsum(sizes)  # rows up to each shard, and with it
    cuts = [0]
    begin = 0
    while (cut := int(np.searchsorted(reached, begin + window_rows)) + 1) < len(sizes):
        cuts.append(cut)
        begin = int(reached[cut - 1])
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
