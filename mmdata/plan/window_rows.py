"""What is planned: rows in their buckets, or the units that groups make of them; looked at one window at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import BucketPolicy, Shapes
from mmdata.plan.groups import cover_table, form_units
from mmdata.plan.mixture import Mixture
from mmdata.plan.row_ranges import RowRanges, Window, concatenate, passes_of, rows_of
from mmdata.plan.rows import Rows, assign_buckets
from mmdata.plan.windows import KeyedPermutation
from mmdata.seeding import Purpose

Ints = NDArray[np.int64]


class WindowRows:
    """The units of windows. A unit is a row, or the rows of a group that stand together.

    Args:
        rows: of the corpus.
        policy: gives each row its bucket.
        mixture: says which datasets there are, and which rows stand together.
        order: of the units of a window.

    Attributes:
        num_buckets: K, of the policy.
        unit_rows: rows of a unit.
    """

    def __init__(self, rows: Rows, policy: BucketPolicy, mixture: Mixture, order: KeyedPermutation) -> None:
        self._rows = rows
        self._policy = policy
        self._mixture = mixture
        self._order = order
        self._covers = cover_table(policy.buckets) if mixture.groups else None
        self.num_buckets = len(policy.buckets)
        self.unit_rows = mixture.unit_rows

    def of(self, window: Window, epoch: int) -> tuple[Ints, NDArray[np.integer[Any]]]:
        """The units of a window in a random order: uses, int64 (n, unit_rows); and the bucket of each, int (n,)."""
        uses, bucket_of = window.pieces.uses(), self._buckets_of(window.pieces)
        order = self._order(len(uses), epoch, Purpose.ROW_ORDER, window.position)
        uses, bucket_of = uses[order], bucket_of[order]
        groups = self._mixture.groups
        if groups is None or self._covers is None:
            return uses[:, None], bucket_of
        labels = np.asarray(groups.of_rows[rows_of(uses)], np.int64)
        units, bucket_of = form_units(groups, labels, bucket_of, self._covers)
        order = self._order(len(units), epoch, Purpose.UNIT_ORDER, window.position)
        return np.where(units < 0, -1, uses[units])[order], bucket_of[order]

    def arrivals(self, windows: list[list[Window]], epoch: int) -> Ints:
        """How many units have reached each bucket of each feed by the end of each round: int64 (F, R, K)."""
        arrivals = np.zeros((len(windows), max(map(len, windows)), self.num_buckets), np.int64)
        tables: dict[tuple[int, int], Ints] = {}  # (first shard of a dataset, pass) -> its shards' rows by bucket
        for own, counts in zip(windows, arrivals, strict=True):
            if self._mixture.groups is not None:
                for window, brought in zip(own, counts, strict=False):
                    brought[:] = np.bincount(self.of(window, epoch)[1], minlength=self.num_buckets)
            else:
                rounds = np.repeat(np.arange(len(own)), [len(window.pieces.shards) for window in own])
                np.add.at(counts, rounds, self._count_pieces(concatenate([window.pieces for window in own]), tables))
        return np.cumsum(arrivals, axis=1)

    def _count_pieces(self, pieces: RowRanges, tables: dict[tuple[int, int], Ints]) -> Ints:
        """Rows of each piece by bucket, int64 (n, K); whole shards from counts, parts of shards row by row."""
        starts = self._rows.starts
        counts = np.zeros((len(pieces.shards), self.num_buckets), np.int64)
        whole = (pieces.begins == starts[pieces.shards]) & (pieces.ends == starts[pieces.shards + 1])
        if not whole.all():
            parts = pieces.take(np.flatnonzero(~whole))
            piece = np.repeat(np.flatnonzero(~whole), parts.ends - parts.begins)
            np.add.at(counts, (piece, self._buckets_of(parts)), 1)
        for first, last, _ in self._mixture.sources:
            inside = whole & (first <= pieces.shards) & (pieces.shards < last)
            for number in np.unique(pieces.passes[inside]).tolist():
                if (first, number) not in tables:
                    tables[first, number] = self._rows.bucket_counts(self._policy, number, slice(first, last))
                here = np.flatnonzero(inside & (pieces.passes == number))
                counts[here] = tables[first, number][pieces.shards[here] - first]
        return counts

    def _buckets_of(self, pieces: RowRanges) -> NDArray[np.integer[Any]]:
        uses = pieces.uses()
        return assign_buckets(self._policy, shapes_of(self._rows, uses), rows_of(uses))


def shapes_of(rows: Rows, uses: Ints) -> Shapes:
    """Shapes of n uses of rows, whatever their passes."""
    numbers, passes = rows_of(uses), passes_of(uses)
    if len(uses) and (passes == passes[0]).all():
        return rows.shapes(numbers, int(passes[0]))
    columns = np.empty((len(Shapes._fields), len(uses)), np.int64)
    for number in np.unique(passes).tolist():
        here = passes == number
        columns[:, here] = rows.shapes(numbers[here], number)
    return Shapes(*columns)
