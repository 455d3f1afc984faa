"""Useful share of text tokens: the plan against the best that any bounds allow, on 10^6 lognormal caption lengths.

python docs/benchmarks/plan_padding.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.plan import LengthAspectPolicy, Plan, Rows, Shapes, summarize
from mmdata.plan.choose import choose_lengths

NUM_ROWS, GLOBAL_BATCH_SIZE, SHARD_ROWS = 10**6, 4096, 10_000
SHAPES = [(224, 224), (192, 256), (256, 192)]
ASPECT_SHARES = (0.3, 0.5, 0.2)


class SyntheticRows(Rows):
    """10^6 rows in 100 shards: median 14 tokens, sigma 0.6, 3 to 77; three aspect ratios."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.starts = np.arange(0, NUM_ROWS + 1, SHARD_ROWS)
        self.fingerprint = "synthetic"
        self.length = np.clip(np.round(rng.lognormal(np.log(14), 0.6, NUM_ROWS)), 3, 77).astype(np.int64)
        self.aspect = rng.choice(3, NUM_ROWS, p=ASPECT_SHARES)

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        height, width = np.array(SHAPES)[self.aspect[rows]].T
        return Shapes(self.length[rows], height, width)


def main() -> None:
    rows = SyntheticRows()
    histogram = np.bincount(rows.length)
    print("  bounds  shapes    best    plan  plan/best   merged  masked  steps")
    for count in (8, 16, int((histogram > 0).sum())):
        bounds = choose_lengths(histogram, count)
        lengths = np.arange(len(histogram))
        padded = np.array([bounds[np.searchsorted(bounds, length)] for length in lengths])
        best = (histogram * lengths).sum() / (histogram * padded).sum()
        for shapes in (SHAPES[:1], SHAPES):
            policy = LengthAspectPolicy(bounds, shapes)
            plan = Plan(rows, policy, global_batch_size=GLOBAL_BATCH_SIZE)
            summary = summarize(plan)
            useful = 1 - summary.padding_share
            own = rows.bucket_counts(policy, 0, np.arange(len(rows.starts) - 1)).sum(axis=0)
            merged = np.maximum(own - [count.rows for count in summary.buckets.values()], 0).sum()
            print(
                f"{count:8} {len(shapes):7} {best:7.4f} {useful:7.4f} {useful / best:10.4f} "
                f"{merged:8,} {summary.masked:7,} {summary.steps:6}"
            )


if __name__ == "__main__":
    main()
