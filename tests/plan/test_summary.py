"""The account of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mmdata.plan import Bucket, BucketCount, LengthAspectPolicy, Plan, summarize


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
