"""What mixtures and groups cost: padding, duplicates that meet, and planning time; 10^6 rows.

PYTHONPATH=. python docs/benchmarks/plan_mixtures.py
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from docs.benchmarks.plan_padding import GLOBAL_BATCH_SIZE, SyntheticRows
from mmdata.plan import (
    Groups,
    Hashes,
    LengthAspectPolicy,
    Mixture,
    Plan,
    ShardSpan,
    summarize,
)
from mmdata.plan.choose import choose_lengths


def main() -> None:
    rows = SyntheticRows()
    count, shards = int(rows.starts[-1]), len(rows.starts) - 1
    policy = LengthAspectPolicy(choose_lengths(np.bincount(rows.length), 8), [(224, 224)])
    rng = np.random.default_rng(0)
    # 2 % of the images are one of 2,000; 5 % of the captions follow a heavy tail, as alt texts do
    image = np.where(rng.random(count) < 0.02, rng.integers(0, 2000, count), np.arange(count) + 10**6)
    tail = (rng.pareto(1.0, count) * 50).astype(np.int64)
    caption = np.where(rng.random(count) < 0.05, tail, np.arange(count) + 10**9)

    def hashes(chosen: NDArray[np.int64], passes: NDArray[np.int64]) -> Hashes:
        return Hashes(image[chosen], caption[chosen])

    whole = (ShardSpan(0, shards),)
    labels = rng.integers(0, 1000, count)
    first, second = ShardSpan(0, shards // 2), ShardSpan(shards // 2, shards)
    mixtures = {
        "every row once": Mixture(whole),
        "groups of 4": Mixture(whole, Groups(labels, size=4, candidates=0, source="label")),
        "3 candidates": Mixture(whole, Groups(labels, size=1, candidates=3, source="label")),
        "weights 3 : 1": Mixture((first._replace(weight=3), second._replace(weight=1))),
        "repeats 1, 3": Mixture((first, second._replace(repeat=3.0))),
    }
    print("mixture            rows  padding  masked  duplicates  first batch, s  rows/s")
    for name, mixture in mixtures.items():
        started = perf_counter()
        plan = Plan(rows, policy, global_batch_size=GLOBAL_BATCH_SIZE, mixture=mixture)
        next(plan.steps(0))
        ready = perf_counter()
        planned = sum(len(step.rows) for step in plan.steps(0))
        rate = planned / (perf_counter() - ready)
        summary = summarize(plan, hashes=hashes)
        print(
            f"{name:14} {summary.rows:>9,} {summary.padding_share:>7.1%} {summary.masked:>7,} "
            f"{summary.duplicates:>11,} {ready - started:>15.2f} {rate:>10,.0f}"
        )


if __name__ == "__main__":
    main()
