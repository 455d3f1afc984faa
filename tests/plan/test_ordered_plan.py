"""The plan of an order that is given: exactly this sequence of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import Bucket, LengthAspectPolicy, Mixture, NativePolicy, OrderedPlan, Plan, ShardSpan
from mmdata.tables.selection import Selection

POLICY = LengthAspectPolicy([4, 10, 20], [(64, 64)])


def sequence(steps: list[Any]) -> list[int]:
    return [row for step in steps for row in step.rows.tolist() if row >= 0]


def test_batches_have_the_rows_in_order_in_the_smallest_bucket_that_holds_them(fake_rows):
    rows = fake_rows([4, 3], [3, 9, 3, 9, 3, 20, 3])
    plan = OrderedPlan(Plan(rows, POLICY, global_batch_size=2), [6, 0, 5, 1, 1, 0, 4])
    found = [(step.number, step.bucket.length, step.rows.tolist(), step.passes.tolist()) for step in plan.steps(0)]
    assert found == [
        (0, 4, [6, 0], [0, 0]),
        (1, 20, [5, 1], [0, 0]),
        (2, 10, [1, 0], [1, 1]),
        (3, 4, [-1, 4], [-1, 0]),
    ]
    assert len(plan) == plan.num_steps(5) == 4
    assert plan.steps_of_buckets(0) == [2, 1, 1]


def test_steps_of_equal_buckets_are_counted_once(fake_rows):
    policy = LengthAspectPolicy([4, 20], [(64, 64)])
    policy.buckets = (Bucket(20, 64, 64),) * 2
    plan = OrderedPlan(Plan(fake_rows([4], [3, 9, 3, 9]), policy, global_batch_size=2, leftover="pad"), np.arange(4))
    assert plan.steps_of_buckets(0) == [2, 0]


def test_each_time_that_a_row_comes_is_another_pass(fake_rows):
    plan = OrderedPlan(Plan(fake_rows([3]), POLICY, global_batch_size=4), [1, 1, 0, 1])
    passes = [next(plan.steps(epoch)).passes.tolist() for epoch in (0, 1)]
    assert passes == [[0, 1, 0, 2], [3, 4, 1, 5]]


def test_the_image_shape_is_that_of_most_rows_and_the_patches_those_of_the_largest(fake_rows):
    rows = fake_rows([4], [3, 9, 3, 3], height=[64, 64, 32, 64], width=[64, 64, 64, 64])
    policy = LengthAspectPolicy([4, 10], [(64, 64), (32, 64)])
    (step,) = OrderedPlan(Plan(rows, policy, global_batch_size=4), [2, 0, 1, 3]).steps(0)
    assert step.bucket == Bucket(10, 64, 64)
    native = NativePolicy([4, 10], [4, 16], patch_size=16)
    (step,) = OrderedPlan(Plan(rows, native, global_batch_size=4), [2, 0, 3, 2]).steps(0)
    assert step.bucket == Bucket(4, 0, 0, 16)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 3), st.data())
def test_any_rank_from_any_step_has_its_part_of_the_sequence(
    fake_rows, order: list[int], per_rank: int, epoch: int, data: Any
):
    rows, ranks = fake_rows([6, 4], [3, 9, 3, 9, 3, 20, 3, 5, 11, 1], [7] * 10), 2
    plan = OrderedPlan(Plan(rows, POLICY, global_batch_size=per_rank * ranks), order)
    whole = list(plan.steps(epoch))
    assert sequence(whole) == order
    start = data.draw(st.integers(0, len(whole)))
    parts = [list(plan.steps(epoch, start=start, rank=rank, world_size=ranks)) for rank in range(ranks)]
    for one, *own in zip(whole[start:], *parts, strict=True):
        assert {step.bucket for step in own} == {one.bucket}
        assert np.concatenate([step.rows for step in own]).tolist() == one.rows.tolist()
        assert np.concatenate([step.passes for step in own]).tolist() == one.passes.tolist()


def test_the_rows_of_a_plan_in_another_order(fake_rows):
    rows = fake_rows([4, 4])
    plan = Plan(rows, POLICY, global_batch_size=4, seed=3)
    ordered = OrderedPlan(plan, np.arange(8)[::-1])
    assert sequence(list(ordered.steps(0))) == list(range(8))[::-1]
    assert ordered.identity() | {"shuffle": True, "order": None} == plan.identity() | {"order": None}
    assert OrderedPlan(plan, np.arange(8)).identity() != ordered.identity()
    assert not ordered.epochs_differ
    assert "8 rows, 2 batches of 4 rows" in repr(ordered)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], "order must be a list of row numbers, int64 .n,.: got float64|order is empty"),
        (np.empty(0, np.int64), "order is empty: give at least one row"),
        ([0.5, 1.0], r"order must be a list of row numbers, int64 \(n,\): got float64 \(2,\)"),
        ([[0, 1]], r"order must be a list of row numbers, int64 \(n,\): got int64 \(1, 2\)"),
        ([True, False], "order must be a list of row numbers"),
        ([0, 7, -1], "order: entry 1 is row 7, and the rows are 0 to 6; 2 of 3 entries are outside"),
    ],
)
def test_what_is_no_order_is_refused(fake_rows, order: Any, message: str):
    with pytest.raises(ValueError, match=message):
        OrderedPlan(Plan(fake_rows([4, 3]), POLICY, global_batch_size=2), order)


def test_rows_that_are_not_selected_are_refused(fake_rows):
    rows = fake_rows([4, 3])
    rows.selection = Selection(rows.starts, [[True, False, True, True], [True, True, False]], name="some")
    assert sequence(list(OrderedPlan(Plan(rows, POLICY, global_batch_size=2), [5, 0]).steps(0))) == [5, 0]
    with pytest.raises(ValueError, match=r"order: 2 of its rows are not selected, such as row 1; leave them out"):
        OrderedPlan(Plan(rows, POLICY, global_batch_size=2), [5, 6, 1, 6])


def test_batches_of_several_sizes_are_refused(fake_rows):
    policy = LengthAspectPolicy([4, 10, 20], [(64, 64)])
    policy.buckets = tuple(bucket._replace(rows=8 // number) for number, bucket in enumerate(policy.buckets, 1))
    with pytest.raises(ValueError, match="order: a token budget would decide which rows are in a batch"):
        OrderedPlan(Plan(fake_rows([4]), policy, global_batch_size=8), [0])


def test_an_epoch_whose_passes_are_too_many_is_refused(fake_rows):
    plan = OrderedPlan(Plan(fake_rows([4]), POLICY, global_batch_size=2), [1] * 10)
    with pytest.raises(ValueError, match=r"epoch must be 0 … 838859 of an order with a row 10 times: got 838860"):
        next(plan.steps(838_860))


def test_datasets_of_the_plan_stay_known(fake_rows):
    mixture = Mixture((ShardSpan(0, 1), ShardSpan(1, 2)))
    plan = OrderedPlan(Plan(fake_rows([4, 3]), POLICY, global_batch_size=2, mixture=mixture), [1])
    assert plan.mixture == mixture
