"""Samples of rows, and what they say about all of them. SciPy is the oracle of the interval."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from mmdata.convert.packing import pack
from mmdata.convert.sampling import RUNS, Estimate, SampleOf, wilson


@settings(max_examples=30)
@given(st.integers(0, 10**7), st.booleans())
def test_sample_has_a_run_in_each_stretch_and_is_the_same_again(rows: int, in_runs: bool) -> None:
    sample = SampleOf.choose(rows, in_runs=in_runs)
    assert sample == SampleOf.choose(rows, in_runs=in_runs)
    assert sample.size == sum(end - start for start, end in sample.ranges)
    wanted = min(rows, max(500, min(5000, -(-rows // 100))))
    if not in_runs:
        assert sample.size == wanted
    assert wanted - sample.run < sample.size < wanted + sample.run
    if sample.is_whole:
        assert sample.ranges == ((0, rows),)
        return
    count = len(sample.ranges)
    assert (sample.run == 1) != in_runs
    assert count <= RUNS or not in_runs
    for number, (start, end) in enumerate(sample.ranges):
        assert rows * number // count <= start < end <= rows * (number + 1) // count


@given(st.integers(1, 5000), st.data())
def test_interval_is_that_of_wilson(size: int, data: st.DataObject) -> None:
    found = data.draw(st.integers(0, size))
    expected = binomtest(found, size).proportion_ci(0.95, "wilson")
    assert wilson(found / size, size) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_estimate_of_a_sample_of_singles_with_exact_numbers() -> None:
    sample = SampleOf.choose(100_000, in_runs=False)
    found = [place % 10 == 0 for place in range(1000)]
    # 100 of 1,000: Wilson gives 0.08290942 to 0.12015089
    assert sample.count(found) == Estimate(100, 8290, 10_000, 12_016)
    assert sample.count([False] * 1000) == Estimate(0, 0, 0, 383)
    assert sample.count([True] * 1000) == Estimate(1000, 99_617, 100_000, 100_000)


def test_estimate_of_all_rows_is_the_count() -> None:
    sample = SampleOf.choose(400, in_runs=True)
    assert sample.is_whole
    assert sample.count([True] * 7 + [False] * 393) == Estimate(7, 7, 7, 7)
    assert sample.total([3] * 400) == Estimate(1200, 1200, 1200, 1200)


@pytest.mark.parametrize("in_runs", [False, True])
def test_total_of_equal_values_is_exact_and_of_others_within(in_runs: bool) -> None:
    sample = SampleOf.choose(100_000, in_runs=in_runs)
    assert sample.total([7] * sample.size) == Estimate(7 * sample.size, 700_000, 700_000, 700_000)
    sizes = random.Random(0).choices(range(1000, 90_000), k=100_000)
    found = sample.total([sizes[row] for start, end in sample.ranges for row in range(start, end)])
    assert found.low < sum(sizes) < found.high
    assert found.high - found.low < 0.15 * sum(sizes)


@pytest.mark.parametrize("period", [2, 3, 5, 7, 10, 50, 99, 100, 101, 200])
def test_what_comes_back_every_so_many_rows_is_met_as_often_as_it_is_there(period: int) -> None:
    sample = SampleOf.choose(50_000, in_runs=False)  # of every 100 rows, one
    found = sample.count([start % period == 0 for start, _ in sample.ranges])
    assert found.low <= 50_000 // period <= found.high


def test_bad_rows_that_lie_together_widen_the_interval_of_a_sample_in_runs() -> None:
    sample = SampleOf.choose(100_000, in_runs=True)
    rows = [row for start, end in sample.ranges for row in range(start, end)]
    together = sample.count([row < 30_000 for row in rows])
    strewn = sample.count([hash((row, 1)) % 10 < 3 for row in rows])
    assert together.low <= 30_000 <= together.high
    assert together.high - together.low > 2 * (strewn.high - strewn.low)


def test_pack_joins_small_tars_and_cuts_large_ones() -> None:
    assert pack(30_000, [(0.4, 1e4)], shard_rows=10_000, shard_bytes=10**9) == (2, 80_000_000)
    assert pack(30_000, [(1.0, 1e4)], shard_rows=10_000, shard_bytes=10**9) == (3, 0)
    assert pack(25_000, [(1.0, 1e5)], shard_rows=10_000, shard_bytes=10**9) == (3, 0)
    assert pack(10_000, [(1.0, 1e6)], shard_rows=10_000, shard_bytes=10**9) == (10, 0)
    assert pack(20_000, [(0.99, 1e4), (0.01, 1e4)], shard_rows=10_000, shard_bytes=10**9) == (3, 2_000_000)
    assert pack(0, [], shard_rows=10_000, shard_bytes=10**9) == (0, 0)


@pytest.mark.parametrize("in_runs", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_interval_holds_the_truth_in_95_of_100_corpora(share: float, in_runs: bool) -> None:
    sample = SampleOf.choose(20_000, in_runs=in_runs)
    rows = np.array([row for start, end in sample.ranges for row in range(start, end)])
    held = 0
    for seed in range(400):
        bad = np.random.default_rng(seed).random(sample.rows) < share
        found = sample.count(bad[rows].tolist())
        held += found.low <= bad.sum() <= found.high
    assert held / 400 >= 0.93  # 0.95, less two standard deviations


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_interval_holds_the_truth_where_bad_rows_come_in_bursts(share: float) -> None:
    sample = SampleOf.choose(100_000, in_runs=True)
    rows = np.array([row for start, end in sample.ranges for row in range(start, end)])
    held = 0
    for seed in range(400):
        bad = np.repeat(np.random.default_rng(seed).random(sample.rows // 50) < share, 50)  # 50 at a time
        found = sample.count(bad[rows].tolist())
        held += found.low <= bad.sum() <= found.high
    assert held / 400 >= 0.93
