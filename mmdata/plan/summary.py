"""What an epoch of a plan comes to: steps, rows and padding by bucket. Reads no image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket
from mmdata.plan.deduplicate import HashesOf, count_duplicates
from mmdata.plan.plan import Plan, rank_slice
from mmdata.plan.row_ranges import occurrences_of
from mmdata.plan.window_rows import shapes_of


@dataclass
class BucketCount:
    """What one bucket gets in an epoch.

    Attributes:
        steps: global batches.
        rows: in those batches, masked ones not counted.
        tokens: of those rows' captions, truncated to the bucket, padding not counted.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class PlanSummary:
    """An epoch.

    Attributes:
        buckets: counts by bucket, in the policy's order.
        sources: rows that each dataset of the mixture gives; of a plain corpus, all of its rows.
        masked: places that no row fills.
        merged: rows that are in a longer or another bucket than their own: to fill batches at the end of the epoch, to
            stand beside their group, or because the streams of a mixture have no batch of one bucket.
        lift: `same_shard_lift` of the epoch.
        touched: bool (world_size, num_shards), which shards each rank reads.
        duplicates: rows whose image or caption is that of an earlier row of their batch; None where not asked for.
        cut: rows whose caption is longer than the text length of their batch.
    """

    buckets: dict[Bucket, BucketCount]
    sources: list[int]
    masked: int
    merged: int
    lift: float
    touched: NDArray[np.bool_]
    duplicates: int | None = None
    cut: int = 0

    @property
    def rows(self) -> int:
        """Of all batches."""
        return sum(count.rows for count in self.buckets.values())

    @property
    def steps(self) -> int:
        """Global batches of the epoch."""
        return sum(count.steps for count in self.buckets.values())

    @property
    def padding_share(self) -> float:
        """Share of the text positions of valid rows that hold padding."""
        return 1 - self._tokens / sum(bucket.length * count.rows for bucket, count in self.buckets.items())

    def padding_share_at(self, length: int) -> float:
        """The same, had every caption been padded to `length`."""
        return 1 - self._tokens / (length * self.rows)

    @property
    def _tokens(self) -> int:
        return sum(count.tokens for count in self.buckets.values())


def summarize(plan: Plan, epoch: int = 0, *, world_size: int = 1, hashes: HashesOf | None = None) -> PlanSummary:
    """Go through the steps of an epoch and count. The plan must know the caption lengths.

    Args:
        plan: whose epoch it is.
        epoch: from 0.
        world_size: ranks, to say what each reads.
        hashes: of rows, where duplicates are to be counted.

    Raises:
        ValueError: world_size does not divide the global batch size.
    """
    plan.check_ranks(0, world_size)
    starts, policy = plan.rows.starts, plan.policy
    buckets = {bucket: BucketCount() for bucket in policy.buckets}
    touched = np.zeros((world_size, len(starts) - 1), np.bool_)
    shard_uses = np.zeros(len(starts) - 1, np.int64)
    lift = _Lift(starts)
    merged = masked = met = cut = 0
    for step in plan.steps(epoch):
        shards = np.searchsorted(starts, step.rows, side="right") - 1
        for rank in range(world_size):
            mine = rank_slice(len(step.rows), rank, world_size)
            touched[rank, shards[mine][step.rows[mine] >= 0]] = True
        filled = step.rows >= 0
        uses = occurrences_of(step.rows[filled], step.passes[filled])
        lift.add(shards[filled])
        shard_uses += np.bincount(shards[filled], minlength=len(shard_uses))
        shapes = shapes_of(plan.rows, uses)
        own = policy.assign(shapes)
        merged += sum(policy.buckets[bucket] != step.bucket for bucket in own.tolist())
        masked += len(filled) - len(uses)
        met += count_duplicates(hashes(step.rows[filled], step.passes[filled])) if hashes else 0
        count = buckets[step.bucket]
        count.steps += 1
        count.rows += len(uses)
        cut += int((shapes.length > step.bucket.length).sum())
        count.tokens += int(np.minimum(shapes.length, step.bucket.length).sum())
    sources = [int(shard_uses[first:last].sum()) for first, last, _ in plan.mixture.sources]
    return PlanSummary(buckets, sources, masked, merged, lift.value, touched, met if hashes else None, cut)


def same_shard_lift(batches: Iterable[NDArray[np.int64]], starts: NDArray[np.int64]) -> float:
    """How much more often than in a uniform shuffle two rows of a batch come from one shard.

    Args:
        batches: rows of each batch, int64.
        starts: first row of each shard, and the number of rows.

    Returns:
        1.0 for a uniform shuffle; number of shards / n where batches are drawn from n shards at a time.
    """
    lift = _Lift(starts)
    for batch in batches:
        lift.add(np.searchsorted(starts, batch, side="right") - 1)
    return lift.value


class _Lift:
    """Counts pairs of rows of one batch, and those that share a shard."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        sizes = np.diff(starts).astype(np.float64)
        rows = sizes.sum()
        self._expected = (sizes * (sizes - 1)).sum() / max(rows * (rows - 1), 1)
        self._met = self._pairs = 0

    def add(self, shards: NDArray[np.int64]) -> None:
        counts = np.unique(shards, return_counts=True)[1]
        self._met += int((counts * (counts - 1)).sum())
        self._pairs += len(shards) * (len(shards) - 1)

    @property
    def value(self) -> float:
        if not self._pairs or not self._expected:
            return 1.0
        return float(self._met / self._pairs / self._expected)
