"""A plan of weighted rows: seconds until the first batch and for a whole epoch, and memory.

PYTHONPATH=. python docs/benchmarks/plan_weights.py 10000000

The rows are made up: in shards of 10,000, with three captions of 3 to 60 tokens each, in eight text lengths, batches of
4,096; weights are log-normal around 1 and at most 10, as those of a class-balanced web corpus.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np
from numpy.typing import NDArray

from mmdata.plan import LengthAspectPolicy, Plan, Rows, Shapes
from mmdata.plan.weights import RowWeights, WeightedPlan


class MadeUpRows(Rows):
    """Rows whose caption lengths follow from their numbers and passes."""

    fingerprint = "made up"

    def __init__(self, count: int) -> None:
        self.starts = np.arange(0, count + 1, 10_000, dtype=np.int64)

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        """Lengths of 3 to 60 tokens, and square images."""
        lengths = 3 + (rows * 2_654_435_761 + epoch % 3 * 40_503) % 58
        side = np.full(len(rows), 256)
        return Shapes(lengths, side, side)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    values = np.minimum(np.random.default_rng(0).lognormal(-0.5, 1.0, count), 10.0)
    rows, policy = MadeUpRows(count), LengthAspectPolicy([8, 16, 24, 32, 40, 48, 56, 77], [(224, 224)])
    started = time.perf_counter()
    plan = WeightedPlan(
        Plan(rows, policy, global_batch_size=4096, window_rows=2**20), RowWeights(values, name="weights", seed=0)
    )
    steps = plan.steps(0)
    next(steps)
    first = time.perf_counter() - started
    started = time.perf_counter()
    length = len(plan)
    counted = time.perf_counter() - started
    started = time.perf_counter()
    planned = masked = 0
    for step in plan.steps(0):
        planned += len(step.rows)
        masked += int((step.rows < 0).sum())
    taken = time.perf_counter() - started
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{count:,} rows, {plan.weights.num_parts} parts, {length:,} steps: first batch after {first:.2f} s, len after "
        f"{counted:.2f} s, {planned / taken / 1e6:.2f} million rows a second, {masked / planned:.2%} padding, "
        f"{most:.0f} MB"
    )


if __name__ == "__main__":
    main()
