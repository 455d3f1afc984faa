"""Ranges of rows: which rows of which shards a lane reads, in which order, and how they are cut into windows.

A lane is a fixed set of shards that fills a fixed part of every global batch, in every epoch. A node that holds the
ranks of a lane therefore reads only that lane's shards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.seeding import Purpose, permutation
from mmdata.tables.selection import Selection

Ints = NDArray[np.int64]

PASS_SHIFT = 40
"""An occurrence of a row is one int64: the row's number in the low 40 bits, the number of the pass over its dataset
above them; -1 is padding. One integer, so that queues of occurrences are split and joined as one array."""

MAX_PASS = 1 << (63 - PASS_SHIFT)
"""Passes are below this number."""

MAX_EPOCH = 2**20 - 1
"""The last epoch that can be asked for: 23 bits are for the pass, which is the epoch × the repeats of a mixture."""


class RowRanges(NamedTuple):
    """Ranges of consecutive rows, each in one shard and one pass; int64 (n,) each.

    Attributes:
        shards: number of the shard.
        begins: first row.
        ends: row after the last.
        passes: how many passes over the dataset came before.
    """

    shards: Ints
    begins: Ints
    ends: Ints
    passes: Ints

    def take(self, which: slice | Ints) -> RowRanges:
        """Some of the ranges."""
        return RowRanges(*(column[which] for column in self))

    def occurrences(self, selection: Selection | None = None) -> Ints:
        """The occurrences of all rows, range by range; with a selection the ranges are of its places."""
        # The pass is added to the bounds of a range, not to each of its rows.
        shifted = (self.passes << PASS_SHIFT).tolist()
        bounds = zip(shifted, self.begins.tolist(), self.ends.tolist(), strict=True)
        if selection is None:
            found = [np.arange(p + begin, p + end) for p, begin, end in bounds]
        else:
            pairs = zip(self.shards.tolist(), bounds, strict=True)
            found = [selection.rows(shard, begin, end) + p for shard, (p, begin, end) in pairs]
        return np.concatenate([np.empty(0, np.int64), *found])


class Window(NamedTuple):
    """Rows that are shuffled together.

    Attributes:
        ranges: in the order of the epoch.
        position: number of the window among all windows of an epoch; it keys the window's random order.
    """

    ranges: RowRanges
    position: int


def occurrences_of(rows: Ints, passes: Ints) -> Ints:
    """The occurrences of n rows in n passes; the inverse of `rows_of` and `passes_of`."""
    return rows + (passes << PASS_SHIFT)


def rows_of(occurrences: Ints) -> Ints:
    """The row of each occurrence; -1 for padding."""
    return np.where(occurrences < 0, -1, occurrences & ((1 << PASS_SHIFT) - 1))


def passes_of(occurrences: Ints) -> Ints:
    """The pass of each occurrence; -1 for padding, since the shift keeps the sign."""
    return occurrences >> PASS_SHIFT


class RepeatedShards:
    """One lane's shards of one dataset, read pass after pass without end; each pass has an order of its own.

    Args:
        shards: int64 (n,), rising.
        starts: first row of each shard of the corpus, then the number of rows.
        order: (number of shards, pass) -> the order in which the pass reads them.
        repeat: passes in an epoch.

    Attributes:
        rate: rows in an epoch.
    """

    def __init__(self, shards: Ints, starts: Ints, order: Callable[[int, int], Ints], repeat: Fraction) -> None:
        self.shards = shards
        self._starts = starts
        self._order = order
        self.num_rows = int((starts[shards + 1] - starts[shards]).sum())
        self.rate = repeat * self.num_rows

    def ranges(self, begin: int, end: int) -> RowRanges:
        """The rows at positions begin … end-1, where positions count through all passes."""
        found: list[RowRanges] = []
        for number in range(begin // self.num_rows, -(-end // self.num_rows)) if end > begin else ():
            shards = self.shards[self._order(len(self.shards), number)]
            first, sizes = self._starts[shards], self._starts[shards + 1] - self._starts[shards]
            position = number * self.num_rows + np.cumsum(sizes) - sizes  # of each shard's first row
            # `begin` and `end` may lie inside a shard; clipping leaves the other shards whole, or empty
            begins, ends = first + np.clip(begin - position, 0, sizes), first + np.clip(end - position, 0, sizes)
            passes = np.full(len(shards), number, np.int64)
            found.append(RowRanges(shards, begins, ends, passes).take(np.flatnonzero(ends > begins)))
        return concatenate(found)


def concatenate(parts: Sequence[RowRanges]) -> RowRanges:
    """The ranges of all parts, one part after the other."""
    empty = RowRanges(*(np.empty(0, np.int64) for _ in RowRanges._fields))
    return RowRanges(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))


def interleave(parts: Sequence[RowRanges]) -> RowRanges:
    """The ranges of several datasets as one sequence that mixes them evenly; each dataset keeps its order."""
    if len(parts) == 1:
        return parts[0]
    # A range goes where its middle lies in its own dataset, as a share of that dataset's rows: 0 begin, 1 end.
    middles: list[NDArray[np.float64]] = []
    for part in parts:
        sizes = (part.ends - part.begins).astype(np.float64)
        middles.append((np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1))
    return concatenate(parts).take(np.argsort(np.concatenate(middles), kind="stable"))


def mix_evenly(counts: Sequence[int] | Ints) -> Ints:
    """An order in which several runs of things, one after the other, are mixed evenly; each run keeps its order.

    Args:
        counts: of each run.

    Returns:
        int64 (sum of counts,), positions in the runs as they lie one after the other: mix_evenly([2, 4]) is
        [2, 0, 3, 4, 1, 5].
    """
    # Thing i of n goes where (i + 0.5) / n lies between 0 and 1.
    middles = [(np.arange(count) + 0.5) / count for count in counts]
    return np.argsort(np.concatenate([np.empty(0), *middles]), kind="stable")


def assign_to_lanes(sizes: Ints, num_lanes: int, *, seed: int, position: int = 0) -> list[Ints]:
    """Assign shards to lanes so that the lanes have about equally many rows.

    Args:
        sizes: int64 (num_shards,), rows of each shard.
        num_lanes: C.
        seed: of the run. The epoch plays no part: a lane keeps its shards.
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
    emptiest = [(0, lane) for lane in range(num_lanes)]  # heap of (rows, lane)
    for shard, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        rows, lane = emptiest[0]
        lanes[lane].append(shard)
        heapq.heapreplace(emptiest, (rows + size, lane))
    return [np.sort(np.asarray(lane, np.int64)) for lane in lanes]


def cut_windows(sizes: Ints, window_rows: int) -> list[slice]:
    """Group consecutive ranges into windows of at least `window_rows` rows; the last window may have fewer.

    Args:
        sizes: int64 (n,), rows of each range.
        window_rows: 1 or more.

    Example:
        cut_windows([3, 3, 3, 3, 1], 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    """
    reached = np.cumsum(sizes)  # rows up to and with each range
    cuts = [0]
    begin = 0
    while (cut := int(np.searchsorted(reached, begin + window_rows)) + 1) < len(sizes):
        cuts.append(cut)
        begin = int(reached[cut - 1])
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
