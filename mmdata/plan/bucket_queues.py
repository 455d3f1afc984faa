"""A feed: the rows of one stream in one lane, on their way through the windows and buckets of an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.row_ranges import Window
from mmdata.plan.schedule import Merged, Schedule
from mmdata.plan.window_rows import WindowRows

Ints = NDArray[np.int64]


class LaneQueues:
    """Queues of units, one for each bucket.

    Args:
        units: of the corpus.
        epoch: from 0.
        windows: of this feed, in the order of the epoch.
        schedule: of the epoch.
        number: of the feed in the schedule.
    """

    def __init__(self, units: WindowRows, epoch: int, windows: list[Window], schedule: Schedule, number: int) -> None:
        self._units = units
        self._epoch = epoch
        self._windows = windows
        self._schedule = schedule
        self._number = number
        self._waiting = [np.empty((0, units.unit_rows), np.int64) for _ in range(units.num_buckets)]

    def at(self, round_: int) -> LaneQueues:
        """The feed as it is when a round begins: what waits is found again in the windows that brought it."""
        schedule, number = self._schedule, self._number
        first = schedule.carried_from(number, round_)
        for earlier in range(first, round_):
            self._arrive(earlier)
        if first < round_:
            left = schedule.arrived[number, round_ - 1] - schedule.taken[number, round_ - 1]  # (K,) the newest wait
            self._waiting = [
                units[len(units) - count :] for units, count in zip(self._waiting, left.tolist(), strict=True)
            ]
        return self

    def round(self, round_: int) -> list[Ints]:
        """This feed's part of the batches of a round: uses, int64 (part · unit_rows,) each, -1 where filled up."""
        self._arrive(round_)
        parts = self._schedule.parts[self._number].tolist()
        batches: list[Ints] = []
        for bucket, count in enumerate(self._schedule.due[round_].tolist()):
            batches += list(
                self._take(bucket, count * parts[bucket]).reshape(count, parts[bucket] * self._units.unit_rows)
            )
        return batches + [self._merged(batch) for batch in self._schedule.merged[round_]]

    def _merged(self, batch: Merged) -> Ints:
        taken = batch.taken[self._number].tolist()
        units = np.concatenate([self._take(queue, count) for queue, count in enumerate(taken)])
        return fill_up(units, int(self._schedule.parts[self._number, batch.bucket])).reshape(-1)

    def _take(self, bucket: int, count: int) -> Ints:
        units = self._waiting[bucket]
        self._waiting[bucket] = units[count:]
        return units[:count]

    def _arrive(self, round_: int) -> None:
        """Put a window's rows, in a random order, into the queues."""
        if round_ >= len(self._windows):
            return
        units, bucket_of = self._units.of(self._windows[round_], self._epoch)
        order = np.argsort(bucket_of, kind="stable")
        ends = np.cumsum(np.bincount(bucket_of, minlength=len(self._waiting)))
        arrived = np.split(units[order], ends[:-1])
        self._waiting = [np.concatenate(pair) for pair in zip(self._waiting, arrived, strict=True)]


def fill_up(units: Ints, size: int) -> Ints:
    """`units` (n, m) with -1 strewn evenly among them, so that the slices of all ranks are about equally full.

    Example:
        fill_up([[7], [8]], 4) == [[-1], [7], [-1], [8]]
    """
    if len(units) == size:
        return units
    filled = np.full((size, units.shape[1]), -1, np.int64)
    if len(units):
        filled[(np.arange(1, len(units) + 1) * size) // len(units) - 1] = units
    return filled
