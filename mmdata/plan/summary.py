"""Counts of an epoch of a plan: steps, rows and padding by bucket. Reads no image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.config.train import MASK_REMEDY
from mmdata.plan.buckets import Bucket
from mmdata.plan.plan import Plan, rank_slice
from mmdata.plan.ranges import occurrences_of
from mmdata.plan.rows import Hashes, HashesOf
from mmdata.plan.windows import shapes_of


@dataclass
class BucketCount:
    """Counts of one bucket in an epoch.

    Attributes:
        steps: global batches.
        rows: rows in those batches, without masked ones.
        tokens: tokens of those rows' captions, truncated to the bucket, without padding.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class PlanSummary:
    """Counts of an epoch.

    Attributes:
        buckets: counts by bucket, in the policy's order.
        rows_by_span: rows that each dataset of the mixture gives; without a mixture, all rows.
        masked: rows of padding.
        merged: rows in another bucket than their own: to fill batches at the end of the epoch, to stay with their
            group, or because the shares of a mixture do not agree on a bucket.
        lift: `same_shard_lift` of the epoch.
        touched: bool (world_size, num_shards), which shards each rank reads.
        duplicates: rows with the image or caption of an earlier row of their batch; None if `hashes` was not given.
        cut: rows whose caption is longer than the text length of their batch.
    """

    buckets: dict[Bucket, BucketCount]
    rows_by_span: list[int]
    masked: int
    merged: int
    lift: float
    touched: NDArray[np.bool_]
    duplicates: int | None = None
    cut: int = 0

    @property
    def rows(self) -> int:
        """Rows of all batches, without masked ones."""
        return sum(count.rows for count in self.buckets.values())

    @property
    def steps(self) -> int:
        """Global batches of the epoch."""
        return sum(count.steps for count in self.buckets.values())

    @property
    def padding_share(self) -> float:
        """Share of the text positions of valid rows that hold padding; 0 without texts."""
        positions = sum(bucket.length * count.rows for bucket, count in self.buckets.items())
        return 1 - self._tokens / positions if positions else 0.0

    def padding_share_at(self, length: int) -> float:
        """What the share would be if every caption were padded to `length`."""
        return 1 - self._tokens / (length * self.rows) if length else 0.0

    @property
    def _tokens(self) -> int:
        return sum(count.tokens for count in self.buckets.values())


def summarize(plan: Plan, epoch: int = 0, *, world_size: int = 1, hashes: HashesOf | None = None) -> PlanSummary:
    """Go through the steps of an epoch and count. The plan must know the caption lengths.

    Args:
        plan: the plan.
        epoch: from 0.
        world_size: number of ranks, for `PlanSummary.touched`.
        hashes: gives the hashes of rows; duplicates are counted if it is given.

    Raises:
        ValueError: world_size does not divide the global batch size.
    """
    plan.check_ranks(0, world_size)
    starts, policy = plan.rows.starts, plan.policy
    buckets = {bucket: BucketCount() for bucket in policy.buckets}
    touched = np.zeros((world_size, len(starts) - 1), np.bool_)
    rows_by_shard = np.zeros(len(starts) - 1, np.int64)
    lift = _Lift(starts)
    merged = masked = duplicates = cut = 0
    for step in plan.steps(epoch):
        shards = np.searchsorted(starts, step.rows, side="right") - 1
        for rank in range(world_size):
            mine = rank_slice(len(step.rows), rank, world_size)
            touched[rank, shards[mine][step.rows[mine] >= 0]] = True
        is_row = step.rows >= 0
        rows, passes = step.rows[is_row], step.passes[is_row]
        lift.add(shards[is_row])
        rows_by_shard += np.bincount(shards[is_row], minlength=len(rows_by_shard))
        shapes = shapes_of(plan.rows, occurrences_of(rows, passes))
        merged += sum(policy.buckets[bucket] != step.bucket for bucket in policy.assign(shapes).tolist())
        masked += len(is_row) - len(rows)
        duplicates += count_duplicates(hashes(rows, passes)) if hashes else 0
        count = buckets[step.bucket]
        count.steps += 1
        count.rows += len(rows)
        cut += int((shapes.length > step.bucket.length).sum())
        count.tokens += int(np.minimum(shapes.length, step.bucket.length).sum())
    rows_by_span = [int(rows_by_shard[first:last].sum()) for first, last, _ in plan.mixture.spans]
    counted = duplicates if hashes else None
    return PlanSummary(buckets, rows_by_span, masked, merged, lift.value, touched, counted, cut)


def same_shard_lift(batches: Iterable[NDArray[np.int64]], starts: NDArray[np.int64]) -> float:
    """How much more often two rows of a batch come from one shard than in a uniform shuffle.

    Args:
        batches: rows of each batch, int64.
        starts: first row of each shard, then the number of rows.

    Returns:
        1.0 for a uniform shuffle; number of shards / n where batches are drawn from n shards at a time.
    """
    lift = _Lift(starts)
    for batch in batches:
        lift.add(np.searchsorted(starts, batch, side="right") - 1)
    return lift.value


class _Lift:
    """Counts the pairs of rows of each batch, and the pairs from one shard."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        sizes = np.diff(starts).astype(np.float64)
        rows = sizes.sum()
        # share of pairs from one shard in a uniform shuffle
        self._expected = (sizes * (sizes - 1)).sum() / max(rows * (rows - 1), 1)
        self._same = self._pairs = 0

    def add(self, shards: NDArray[np.int64]) -> None:
        counts = np.unique(shards, return_counts=True)[1]
        self._same += int((counts * (counts - 1)).sum())
        self._pairs += len(shards) * (len(shards) - 1)

    @property
    def value(self) -> float:
        if not self._pairs or not self._expected:
            return 1.0
        return float(self._same / self._pairs / self._expected)


def count_duplicates(hashes: Hashes) -> int:
    """Rows of a batch with the image or the caption of an earlier row."""
    return int((_repeated(hashes.image) | _repeated(hashes.caption)).sum())


def duplicates_in_words(duplicates: int, *, masked: bool = False) -> str:
    """A number of `count_duplicates`, and what keeps such rows from being negatives of each other.

    Args:
        duplicates: the number.
        masked: train.mask_false_negatives is set.
    """
    remedy = f"; {MASK_REMEDY}" if duplicates else ""
    if masked and duplicates:
        remedy = "; train.mask_false_negatives is set: they are no negatives"
    return f"{duplicates:,} rows meet their own image or caption in a batch{remedy}"


def _repeated(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which keys occur earlier in their batch; bool (n,), as `keys`."""
    repeated = np.ones(len(keys), np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
