"""The rows of a lane share: read window by window, and waiting by bucket until the schedule takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import BucketPolicy
from mmdata.plan.groups import cover_table, draw_groups, form_units, spread_groups
from mmdata.plan.mixture import Mixture
from mmdata.plan.rows import Rows, rows_of
from mmdata.plan.schedule import MergedBatch, Schedule
from mmdata.plan.windows import KeyedPermutation, RowRanges, Window, concatenate
from mmdata.seeding import Purpose

Ints = NDArray[np.int64]
Buckets = NDArray[np.integer[Any]]


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
        self._policy = policy
        self._groups, self._num_shares = mixture.groups, len(mixture.shares)
        self._permutation = permutation
        self._covers = cover_table(policy.buckets) if mixture.groups else np.empty((0, 0), np.int64)
        self._counted: dict[tuple[int, int], tuple[Ints, Buckets]] = {}  # until they are read
        self.num_buckets = len(policy.buckets)
        self.unit_rows = mixture.unit_rows

    def units(self, window: Window, epoch: int) -> tuple[Ints, Buckets]:
        """The units of a window in a random order.

        Returns:
            occurrences, int64 (n, unit_rows), -1 for padding; and the bucket of each unit, int (n,).
        """
        occurrences, bucket_of = self._counted.pop((epoch, window.position), None) or self._bucketed(window.ranges)
        order = self._permutation(len(occurrences), epoch, Purpose.ROW_ORDER, window.position)
        occurrences, bucket_of = occurrences[order], bucket_of[order]
        groups = self._groups
        if groups is None:
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
        is_read_next = len(rounds) == 1 and len(windows) == self._num_shares and self._rows.selection is not None
        for own, counts in zip(windows, arrivals, strict=True):
            of_rounds = own[rounds.start : rounds.stop]  # a lane share may have fewer windows than rounds
            if self._groups is not None:
                # which rows stand together depends on the random order, so no histogram tells a unit's bucket
                for window, arrived in zip(of_rounds, counts, strict=False):
                    arrived[:] = np.bincount(self.units(window, epoch)[1], minlength=self.num_buckets)
            elif is_read_next:
                for window, arrived in zip(of_rounds, counts, strict=False):
                    found = self._counted[epoch, window.position] = self._bucketed(window.ranges)
                    arrived[:] = np.bincount(found[1], minlength=self.num_buckets)
            else:
                of_ranges = np.repeat(np.arange(len(of_rounds)), [len(window.ranges.shards) for window in of_rounds])
                np.add.at(counts, of_ranges, self._count(concatenate([window.ranges for window in of_rounds])))
        return arrivals

    def _bucketed(self, ranges: RowRanges) -> tuple[Ints, Buckets]:
        """The occurrences of some ranges, and the bucket of each."""
        occurrences = ranges.occurrences(self._rows.selection)
        return occurrences, self._rows.buckets_of(occurrences, self._policy)

    def _count(self, ranges: RowRanges) -> Ints:
        """Rows of each range by bucket, int64 (n, K)."""
        places = self._rows.places
        counts = np.zeros((len(ranges.shards), self.num_buckets), np.int64)
        # Most ranges are whole shards, whose counts the manifest may know. Only the first and the last range of a
        # dataset in an epoch can be parts of shards: their rows are looked at one by one.
        is_whole = (ranges.begins == places[ranges.shards]) & (ranges.ends == places[ranges.shards + 1])
        if not is_whole.all():
            partial = np.flatnonzero(~is_whole)
            parts = ranges.take(partial)
            np.add.at(counts, (np.repeat(partial, parts.ends - parts.begins), self._bucketed(parts)[1]), 1)
        for number in np.unique(ranges.passes[is_whole]).tolist():
            of_pass = np.flatnonzero(is_whole & (ranges.passes == number))
            counts[of_pass] = self._rows.bucket_counts(self._policy, number, ranges.shards[of_pass])
        return counts


class LaneQueues:
    """First-in, first-out queues of units, one for each bucket.

    Args:
        window_rows: reads the windows.
        epoch: from 0.
        windows: of this lane share, in the order of the epoch.
        schedule: of the epoch.
        number: of the lane share in the schedule.
    """

    def __init__(
        self, window_rows: WindowRows, epoch: int, windows: list[Window], schedule: Schedule, number: int
    ) -> None:
        self._window_rows = window_rows
        self._epoch = epoch
        self._windows = windows
        self._schedule = schedule
        self._number = number
        self._queues = [np.empty((0, window_rows.unit_rows), np.int64) for _ in range(window_rows.num_buckets)]

    def seek(self, round_: int) -> None:
        """Go to the beginning of a round, from the beginning of the epoch."""
        schedule, number = self._schedule, self._number
        # Rows leave a queue in the order of their arrival, so the rows that still wait are the last that arrived.
        # Only the windows that brought them are read: the cost of a resume does not grow with the round.
        first = schedule.carried_from(number, round_)
        for earlier in range(first, round_):
            self._read_window(earlier)
        if first < round_:
            waiting = schedule.arrived[number, round_ - 1] - schedule.taken[number, round_ - 1]  # (K,)
            pairs = zip(self._queues, waiting.tolist(), strict=True)
            self._queues = [queue[len(queue) - count :] for queue, count in pairs]

    def next_round(self, round_: int) -> list[Ints]:
        """This lane share's rows of each batch of a round: occurrences, int64 (rows_per_batch · unit_rows,)."""
        self._read_window(round_)
        batches: list[Ints] = []
        rows_per_batch = self._schedule.rows_per_batch[self._number].tolist()
        for bucket, count in enumerate(self._schedule.num_batches[round_].tolist()):
            taken = self._take(bucket, count * rows_per_batch[bucket])
            batches += list(taken.reshape(count, rows_per_batch[bucket] * self._window_rows.unit_rows))
        return batches + [self._merge(batch) for batch in self._schedule.merged[round_]]

    def _merge(self, batch: MergedBatch) -> Ints:
        taken = batch.taken[self._number].tolist()
        units = np.concatenate([self._take(bucket, count) for bucket, count in enumerate(taken)])
        return fill_up(units, int(self._schedule.rows_per_batch[self._number, batch.bucket])).reshape(-1)

    def _take(self, bucket: int, count: int) -> Ints:
        queue = self._queues[bucket]
        self._queues[bucket] = queue[count:]
        return queue[:count]

    def _read_window(self, round_: int) -> None:
        """Append the units of a round's window to the queues; a lane share may have fewer windows than rounds."""
        if round_ >= len(self._windows):
            return
        units, bucket_of = self._window_rows.units(self._windows[round_], self._epoch)
        order = np.argsort(bucket_of, kind="stable")  # by bucket, in the window's random order within each
        ends = np.cumsum(np.bincount(bucket_of, minlength=len(self._queues)))
        arrived = np.split(units[order], ends[:-1])
        self._queues = [np.concatenate(pair) for pair in zip(self._queues, arrived, strict=True)]


def fill_up(units: Ints, size: int) -> Ints:
    """`units` (n, m) with units of -1 spread evenly among them, so that the slices of all ranks are about equally full.

    Example:
        fill_up([[7], [8]], 4) == [[-1], [7], [-1], [8]]
    """
    if len(units) == size:
        return units
    padded = np.full((size, units.shape[1]), -1, np.int64)
    if len(units):
        padded[(np.arange(1, len(units) + 1) * size) // len(units) - 1] = units
    return padded
