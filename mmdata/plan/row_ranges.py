"""Lanes: the shards dealt into stripes that stay the same over epochs, each read in windows of an order of its own.

A lane feeds its stripe of every global batch, so a node that holds the ranks of a lane reads that lane's shards only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.seeding import Purpose, permutation

Ints = NDArray[np.int64]

PASS_SHIFT = 40
"""A use of a row is one integer: its number in the low 40 bits, the pass over its dataset above; -1 is no row."""


class RowRanges(NamedTuple):
    """Rows of some shards, each piece consecutive rows of one shard in one pass; int64 (n,) each.

    Attributes:
        shards: numbers.
        begins: first row.
        ends: row after the last.
        passes: how often the dataset was passed over before.
    """

    shards: Ints
    begins: Ints
    ends: Ints
    passes: Ints

    def take(self, which: slice | Ints) -> RowRanges:
        """Some of the pieces."""
        return RowRanges(*(column[which] for column in self))

    def uses(self) -> Ints:
        """Every row with its pass, piece by piece."""
        coded = (self.passes << PASS_SHIFT).tolist()
        spans = zip(coded, self.begins.tolist(), self.ends.tolist(), strict=True)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(c + begin, c + end) for c, begin, end in spans)])


class Window(NamedTuple):
    """Rows that are shuffled together.

    Attributes:
        pieces: in the order of the epoch.
        position: of the window among all windows of an epoch; no two share it.
    """

    pieces: RowRanges
    position: int


def occurrences_of(rows: Ints, passes: Ints) -> Ints:
    """The uses of n rows in some passes."""
    return rows + (passes << PASS_SHIFT)


def rows_of(uses: Ints) -> Ints:
    """The row of each use; -1 of -1."""
    return np.where(uses < 0, -1, uses & ((1 << PASS_SHIFT) - 1))


def passes_of(uses: Ints) -> Ints:
    """The pass of each use; -1 of -1."""
    return uses >> PASS_SHIFT


class RepeatedShards:
    """One lane's shards of one dataset, passed over again and again, each time in another order.

    Args:
        shards: int64 (n,), rising.
        starts: first row of each shard of the corpus, and the number of rows.
        order: (number of shards, pass) -> the order in which they are read.
    """

    def __init__(self, shards: Ints, starts: Ints, order: Callable[[int, int], Ints]) -> None:
        self.shards = shards
        self._starts = starts
        self._order = order
        self.num_rows = int((starts[shards + 1] - starts[shards]).sum())

    def pieces(self, begin: int, end: int) -> RowRanges:
        """Rows begin … end-1 of the endless sequence of passes."""
        found: list[RowRanges] = []
        for number in range(begin // self.num_rows, -(-end // self.num_rows)) if end > begin else ():
            shards = self.shards[self._order(len(self.shards), number)]
            first, sizes = self._starts[shards], self._starts[shards + 1] - self._starts[shards]
            place = number * self.num_rows + np.cumsum(sizes) - sizes  # of the shard in the endless sequence
            begins, ends = first + np.clip(begin - place, 0, sizes), first + np.clip(end - place, 0, sizes)
            passes = np.full(len(shards), number, np.int64)
            found.append(RowRanges(shards, begins, ends, passes).take(np.flatnonzero(ends > begins)))
        return concatenate(found)


def concatenate(parts: Sequence[RowRanges]) -> RowRanges:
    """The pieces of some parts, one part after the other."""
    nothing = RowRanges(*(np.empty(0, np.int64) for _ in RowRanges._fields))
    return RowRanges(*(np.concatenate(columns) for columns in zip(nothing, *parts, strict=True)))


def interleave(parts: Sequence[RowRanges]) -> RowRanges:
    """The pieces of several datasets as one sequence, in which each keeps its order and its share throughout."""
    if len(parts) == 1:
        return parts[0]
    places: list[NDArray[np.float64]] = []
    for pieces in parts:
        sizes = (pieces.ends - pieces.begins).astype(np.float64)
        places.append((np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1))
    return concatenate(parts).take(np.argsort(np.concatenate(places), kind="stable"))


def assign_to_lanes(sizes: Ints, num_lanes: int, *, seed: int, position: int = 0) -> list[Ints]:
    """Deal shards to lanes so that the lanes have about equally many rows.

    Args:
        sizes: int64 (num_shards,), rows of each shard.
        num_lanes: C.
        seed: of the run; the epoch plays no part.
        position: number of the dataset.

    Returns:
        C arrays of shard numbers, each rising. Two lanes differ by at most the rows of the largest shard.

    Method: the largest shard that is left goes to the lane with the fewest rows; equal shards in a random order.
    """
    if num_lanes == 1:
        return [np.arange(len(sizes))]
    shuffled = permutation(len(sizes), seed=seed, epoch=0, purpose=Purpose.LANES, position=position)
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    fill = [(0, lane) for lane in range(num_lanes)]
    for shard, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        rows, lane = fill[0]
        lanes[lane].append(shard)
        heapq.heapreplace(fill, (rows + size, lane))
    return [np.sort(np.asarray(lane, np.int64)) for lane in lanes]


def cut_windows(sizes: Ints, window_rows: int) -> list[slice]:
    """Consecutive pieces with at least `window_rows` rows together; the last window may have fewer.

    Example:
        cut_windows([3, 3, 3, 3, 1], 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    """
    reached = np.cumsum(sizes)  # rows up to each piece, and with it
    cuts = [0]
    begin = 0
    while (cut := int(np.searchsorted(reached, begin + window_rows)) + 1) < len(sizes):
        cuts.append(cut)
        begin = int(reached[cut - 1])
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
