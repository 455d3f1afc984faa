"""Reads windows: the rows of a window in a random order, each with its bucket; with groups, units of several rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import BucketPolicy, Shapes
from mmdata.plan.groups import cover_table, draw_groups, form_units, spread_groups
from mmdata.plan.mixture import Mixture
from mmdata.plan.row_ranges import RowRanges, Window, concatenate, passes_of, rows_of
from mmdata.plan.rows import Rows, assign_buckets, selection_of
from mmdata.plan.windows import KeyedPermutation
from mmdata.seeding import Purpose

Ints = NDArray[np.int64]


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
        return assign_buckets(self._policy, shapes_of(self._rows, occurrences), rows_of(occurrences))


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
