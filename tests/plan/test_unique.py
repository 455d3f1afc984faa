"""Batches without duplicates: what can be kept apart is, and what cannot is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import BatchShare, Groups, LengthAspectPolicy, Mixture, Plan, ShardSpan, summarize
from mmdata.plan.deduplicate import Hashes, count_duplicates, separate

POLICY = LengthAspectPolicy([8, 77], [(64, 64)])
DRAWS = np.arange(4096, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def unique(rows: Any) -> Mixture:
    return Mixture((BatchShare((ShardSpan(0, len(rows.starts) - 1),)),), unique=rows.hashes)


def test_separate_moves_a_duplicate_to_another_batch():
    hashes = Hashes(np.array([1, 1, 2, 3]), np.array([5, 6, 7, 8]))
    order = separate(hashes, np.zeros((2, 2), int), DRAWS)
    assert sorted(order.reshape(-1).tolist()) == [0, 1, 2, 3]
    assert {0, 1} not in [set(batch) for batch in order.tolist()]


def test_separate_leaves_batches_without_duplicates_as_they_are():
    hashes = Hashes(np.array([1, 2, 2, 3]), np.array([5, 6, 7, 8]))
    assert separate(hashes, np.zeros((2, 2), int), DRAWS).tolist() == [[0, 1], [2, 3]]


def test_separate_exchanges_rows_only_between_positions_of_one_kind():
    hashes = Hashes(np.array([1, 1, 2, 3, 4, 5, 6, 7]), np.arange(8))
    kinds = np.array([[0, 0, 0, 1], [0, 0, 0, 1]])
    order = separate(hashes, kinds, DRAWS)
    assert sorted(order[:, 3].tolist()) == [3, 7]


def test_count_duplicates_counts_a_row_once():
    assert count_duplicates(Hashes(np.array([1, 1, 2, 1]), np.array([5, 5, 5, 6]))) == 3
    assert count_duplicates(Hashes(np.array([1, 2]), np.array([1, 2]))) == 0


@given(st.integers(0, 999), st.sampled_from([1, 40, 2**20]), st.sampled_from([4, 16]))
def test_plan_keeps_duplicates_apart_and_every_row_once(fake_rows, seed: int, window_rows: int, size: int):
    rng = np.random.default_rng(seed)
    rows = fake_rows([50, 0, 70, 1, 79], rng.integers(1, 30, 200))
    rows.caption_hash = np.where(rng.random(200) < 0.1, rng.integers(0, 5, 200), np.arange(200) + 10)
    rows.image_hash = np.where(rng.random(200) < 0.1, rng.integers(0, 9, 200), np.arange(200) + 10)
    settings: Any = {"global_batch_size": size, "seed": seed, "window_rows": window_rows}
    plain, plan = Plan(rows, POLICY, **settings), Plan(rows, POLICY, **settings, mixture=unique(rows))
    steps = list(plan.steps(0))
    used = Counter(row for step in steps for row in step.rows.tolist() if row >= 0)
    assert used == Counter(range(200))
    assert [step.bucket for step in steps] == [step.bucket for step in plain.steps(0)]
    summary = summarize(plan, hashes=rows.hashes)
    before = summarize(plain, hashes=rows.hashes).duplicates
    assert before is not None
    assert summary.duplicates is not None
    assert summary.duplicates <= before
    if window_rows == 2**20 and size == 4:
        assert summary.duplicates <= 1  # all of the bucket's batches are there to choose from
    start = len(steps) // 3
    resumed = Plan(rows, POLICY, **settings, mixture=unique(rows)).steps(0, start=start, rank=1, world_size=2)
    assert [part.rows.tolist() for part in resumed] == [step.rows[size // 2 :].tolist() for step in steps[start:]]


def test_unique_and_groups_exclude_each_other(fake_rows):
    rows = fake_rows([9])
    groups = Groups(np.zeros(9, int), size=2, candidates=0, source="test")
    with pytest.raises(ValueError, match="unique: rows of a group must stay together and cannot be kept apart"):
        Plan(rows, POLICY, global_batch_size=8, mixture=Mixture(unique(rows).shares, groups=groups, unique=rows.hashes))
