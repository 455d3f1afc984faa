"""The windows of an epoch: which rows each lane share reads, and in which order. From the sizes of the shards alone.

A lane is a fixed set of shards that fills a fixed part of every global batch, in every epoch. A node that holds the
ranks of a lane therefore reads only that lane's shards.

A lane share is one share of the batch in one lane. Lane shares are numbered lane by lane: share s of lane l is
l · num_shares + s; L = num_lanes · num_shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.groups import mix_evenly
from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.rows import PASS_SHIFT
from mmdata.seeding import Purpose, permutation
from mmdata.tables.selection import Selection

Ints = NDArray[np.int64]


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


@dataclass(frozen=True)
class KeyedPermutation:
    """A random order for each (epoch, purpose, position), a pure function of them; 0 … count-1 without shuffle."""

    seed: int
    shuffle: bool

    def __call__(self, count: int, epoch: int, purpose: Purpose, position: int) -> Ints:
        """An order of `count` things, int64 (count,)."""
        if not self.shuffle:
            return np.arange(count)
        return permutation(count, seed=self.seed, epoch=epoch, purpose=purpose, position=position)


class RepeatedShards:
    """One lane's shards of one dataset, read pass after pass without end; each pass has an order of its own.

    Args:
        shards: int64 (n,), rising.
        starts: first row of each shard of the corpus, then the number of rows.
        repeat: passes in an epoch.
        permutation: orders the shards of a pass.
        position: number of the dataset's lane; it keys the order.

    Attributes:
        rate: rows in an epoch.
    """

    def __init__(
        self, shards: Ints, starts: Ints, repeat: Fraction, permutation: KeyedPermutation, position: int
    ) -> None:
        self.shards, self._starts = shards, starts
        self._permutation, self._position = permutation, position
        self.num_rows = int((starts[shards + 1] - starts[shards]).sum())
        self.rate = repeat * self.num_rows

    def ranges(self, begin: int, end: int) -> RowRanges:
        """The rows at positions begin … end-1, where positions count through all passes."""
        found: list[RowRanges] = []
        for number in range(begin // self.num_rows, -(-end // self.num_rows)) if end > begin else ():
            order = self._permutation(len(self.shards), number, Purpose.SHARD_ORDER, self._position)
            shards = self.shards[order]
            first, sizes = self._starts[shards], self._starts[shards + 1] - self._starts[shards]
            position = number * self.num_rows + np.cumsum(sizes) - sizes  # of each shard's first row
            # `begin` and `end` may lie inside a shard; clipping leaves the other shards whole, or empty
            begins, ends = first + np.clip(begin - position, 0, sizes), first + np.clip(end - position, 0, sizes)
            passes = np.full(len(shards), number, np.int64)
            found.append(RowRanges(shards, begins, ends, passes).take(np.flatnonzero(ends > begins)))
        return concatenate(found)


class EpochWindows:
    """Assigns the shards to lanes once, and cuts each lane share's rows of an epoch into windows.

    Args:
        starts: first row of each shard, then the number of rows: int64 (num_shards + 1,).
        mixture: of the corpus.
        batch_sizes: rows of a global batch of each of the K buckets.
        num_lanes: C.
        window_rows: rows that are shuffled together, at least, over all lane shares.
        permutation: orders the shards.

    Attributes:
        rows_per_batch: int64 (L, K), what each lane share adds to a batch of each bucket; units where rows stand in
            groups.

    Raises:
        ValueError: the arguments do not fit each other.
    """

    def __init__(
        self,
        starts: Ints,
        mixture: Mixture,
        *,
        batch_sizes: list[int],
        num_lanes: int,
        window_rows: int,
        permutation: KeyedPermutation,
    ) -> None:
        _check(mixture, batch_sizes, num_lanes)
        self._starts, self._num_lanes, self._permutation = starts, num_lanes, permutation
        self._num_shares = len(mixture.shares)
        # the datasets of each lane share
        self._datasets: list[list[RepeatedShards]] = [[] for _ in range(num_lanes * self._num_shares)]
        for number, span in enumerate(mixture.spans):
            share = number if self._num_shares > 1 else 0
            for lane, shards in enumerate(self._split(span, number)):
                # an empty lane only pads its part of the first share, but it can never fill its part of another
                if shards.num_rows == 0 and share > 0:
                    raise ValueError(
                        f"lane {lane} of the dataset of shards {span.first_shard} to {span.last_shard - 1} has no rows "
                        "to repeat; set num_lanes lower"
                    )
                self._datasets[lane * self._num_shares + share].append(shards)
        if all(shards.rate < 1 for lane_share in self._first_shares for shards in self._datasets[lane_share]):
            raise ValueError("repeat: so few rows are taken that an epoch may have none; set repeat higher")
        shares = np.tile(mixture.weights, num_lanes)  # (L,) parts of a batch, out of `parts`
        parts = int(shares.sum())
        self.rows_per_batch: Ints = np.outer(shares, batch_sizes) // parts // mixture.unit_rows
        self._window_rows: list[int] = (-(-window_rows * shares // parts)).tolist()

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch, if all batches have one size and no rows stand in groups."""
        # The lane with the most rows decides; lanes that end before it are padded.
        return max(
            -(-sum(end - begin for begin, end in self._bounds(i, epoch)) // int(self.rows_per_batch[i, 0]))
            for i in self._first_shares
        )

    def windows(self, epoch: int) -> list[list[Window]]:
        """The windows of each lane share in an epoch."""
        # a repeated dataset goes on where the epochs before have left it
        repeats = self._num_shares > 1
        done, steps = (sum(map(self.num_steps, range(epoch))), self.num_steps(epoch)) if repeats else (0, 0)
        result: list[list[Window]] = []
        for i, datasets in enumerate(self._datasets):
            rows = int(self.rows_per_batch[i, 0])
            bounds = self._bounds(i, epoch) if i in self._first_shares else [(done * rows, (done + steps) * rows)]
            parts = [shards.ranges(*pair) for shards, pair in zip(datasets, bounds, strict=True)]
            ranges = concatenate(parts).take(mix_evenly([part.ends - part.begins for part in parts]))
            cuts = cut_windows(ranges.ends - ranges.begins, self._window_rows[i])
            # no two windows of an epoch share a position, however many windows each lane share has
            result.append([Window(ranges.take(cut), n * len(self._datasets) + i) for n, cut in enumerate(cuts)])
        return result

    def _bounds(self, lane_share: int, epoch: int) -> list[tuple[int, int]]:
        """The positions at which an epoch begins and ends in the endless passes of each dataset of a first share."""
        rates = [shards.rate for shards in self._datasets[lane_share]]
        return [(math.floor(epoch * rate), math.floor((epoch + 1) * rate)) for rate in rates]

    @property
    def _first_shares(self) -> range:
        """The lane shares of the first share, whose rows make the epoch; the others are repeated as needed."""
        return range(0, len(self._datasets), self._num_shares)

    def _split(self, span: ShardSpan, number: int) -> list[RepeatedShards]:
        """Each lane's shards of a dataset."""
        num_shards = span.last_shard - span.first_shard
        if self._num_lanes > num_shards:
            raise ValueError(f"{self._num_lanes} lanes need as many shards: got {num_shards}; set num_lanes lower")
        sizes = np.diff(self._starts[span.first_shard : span.last_shard + 1])
        if not sizes.any():
            raise ValueError(
                f"the dataset of shards {span.first_shard} to {span.last_shard - 1} has no rows; leave it out"
            )
        # A fraction of the decimal as it is written: 0.29 of 100 rows are 29; the float 0.29 · 100 is 28.999….
        repeat = Fraction(str(span.repeat))
        lanes = assign_to_lanes(sizes, self._num_lanes, seed=self._permutation.seed, position=number)
        return [
            RepeatedShards(span.first_shard + shards, self._starts, repeat, self._permutation, position)
            for position, shards in enumerate(lanes, number * self._num_lanes)
        ]


def _check(mixture: Mixture, batch_sizes: list[int], num_lanes: int) -> None:
    """Raise ValueError where lanes, shares and groups do not divide the batches."""
    weights, unit_rows = mixture.weights, mixture.unit_rows
    if len(weights) > 1 and (mixture.groups or len(set(batch_sizes)) > 1):
        raise ValueError(
            "weights: a fixed share of every batch needs batches of one size without groups; mix by repeat instead"
        )
    for size in sorted(set(batch_sizes)):
        if num_lanes < 1 or size % num_lanes:
            raise ValueError(f"num_lanes must divide every batch size: got {num_lanes}, and batches of {size} rows")
        if size % (unit_rows * num_lanes):
            raise ValueError(
                f"groups of {unit_rows} rows do not fill a batch of {size} rows with num_lanes {num_lanes}: "
                f"set global_batch_size to a multiple of {unit_rows * num_lanes}"
            )
        if size % (sum(weights) * num_lanes):
            raise ValueError(
                f"weights {' : '.join(map(str, weights))} do not share a batch of {size} rows with num_lanes "
                f"{num_lanes} exactly: set global_batch_size to a multiple of {sum(weights) * num_lanes}"
            )


def concatenate(parts: Sequence[RowRanges]) -> RowRanges:
    """The ranges of all parts, one part after the other."""
    empty = RowRanges(*(np.empty(0, np.int64) for _ in RowRanges._fields))
    return RowRanges(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))


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
