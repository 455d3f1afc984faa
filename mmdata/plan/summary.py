"""Counts of an epoch of a plan: steps, rows and padding by bucket. Reads no image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.config.train import MASK_REMEDY
from mmdata.plan.buckets import Bucket
from mmdata.plan.plan import Plan
from mmdata.plan.rows import Hashes, HashesOf, occurrences_of


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
        lift: how much more often two rows of a batch come from one shard than in a uniform shuffle: 1.0 for such a
            shuffle; number of shards / n where batches are drawn from n shards at a time.
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
    merged = masked = duplicates = cut = pairs = same_shard = 0
    for step in plan.steps(epoch):
        is_row = step.rows >= 0
        rows, passes = step.rows[is_row], step.passes[is_row]
        shards = np.searchsorted(starts, rows, side="right") - 1
        ranks = np.arange(len(is_row)) * world_size // len(is_row)
        touched[ranks[is_row], shards] = True
        in_shards = np.bincount(shards, minlength=len(rows_by_shard))
        rows_by_shard += in_shards
        pairs += len(rows) * (len(rows) - 1)
        same_shard += int((in_shards * (in_shards - 1)).sum())
        shapes = plan.rows.shapes_of(occurrences_of(rows, passes))
        merged += sum(policy.buckets[bucket] != step.bucket for bucket in policy.assign(shapes).tolist())
        masked += len(is_row) - len(rows)
        duplicates += count_duplicates(hashes(rows, passes)) if hashes else 0
        count = buckets[step.bucket]
        count.steps += 1
        count.rows += len(rows)
        cut += int((shapes.length > step.bucket.length).sum())
        count.tokens += int(np.minimum(shapes.length, step.bucket.length).sum())
    sizes = np.diff(starts).astype(np.float64)
    expected = pairs * (sizes * (sizes - 1)).sum() / max(sizes.sum() * (sizes.sum() - 1), 1)  # of a uniform shuffle
    lift = float(same_shard / expected) if expected else 1.0
    rows_by_span = [int(rows_by_shard[first:last].sum()) for first, last, *_ in plan.mixture.spans]
    counted = duplicates if hashes else None
    return PlanSummary(buckets, rows_by_span, masked, merged, lift, touched, counted, cut)


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
