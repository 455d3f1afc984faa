"""The windows of an epoch: which rows each lane share reads, in which order, and in which buckets they are.

A lane share is one share of the batch in one lane. Lane shares are numbered lane by lane: share s of lane l is
l · num_shares + s; L = num_lanes · num_shares. `EpochWindows` asks for the sizes of the shards alone, `WindowRows` for
the bucket of each row of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import BucketPolicy, Shapes
from mmdata.plan.mixture import Mixture, ShardSpan, cover_table, draw_groups, form_units, spread_groups
from mmdata.plan.ranges import (
    RepeatedShards,
    RowRanges,
    Window,
    assign_to_lanes,
    concatenate,
    cut_windows,
    interleave,
    passes_of,
    rows_of,
)
from mmdata.plan.rows import Rows, assign_buckets, selection_of
from mmdata.seeding import Purpose, permutation

Ints = NDArray[np.int64]


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
        self._mixture = mixture
        self._num_lanes = num_lanes
        self._window_rows = window_rows
        self._permutation = permutation
        # the datasets of each lane share
        self._datasets: list[list[RepeatedShards]] = [[] for _ in range(num_lanes * len(mixture.shares))]
        number = 0  # of the dataset
        for position, share in enumerate(mixture.shares):
            for span in share.spans:
                for lane, shards in enumerate(self._split(span, number, starts)):
                    # an empty lane only pads its part of the first share, but it can never fill its part of another
                    if shards.num_rows == 0 and position > 0:
                        raise ValueError(
                            f"lane {lane} of the dataset of shards {span.first_shard} to {span.last_shard - 1} has "
                            "no rows to repeat; set num_lanes lower"
                        )
                    self._datasets[lane * len(mixture.shares) + position].append(shards)
                number += 1
        if all(rate < 1 for lane_share in self._first_shares for rate in self._rates(lane_share)):
            raise ValueError("repeat: so few rows are taken that an epoch may have none; set repeat higher")
        weights = np.array([share.weight for share in mixture.shares] * num_lanes)[:, None]  # (L, 1)
        rows = np.array(batch_sizes)[None, :] * weights // (mixture.total_weight * num_lanes)
        self.rows_per_batch: Ints = rows // mixture.unit_rows

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch, if all batches have one size and no rows stand in groups."""
        # The lane with the most rows decides; lanes that end before it are padded.
        return max(
            -(-sum(end - begin for begin, end in self._bounds(i, epoch)) // int(self.rows_per_batch[i, 0]))
            for i in self._first_shares
        )

    def windows(self, epoch: int) -> list[list[Window]]:
        """The windows of each lane share in an epoch."""
        shares, num_lane_shares = self._mixture.shares, len(self._datasets)
        # a repeated dataset goes on where the epochs before have left it
        done, steps = (sum(map(self.num_steps, range(epoch))), self.num_steps(epoch)) if len(shares) > 1 else (0, 0)
        result: list[list[Window]] = []
        for i, datasets in enumerate(self._datasets):
            rows = int(self.rows_per_batch[i, 0])
            bounds = self._bounds(i, epoch) if i in self._first_shares else [(done * rows, (done + steps) * rows)]
            ranges = interleave([shards.ranges(*pair) for shards, pair in zip(datasets, bounds, strict=True)])
            weight = shares[i % len(shares)].weight
            window_rows = -(-self._window_rows * weight // (self._mixture.total_weight * self._num_lanes))
            cuts = cut_windows(ranges.ends - ranges.begins, window_rows)
            # no two windows of an epoch share a position, however many windows each lane share has
            result.append([Window(ranges.take(cut), n * num_lane_shares + i) for n, cut in enumerate(cuts)])
        return result

    def _bounds(self, lane_share: int, epoch: int) -> list[tuple[int, int]]:
        """The positions at which an epoch begins and ends in the endless passes of each dataset of a first share."""
        return [(math.floor(epoch * rate), math.floor((epoch + 1) * rate)) for rate in self._rates(lane_share)]

    def _rates(self, lane_share: int) -> list[Fraction]:
        """Rows that each dataset of a first share gives an epoch."""
        # A fraction of the decimal as it is written: 0.29 of 100 rows are 29; the float 0.29 · 100 is 28.999….
        datasets = zip(self._mixture.shares[0].spans, self._datasets[lane_share], strict=True)
        return [Fraction(str(span.repeat)) * shards.num_rows for span, shards in datasets]

    @property
    def _first_shares(self) -> range:
        """The lane shares of the first share, whose rows make the epoch; the others are repeated as needed."""
        return range(0, len(self._datasets), len(self._mixture.shares))

    def _split(self, span: ShardSpan, number: int, starts: Ints) -> list[RepeatedShards]:
        """Each lane's shards of a dataset."""
        num_shards = span.last_shard - span.first_shard
        if self._num_lanes > num_shards:
            raise ValueError(f"{self._num_lanes} lanes need as many shards: got {num_shards}; set num_lanes lower")
        sizes = np.diff(starts[span.first_shard : span.last_shard + 1])
        if not sizes.any():
            raise ValueError(
                f"the dataset of shards {span.first_shard} to {span.last_shard - 1} has no rows; leave it out"
            )
        lanes: list[RepeatedShards] = []
        for shards in assign_to_lanes(sizes, self._num_lanes, seed=self._permutation.seed, position=number):
            order = partial(self._shard_order, position=number * self._num_lanes + len(lanes))
            lanes.append(RepeatedShards(span.first_shard + shards, starts, order))
        return lanes

    def _shard_order(self, count: int, number: int, *, position: int) -> Ints:
        return self._permutation(count, number, Purpose.SHARD_ORDER, position)


def _check(mixture: Mixture, batch_sizes: list[int], num_lanes: int) -> None:
    """Raise ValueError where lanes, shares and groups do not divide the batches."""
    if len(mixture.shares) > 1 and (mixture.groups or len(set(batch_sizes)) > 1):
        raise ValueError(
            "weights: a fixed share of every batch needs batches of one size without groups; mix by repeat instead"
        )
    for size in sorted(set(batch_sizes)):
        if num_lanes < 1 or size % num_lanes:
            raise ValueError(f"num_lanes must divide every batch size: got {num_lanes}, and batches of {size} rows")
        if size // num_lanes % mixture.unit_rows:
            raise ValueError(
                f"groups of {mixture.unit_rows} rows do not fill a batch of {size} rows with num_lanes {num_lanes}: "
                "set global_batch_size (batch_multiple, with token_budget) to a multiple of "
                f"{mixture.unit_rows * num_lanes}"
            )
        weights = [share.weight for share in mixture.shares]
        if any(size * weight % (mixture.total_weight * num_lanes) for weight in weights):
            multiple = mixture.total_weight // math.gcd(*weights) * num_lanes
            raise ValueError(
                f"weights {' : '.join(map(str, weights))} do not share a batch of {size} rows with num_lanes "
                f"{num_lanes} exactly: set global_batch_size to a multiple of {multiple}"
            )


class WindowRows:
    """The units of windows. A unit is one row, or the rows of a group that stand together in a batch.

    Args:
        rows: of the corpus; where they have a selection, windows are ranges of its places.
        policy: gives each row its bucket.
        mixture: says which datasets there are, and which rows stand together.
        permutation: orders the units of a window.

    Attributes:
        num_buckets: K, of the policy.
        unit_rows: rows of a unit.
    """

    def __init__(self, rows: Rows, policy: BucketPolicy, mixture: Mixture, permutation: KeyedPermutation) -> None:
        self._rows = rows
        self._selection = selection_of(rows)
        self._policy = policy
        self._mixture = mixture
        self._permutation = permutation
        self._covers = cover_table(policy.buckets) if mixture.groups else None
        self._counted: dict[tuple[int, int], tuple[Ints, NDArray[np.integer[Any]]]] = {}  # until they are read
        self.num_buckets = len(policy.buckets)
        self.unit_rows = mixture.unit_rows

    def units(self, window: Window, epoch: int) -> tuple[Ints, NDArray[np.integer[Any]]]:
        """The units of a window in a random order.

        Returns:
            occurrences, int64 (n, unit_rows); and the bucket of each unit, int (n,).
        """
        occurrences, bucket_of = self._counted.pop((epoch, window.position), None) or self._bucketed(window)
        order = self._permutation(len(occurrences), epoch, Purpose.ROW_ORDER, window.position)
        occurrences, bucket_of = occurrences[order], bucket_of[order]
        groups = self._mixture.groups
        if groups is None or self._covers is None:
            return occurrences[:, None], bucket_of
        labels = np.asarray(groups.of_rows[rows_of(occurrences)], np.int64)
        if groups.share < 1:
            draw = partial(self._permutation, epoch=epoch, purpose=Purpose.GROUP_SHARE, position=window.position)
            labels = draw_groups(labels, groups.size, groups.share, draw)
        units, bucket_of = form_units(groups, labels, bucket_of, self._covers)
        # form_units sorts by label: the units need a random order of their own
        order = self._permutation(len(units), epoch, Purpose.UNIT_ORDER, window.position)
        if groups.share < 1:
            order = order[spread_groups(units[order], labels, bucket_of[order])]
        return np.where(units < 0, -1, occurrences[units])[order], bucket_of[order]

    def arrivals(self, windows: list[list[Window]], epoch: int, rounds: range) -> Ints:
        """How many units some rounds bring to each bucket of each lane share: int64 (L, len(rounds), K)."""
        arrivals = np.zeros((len(windows), len(rounds), self.num_buckets), np.int64)
        # Where one round is counted row by row, and by the rank that reads all of its windows next, that is done once.
        self._counted.clear()  # of a round that was passed over on the way to a later one
        is_read_next = len(rounds) == 1 and len(windows) == len(self._mixture.shares) and self._selection is not None
        for own, counts in zip(windows, arrivals, strict=True):
            of_rounds = own[rounds.start : rounds.stop]  # a lane share may have fewer windows than rounds
            if self._mixture.groups is not None:
                # which rows stand together depends on the random order, so no histogram tells a unit's bucket
                for window, arrived in zip(of_rounds, counts, strict=False):
                    arrived[:] = np.bincount(self.units(window, epoch)[1], minlength=self.num_buckets)
            elif is_read_next:
                for window, arrived in zip(of_rounds, counts, strict=False):
                    found = self._counted[epoch, window.position] = self._bucketed(window)
                    arrived[:] = np.bincount(found[1], minlength=self.num_buckets)
            else:
                of_ranges = np.repeat(np.arange(len(of_rounds)), [len(window.ranges.shards) for window in of_rounds])
                np.add.at(counts, of_ranges, self._count(concatenate([window.ranges for window in of_rounds])))
        return arrivals

    def _bucketed(self, window: Window) -> tuple[Ints, NDArray[np.integer[Any]]]:
        """The occurrences of a window, and the bucket of each."""
        occurrences = window.ranges.occurrences(self._selection)
        return occurrences, self._assign(occurrences)

    def _count(self, ranges: RowRanges) -> Ints:
        """Rows of each range by bucket, int64 (n, K)."""
        starts = self._rows.starts if self._selection is None else self._selection.starts
        counts = np.zeros((len(ranges.shards), self.num_buckets), np.int64)
        # Most ranges are whole shards, whose counts the manifest may know. Only the first and the last range of a
        # dataset in an epoch can be parts of shards: their rows are looked at one by one.
        is_whole = (ranges.begins == starts[ranges.shards]) & (ranges.ends == starts[ranges.shards + 1])
        if not is_whole.all():
            partial = np.flatnonzero(~is_whole)
            parts = ranges.take(partial)
            np.add.at(
                counts,
                (np.repeat(partial, parts.ends - parts.begins), self._assign(parts.occurrences(self._selection))),
                1,
            )
        for number in np.unique(ranges.passes[is_whole]).tolist():
            of_pass = np.flatnonzero(is_whole & (ranges.passes == number))
            counts[of_pass] = self._rows.bucket_counts(self._policy, number, ranges.shards[of_pass])
        return counts

    def _assign(self, occurrences: Ints) -> NDArray[np.integer[Any]]:
        return assign_occurrences(self._rows, self._policy, occurrences)


def assign_occurrences(rows: Rows, policy: BucketPolicy, occurrences: Ints) -> NDArray[np.integer[Any]]:
    """The bucket of each of n occurrences, int (n,)."""
    return assign_buckets(policy, shapes_of(rows, occurrences), rows_of(occurrences))


def shapes_of(rows: Rows, occurrences: Ints) -> Shapes:
    """Shapes of n occurrences, whatever their passes; the pass decides the caption, and so the length."""
    numbers, passes = rows_of(occurrences), passes_of(occurrences)
    if len(occurrences) and (passes == passes[0]).all():
        return rows.shapes(numbers, int(passes[0]))
    columns = np.empty((len(Shapes._fields), len(occurrences)), np.int64)
    for number in np.unique(passes).tolist():
        of_pass = passes == number
        columns[:, of_pass] = rows.shapes(numbers[of_pass], number)
    return Shapes(*columns)
