"""Shuffle quality: how much more often than by chance two rows of one shard meet in a batch.

Against a full random permutation, and against webdataset's buffer shuffle at an equal number of open shards: each of
its workers reads one shard at a time, shuffles it in a buffer of 1,000 samples, and makes whole batches.

python docs/benchmarks/plan_shuffle.py
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from webdataset.filters import _shuffle

from mmdata.plan import LengthAspectPolicy, Plan, Rows, Shapes

NUM_SHARDS, SHARD_ROWS, BATCH, OPEN = 1024, 1000, 256, 64
LENGTHS = [9, 11, 14, 17, 21, 26, 36, 77]


class SyntheticRows(Rows):
    """1,024 shards of 1,000 rows, lengths as in plan_padding.py."""

    starts = np.arange(0, NUM_SHARDS * SHARD_ROWS + 1, SHARD_ROWS)
    fingerprint = "synthetic"
    length = np.clip(np.random.default_rng(0).lognormal(np.log(14), 0.6, NUM_SHARDS * SHARD_ROWS), 3, 77).astype(int)

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        return Shapes(self.length[rows], np.ones_like(rows), np.ones_like(rows))


def permuted(rows: SyntheticRows) -> Iterator[NDArray[np.int64]]:
    order = np.random.default_rng(1).permutation(rows.starts[-1])
    yield from order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)


def planned(rows: SyntheticRows, lengths: list[int], window_shards: int) -> Iterator[NDArray[np.int64]]:
    policy = LengthAspectPolicy(lengths, [(224, 224)])
    plan = Plan(rows, policy, global_batch_size=BATCH, window_rows=window_shards * SHARD_ROWS)
    for step in plan.steps(0):
        yield step.rows[step.rows >= 0]


def webdataset(rows: SyntheticRows, workers: int) -> Iterator[NDArray[np.int64]]:
    shards = np.random.default_rng(2).permutation(NUM_SHARDS)

    def worker(number: int) -> Iterator[NDArray[np.int64]]:
        samples = (row for shard in shards[number::workers] for row in range(*rows.starts[shard : shard + 2]))
        shuffled = _shuffle(samples, 1000, 100, random.Random(number))
        while len(batch := list(itertools.islice(shuffled, BATCH))) == BATCH:
            yield np.array(batch)

    for batches in itertools.zip_longest(*map(worker, range(workers))):
        yield from (batch for batch in batches if batch is not None)


def same_shard_lift(batches: list[NDArray[np.int64]], starts: NDArray[np.int64]) -> float:
    """1.0 for a uniform shuffle; number of shards / n where batches are drawn from n shards at a time."""
    counts = [np.bincount(np.searchsorted(starts, batch, side="right")) for batch in batches]
    same = sum(int((count * (count - 1)).sum()) for count in counts)
    pairs = sum(len(batch) * (len(batch) - 1) for batch in batches)
    sizes = np.diff(starts)
    return same / pairs / ((sizes * (sizes - 1)).sum() / (starts[-1] * (starts[-1] - 1)))


def report(name: str, batches: Iterable[NDArray[np.int64]], starts: NDArray[np.int64]) -> None:
    batches = list(batches)
    distinct = np.mean([len(np.unique(np.searchsorted(starts, batch, side="right"))) for batch in batches])
    print(f"{name:58} {same_shard_lift(batches, starts):8.2f} {distinct:8.1f}")


def main() -> None:
    rows = SyntheticRows()
    print(f"{'':58} {'lift':>8} {'shards a batch':>8}")
    report("full random permutation", permuted(rows), rows.starts)
    report("mmdata, default window (2^20 rows), one length", planned(rows, [77], 2**20 // SHARD_ROWS), rows.starts)
    report("mmdata, default window, 8 lengths", planned(rows, LENGTHS, 1049), rows.starts)
    report(f"mmdata, window of {OPEN} shards, 8 lengths", planned(rows, LENGTHS, OPEN), rows.starts)
    report(f"webdataset, {OPEN} workers with one open shard each", webdataset(rows, OPEN), rows.starts)


if __name__ == "__main__":
    main()
