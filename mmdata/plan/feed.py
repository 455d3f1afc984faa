"""A feed: the rows of one stream in one lane, on their way through the windows and buckets of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Shapes
from mmdata.plan.groups import form_units
from mmdata.plan.lanes import Pieces, Window, join, passes_of, rows_of
from mmdata.plan.rows import Rows, assign_buckets
from mmdata.plan.schedule import Merged, Schedule
from mmdata.seeding import Purpose

if TYPE_CHECKING:
    from mmdata.plan.plan import Plan

Ints = NDArray[np.int64]


class Feed:
    """Queues of units, one for each bucket. A unit is a row, or the rows of a group that stand together.

    Args:
        plan: whose rows, policy and orders these are.
        epoch: from 0.
        windows: of this feed, in the order of the epoch.
        schedule: of the epoch.
        number: of the feed in the schedule.
    """

    def __init__(self, plan: Plan, epoch: int, windows: list[Window], schedule: Schedule, number: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._windows = windows
        self._schedule = schedule
        self._number = number
        self._waiting = [np.empty((0, plan.mixture.unit_rows), np.int64) for _ in plan.policy.buckets]

    def at(self, round_: int) -> Feed:
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
                self._take(bucket, count * parts[bucket]).reshape(count, parts[bucket] * self._plan.mixture.unit_rows)
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
        units, bucket_of = units_of(self._plan, self._epoch, self._windows[round_])
        order = np.argsort(bucket_of, kind="stable")
        ends = np.cumsum(np.bincount(bucket_of, minlength=len(self._waiting)))
        arrived = np.split(units[order], ends[:-1])
        self._waiting = [np.concatenate(pair) for pair in zip(self._waiting, arrived, strict=True)]


def units_of(plan: Plan, epoch: int, window: Window) -> tuple[Ints, NDArray[np.integer[Any]]]:
    """The units of a window in a random order: uses, int64 (n, unit_rows); and the bucket of each, int (n,)."""
    uses, bucket_of = window.pieces.uses(), _buckets_of(plan, window.pieces)
    order = plan.order(len(uses), epoch, Purpose.ROW_ORDER, window.position)
    uses, bucket_of = uses[order], bucket_of[order]
    if plan.mixture.groups is None:
        return uses[:, None], bucket_of
    labels = np.asarray(plan.mixture.groups.of_rows[rows_of(uses)], np.int64)
    units, bucket_of = form_units(plan.mixture.groups, labels, bucket_of, plan.covers)
    order = plan.order(len(units), epoch, Purpose.UNIT_ORDER, window.position)
    return np.where(units < 0, -1, uses[units])[order], bucket_of[order]


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


def count_arrivals(plan: Plan, epoch: int, windows: list[list[Window]]) -> Ints:
    """How many units have reached each bucket of each feed by the end of each round: int64 (F, R, K)."""
    arrivals = np.zeros((len(windows), max(map(len, windows)), len(plan.policy.buckets)), np.int64)
    tables: dict[tuple[int, int], Ints] = {}  # (first shard of a dataset, pass) -> its shards' rows by bucket
    for own, counts in zip(windows, arrivals, strict=True):
        if plan.mixture.groups is not None:
            for window, brought in zip(own, counts, strict=False):
                brought[:] = np.bincount(units_of(plan, epoch, window)[1], minlength=counts.shape[1])
        else:
            rounds = np.repeat(np.arange(len(own)), [len(window.pieces.shards) for window in own])
            np.add.at(counts, rounds, _count_pieces(plan, join([window.pieces for window in own]), tables))
    return np.cumsum(arrivals, axis=1)


def _count_pieces(plan: Plan, pieces: Pieces, tables: dict[tuple[int, int], Ints]) -> Ints:
    """Rows of each piece by bucket, int64 (n, K); whole shards from counts, parts of shards row by row."""
    starts, num_buckets = plan.rows.starts, len(plan.policy.buckets)
    counts = np.zeros((len(pieces.shards), num_buckets), np.int64)
    whole = (pieces.begins == starts[pieces.shards]) & (pieces.ends == starts[pieces.shards + 1])
    if not whole.all():
        parts = pieces.take(np.flatnonzero(~whole))
        piece = np.repeat(np.flatnonzero(~whole), parts.ends - parts.begins)
        np.add.at(counts, (piece, _buckets_of(plan, parts)), 1)
    for first, last, _ in plan.mixture.sources:
        inside = whole & (first <= pieces.shards) & (pieces.shards < last)
        for number in np.unique(pieces.passes[inside]).tolist():
            if (first, number) not in tables:
                tables[first, number] = plan.rows.bucket_counts(plan.policy, number, slice(first, last))
            here = np.flatnonzero(inside & (pieces.passes == number))
            counts[here] = tables[first, number][pieces.shards[here] - first]
    return counts


def _buckets_of(plan: Plan, pieces: Pieces) -> NDArray[np.integer[Any]]:
    uses = pieces.uses()
    return assign_buckets(plan.policy, shapes_of(plan.rows, uses), rows_of(uses))


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
