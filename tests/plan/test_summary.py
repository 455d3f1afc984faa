"""The account of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mmdata.plan import Bucket, BucketCount, LengthAspectPolicy, OrderedPlan, Plan, summarize


def test_summary_of_a_small_plan(fake_rows):
    # Buckets: 4 gets rows 0 and 2, 10 gets 1 and 3, and 5 alone with row 4 moved up to it … of 99 tokens, cut to 10.
    rows = fake_rows([6], [3, 9, 4, 10, 2, 99])
    plan = Plan(rows, LengthAspectPolicy([4, 10], [(64, 64)]), global_batch_size=2, shuffle=False)
    summary = summarize(plan)
    assert summary.buckets == {
        Bucket(4, 64, 64): BucketCount(steps=1, rows=2, tokens=7),
        Bucket(10, 64, 64): BucketCount(steps=2, rows=4, tokens=9 + 10 + 2 + 10),
    }
    assert (summary.rows, summary.steps, summary.masked) == (6, 3, 0)
    assert summary.padding_share == pytest.approx(1 - 38 / 48)
    assert summary.padding_share_at(10) == pytest.approx(1 - 38 / 60)
    assert summary.cut == 1


def test_summary_counts_the_masked_places_and_every_row(fake_rows):
    rng = np.random.default_rng(0)
    rows = fake_rows([50, 53], rng.integers(1, 78, 103), rng.integers(1, 78, 103))
    plan = Plan(rows, LengthAspectPolicy([20, 40, 77], [(64, 64)]), global_batch_size=8)
    for epoch in (0, 1):
        summary = summarize(plan, epoch)
        assert summary.steps == len(plan) == 13
        assert summary.masked == 1
        assert sum(count.rows for count in summary.buckets.values()) == 103
        assert sum(count.tokens for count in summary.buckets.values()) == rows.lengths[epoch].sum()


@pytest.mark.parametrize(
    ("order", "size", "lift"),
    [
        (np.arange(150), 10, 149 / 49),  # batches of one shard: about as many as there are shards
        (np.arange(150), 150, 1.0),  # all rows: as often as in any order
        (np.arange(150).reshape(3, 50).T.ravel(), 3, 0.0),
        (np.array([7]), 1, 1.0),  # no two rows meet
    ],
)
def test_summary_says_how_much_more_often_rows_of_a_shard_meet_than_in_a_shuffle(fake_rows, order, size, lift):
    rows = fake_rows([50, 50, 0, 50])
    plan = OrderedPlan(Plan(rows, LengthAspectPolicy([77], [(64, 64)]), global_batch_size=size), order)
    assert summarize(plan).lift == pytest.approx(lift)


def test_summary_says_which_rank_reads_which_shards(fake_rows):
    rows = fake_rows([4, 4, 4, 4])
    plan = Plan(rows, LengthAspectPolicy([77], [(64, 64)]), global_batch_size=4, num_lanes=2)
    touched = summarize(plan, world_size=2).touched
    assert touched.shape == (2, 4)
    assert touched.sum(axis=0).tolist() == [1, 1, 1, 1]
    assert touched.sum(axis=1).tolist() == [2, 2]
    assert summarize(plan).touched.all()


def test_summary_counts_rows_in_a_bucket_of_another_length(fake_rows):
    plan = Plan(fake_rows([4], [3, 3, 3, 9]), LengthAspectPolicy([4, 10], [(64, 64)]), global_batch_size=2)
    assert summarize(plan).merged == 1
