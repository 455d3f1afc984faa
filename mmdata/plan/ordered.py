"""The plan of an order that is given: exactly this sequence of rows, in batches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmdata.plan.buckets import Bucket
from mmdata.plan.groups import cover_table
from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.plan import Plan, Step, rank_slice
from mmdata.plan.queues import fill_up
from mmdata.plan.rows import MAX_PASS, Rows, occurrences_of, passes_of, rows_of

Ints = NDArray[np.int64]


class OrderedPlan(Plan):
    """Batches of a sequence of rows, in exactly this order, in every epoch.

    A row may come several times; each time is another pass, with another crop and the next of its captions. Step i has
    the rows from i · global_batch_size on. Its image shape is that of most of its rows, and its text length (and its
    numbers of patches and boxes) the smallest that holds them all. The last batch is filled up with masked rows.

    Args:
        plan: of the rows, in another order; all its batches have one size.
        order: int64 (n,), numbers of rows.

    Raises:
        ValueError: `order` is empty, is no list of whole numbers, or has a row that the corpus does not have or does
            not select; or the plan has batches of several sizes.

    Example:
        OrderedPlan(plan, np.argsort(difficulty))  # easy rows first
    """

    def __init__(self, plan: Plan, order: ArrayLike) -> None:
        size, rows = plan.global_batch_size, plan.rows
        once = Mixture(tuple(ShardSpan(span.first_shard, span.last_shard) for span in plan.mixture.spans))
        super().__init__(rows, plan.policy, global_batch_size=size, seed=plan.seed, shuffle=False, mixture=once)
        if set(self.batch_sizes) != {size}:
            raise ValueError("order: a token budget would decide which rows are in a batch: leave one of them out")
        self.order = _checked(order, rows)
        self.num_rows = len(self.order)
        self._passes, self._times = _occurrences(self.order)
        self._covers = cover_table(plan.policy.buckets)

    @property
    def most_rows(self) -> int:
        """As `Plan.most_rows`."""
        return self.num_rows

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return -(-self.num_rows // self.global_batch_size)

    def steps_of_buckets(self, epoch: int) -> list[int]:
        """As `Plan.steps_of_buckets`."""
        counts = Counter(step.bucket for step in self.steps(epoch))
        return [counts.pop(bucket, 0) for bucket in self.policy.buckets]  # of equal ones the first has them

    def identity(self) -> dict[str, str | int | bool | None]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        return {**super().identity(), "order": hashlib.sha256(self.order.tobytes()).hexdigest()[:16]}

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """As `Plan.steps`."""
        last = MAX_PASS // int(self._times.max()) - 1
        if not 0 <= epoch <= last:
            raise ValueError(f"epoch must be 0 … {last} of an order with a row {self._times.max()} times: got {epoch}")
        self.check_ranks(rank, world_size)
        size = self.global_batch_size
        for number in range(start, self.num_steps(epoch)):
            part = slice(number * size, (number + 1) * size)
            occurrences = occurrences_of(self.order[part], epoch * self._times[part] + self._passes[part])
            mine = fill_up(occurrences[:, None], size)[rank_slice(size, rank, world_size), 0]
            yield Step(epoch, number, self._bucket(occurrences), rows_of(mine), passes_of(mine))

    def _bucket(self, occurrences: Ints) -> Bucket:
        """The bucket that holds the rows of a batch."""
        counts = np.bincount(self.rows.buckets_of(occurrences, self.policy))
        bucket = int(counts.argmax())
        for other in np.flatnonzero(counts).tolist():
            bucket = int(self._covers[bucket, other])
        return self.policy.buckets[bucket]


def _checked(order: ArrayLike, rows: Rows) -> Ints:
    """The order as int64; raises a ValueError where it is no list of rows that are planned."""
    given, num_rows = np.asarray(order), int(rows.starts[-1])
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError(f"order must be a list of row numbers, int64 (n,): got {given.dtype} {given.shape}")
    if not len(given):
        raise ValueError("order is empty: give at least one row")
    outside = (given < 0) | (given >= num_rows)
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(
            f"order: entry {place:,} is row {given[place]}, and the rows are 0 to {num_rows - 1:,}; "
            f"{int(outside.sum()):,} of {len(given):,} entries are outside"
        )
    left_out = np.unique(given) if rows.selection is not None else np.empty(0, np.int64)
    for some in rows.planned() if len(left_out) else ():
        left_out = np.setdiff1d(left_out, some, assume_unique=True)
    if len(left_out):
        raise ValueError(
            f"order: {len(left_out):,} of its rows are not selected, such as row {left_out[0]}; leave them out"
        )
    return given.astype(np.int64)


def _occurrences(order: Ints) -> tuple[Ints, Ints]:
    """For each entry of an order: how often its row came before, and how often it comes in all; int64 (n,) each."""
    _, inverse, counts = np.unique(order, return_inverse=True, return_counts=True)
    by_row = np.argsort(inverse, kind="stable")
    before = np.empty(len(order), np.int64)
    before[by_row] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return before, counts[inverse].astype(np.int64)
