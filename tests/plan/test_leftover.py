"""What becomes of the rows that fill no batch of their bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmdata.plan import Bucket, Mixture, Plan, Shapes, ShardSpan


class Own:
    """A policy of one's own: the bucket is the caption's length."""

    def __init__(self, count: int) -> None:
        self.buckets: Sequence[Bucket] = [Bucket(77, 64, 64 + number) for number in range(count)]

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return shapes.length


def batches(plan: Plan, epoch: int = 0) -> list[tuple[int, list[int]]]:
    return [(step.bucket.width - 64, step.rows.tolist()) for step in plan.steps(epoch)]


def test_each_bucket_is_merged_padded_or_dropped(fake_rows):
    rows = fake_rows([7], [0, 0, 0, 1, 2, 2, 2])
    known: dict[str, Any] = {"global_batch_size": 2, "shuffle": False}
    merged, padded, dropped = (
        batches(Plan(rows, Own(3), leftover=leftover, **known)) for leftover in ("merge", "pad", "drop")
    )
    assert sorted(row for _, own in merged for row in own) == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert padded == [(0, [0, 1]), (2, [4, 5]), (0, [-1, 2]), (1, [-1, 3]), (2, [-1, 6])]
    assert dropped == [(0, [0, 1]), (2, [4, 5])]


corpora = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=5)


@given(corpora, st.sampled_from(["pad", "drop"]), st.integers(1, 2), st.integers(0, 2), st.sampled_from([1, 6]))
def test_no_batch_mixes_buckets(fake_rows, shards: list[list[int]], leftover: Any, lanes: int, epoch: int, window: int):
    lengths = [length for shard in shards for length in shard]
    rows, lanes = fake_rows([len(shard) for shard in shards], lengths), min(lanes, len(shards))
    plan = Plan(rows, Own(4), global_batch_size=4, leftover=leftover, num_lanes=lanes, window_rows=window)
    found = batches(plan, epoch)
    assert len(found) == plan.num_steps(epoch)
    given = [row for _, own in found for row in own if row >= 0]
    assert len(given) == len(set(given))
    assert all(lengths[row] == bucket for bucket, own in found for row in own if row >= 0)
    if leftover == "pad":
        assert sorted(given) == list(range(len(lengths)))
    else:
        assert all(min(own) >= 0 for _, own in found)
        if lanes == 1:  # no more than what fills no batch is left out
            assert len(given) == sum(lengths.count(bucket) // 4 * 4 for bucket in range(4))
    ranks = [list(plan.steps(epoch, rank=rank, world_size=2)) for rank in range(2)]
    assert [np.concatenate([one.rows, two.rows]).tolist() for one, two in zip(*ranks, strict=True)] == [
        own for _, own in found
    ]


def test_weights_fill_batches_by_merging(fake_rows):
    mixture = Mixture((ShardSpan(0, 1, weight=1), ShardSpan(1, 2, weight=1)))
    with pytest.raises(ValueError, match=r"leftover pad: with weights the datasets share every batch"):
        Plan(fake_rows([4, 4]), Own(1), global_batch_size=2, mixture=mixture, leftover="pad")


def test_the_identity_tells_what_becomes_of_them(fake_rows):
    rows = fake_rows([4, 4])
    plans = [Plan(rows, Own(2), global_batch_size=2, leftover=leftover) for leftover in ("merge", "pad", "drop")]
    assert len({str(plan.identity()) for plan in plans}) == 3
    assert [plan.epochs_differ for plan in plans] == [False, True, True]
