"""The queues of one lane share: its rows wait by bucket until the schedule puts them into batches.

A lane share is one share of the batch in one lane (`mmdata.plan.windows`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.row_ranges import Window
from mmdata.plan.schedule import MergedBatch, Schedule
from mmdata.plan.window_rows import WindowRows

Ints = NDArray[np.int64]


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
