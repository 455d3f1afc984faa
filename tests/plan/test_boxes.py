"""Batches with room for boxes: a third side of buckets, which the plan decides as it does texts and images."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmdata.config.targets import TargetsConfig
from mmdata.plan import (
    Bucket,
    Groups,
    LengthAspectPolicy,
    Mixture,
    NativePolicy,
    OrderedPlan,
    Plan,
    Shapes,
    ShardSpan,
    Step,
)
from mmdata.plan.boxes import check_boxes
from mmdata.plan.buckets import fit_into_budget, merge_groups
from mmdata.plan.choose import box_bounds
from mmdata.plan.groups import cover_table
from mmdata.plan.weights import RowWeights, WeightedPlan

from .conftest import shapes

IMAGES = [(64, 64), (32, 96)]


# Policies


def test_policies_have_boxes_as_a_third_side():
    policy = LengthAspectPolicy([16, 32], [(224, 224), (192, 256)], [1, 4])
    assert [(bucket.length, bucket.boxes, bucket.height) for bucket in policy.buckets] == [
        (16, 1, 224),
        (32, 1, 224),
        (16, 4, 224),
        (32, 4, 224),
        (16, 1, 192),
        (32, 1, 192),
        (16, 4, 192),
        (32, 4, 192),
    ]
    native = NativePolicy([16], [4, 9], patch_size=16, boxes=[2, 3])
    assert [(bucket.patches, bucket.boxes) for bucket in native.buckets] == [(4, 2), (4, 3), (9, 2), (9, 3)]


def test_one_bound_leaves_the_order_of_the_buckets():
    without, one = (LengthAspectPolicy([16, 32], IMAGES, boxes).buckets for boxes in ([0], [7]))
    assert tuple(bucket._replace(boxes=7) for bucket in without) == one
    assert LengthAspectPolicy([16, 32], IMAGES).buckets == without


@pytest.mark.parametrize(
    "policy",
    [
        LengthAspectPolicy([16, 77], IMAGES, [2, 5, 9]),
        NativePolicy([16, 77], [4, 9], patch_size=32, boxes=[2, 5, 9]),
    ],
)
@given(st.lists(st.tuples(*[st.integers(1, 100)] * 3, st.integers(0, 20)), max_size=8))
def test_a_row_goes_to_the_smallest_bounds_that_hold_it(policy: Any, rows: list[tuple[int, int, int, int]]):
    for bucket, (length, _, _, boxes) in zip(policy.assign(shapes(*rows)).tolist(), rows, strict=True):
        assert policy.buckets[bucket].boxes == min((b for b in (2, 5, 9) if b >= boxes), default=9)
        assert policy.buckets[bucket].length == min((b for b in (16, 77) if b >= length), default=77)


@pytest.mark.parametrize("bounds", [[], [3, 2], [2, 2], [-1, 2]])
def test_bounds_that_do_not_rise_are_refused(bounds: list[int]):
    with pytest.raises(ValueError, match="boxes must rise, from 0 on: got"):
        LengthAspectPolicy([16], IMAGES, bounds)
    with pytest.raises(ValueError, match="boxes must rise, from 0 on: got"):
        NativePolicy([16], [4], patch_size=16, boxes=bounds)


def test_histograms_of_an_index_know_no_boxes():
    assert LengthAspectPolicy([16], IMAGES, [8]).uses_cells
    assert not LengthAspectPolicy([16], IMAGES, [2, 8]).uses_cells


def test_rows_with_more_boxes_than_room_are_told_of(caplog: pytest.LogCaptureFixture):
    counts = np.array([1, 9, 3, 4], np.int32)
    assert check_boxes(counts, [Bucket(8, 64, 64, boxes=9)]) == 0
    assert not caplog.records
    assert check_boxes(counts, [Bucket(8, 64, 64, boxes=1), Bucket(8, 64, 64, boxes=3)]) == 2
    assert "2 of 4 rows have more than 3 boxes, up to 9: the largest of them are kept" in caplog.text


# The choice of bounds


def padded(counts: list[int], bounds: list[int]) -> int:
    """Places for boxes, where each row has those of the smallest bound that holds it."""
    return sum(min(bound for bound in bounds if bound >= count) for count in counts)


@given(st.lists(st.integers(0, 14), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 12))
def test_bounds_pad_as_little_as_the_best_of_all_choices(counts: list[int], number: int, most: int):
    targets = TargetsConfig(boxes="json:boxes", box_buckets=number)
    with patch("mmdata.plan.choose.MOST_BOXES", most):
        bounds = box_bounds(targets, np.array(counts, np.int32))
    needed = [min(max(count, 1), most) for count in counts]
    assert bounds == sorted(set(bounds))
    assert 1 <= len(bounds) <= number
    assert bounds[-1] == max(needed)
    choices = (
        [*chosen, max(needed)]
        for size in range(number)
        for chosen in itertools.combinations(range(1, max(needed)), size)
    )
    assert padded(needed, bounds) == min(padded(needed, choice) for choice in choices)


# Plans


def policy_of(kind: str, bounds: list[int], *, budget: bool = False) -> Any:
    policy: Any = LengthAspectPolicy([8, 20, 77], IMAGES, bounds)
    if kind == "native":
        policy = NativePolicy([8, 77], [4, 16, 49], patch_size=16, boxes=bounds)
    if budget:
        policy.buckets = fit_into_budget(policy.buckets, 1200, global_batch_size=16, multiple=4)
    return policy


def rows_of_boxes(fake_rows: Any, sizes: list[int], seed: int) -> Any:
    rng, count = np.random.default_rng(seed), sum(sizes)
    return fake_rows(
        sizes,
        *rng.integers(1, 90, (2, count)),
        height=rng.integers(10, 120, count),
        width=rng.integers(10, 120, count),
        boxes=np.minimum(rng.geometric(0.3, count) - 1, 12),
    )


bounds_of_boxes = st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True).map(sorted)
sizes_of_shards = st.lists(st.sampled_from([0, 1, 5, 17, 40]), min_size=1, max_size=5).filter(any)
kinds = st.sampled_from(["shapes", "native"])


def check(rows: Any, policy: Any, steps: list[Step], epoch: int) -> None:
    """Each row comes once, in a batch that holds its text, its patches and its boxes, as far as any bucket does."""
    most = max(bucket.boxes for bucket in policy.buckets)
    seen = [row for step in steps for row in step.rows.tolist() if row >= 0]
    assert sorted(seen) == list(range(rows.count))
    own = policy.assign(rows.shapes(np.arange(rows.count), epoch))
    for step in steps:
        assert step.bucket in policy.buckets
        for row in step.rows[step.rows >= 0].tolist():
            bucket = policy.buckets[own[row]]
            assert step.bucket.boxes >= bucket.boxes >= min(rows.boxes[row], most)
            assert step.bucket.length >= bucket.length
            assert step.bucket.patches >= bucket.patches


def parts_agree(whole: list[Step], ranks: list[list[Step]]) -> None:
    for one, *own in zip(whole, *ranks, strict=True):
        assert {(step.bucket, step.number) for step in own} == {(one.bucket, one.number)}
        assert np.concatenate([step.rows for step in own]).tolist() == one.rows.tolist()


@given(sizes_of_shards, st.integers(0, 99), kinds, bounds_of_boxes, st.booleans(), st.sampled_from([1, 7, 2**20]))
def test_every_row_has_room_on_any_number_of_ranks_and_after_any_resume(
    fake_rows, sizes: list[int], seed: int, kind: str, bounds: list[int], budget: bool, window_rows: int
):
    rows, policy = rows_of_boxes(fake_rows, sizes, seed), policy_of(kind, bounds, budget=budget)

    def steps(epoch: int, start: int = 0, rank: int = 0, world_size: int = 1) -> list[Step]:
        # each rank plans by itself, as another process does
        plan = Plan(rows, policy, global_batch_size=8, seed=seed, window_rows=window_rows)
        return list(plan.steps(epoch, start=start, rank=rank, world_size=world_size))

    for epoch in (0, 1):
        whole = steps(epoch)
        check(rows, policy, whole, epoch)
        for world_size, start in [(1, len(whole) // 2), (2, 0), (4, len(whole) // 3), (2, len(whole))]:
            parts_agree(whole[start:], [steps(epoch, start, rank, world_size) for rank in range(world_size)])


@pytest.mark.parametrize("leftover", ["pad", "drop"])
@pytest.mark.parametrize("kind", ["shapes", "native"])
def test_rows_that_are_not_merged_stay_in_their_own_bucket(fake_rows, kind: str, leftover: Any):
    rows, policy = rows_of_boxes(fake_rows, [40, 40], 3), policy_of(kind, [1, 3, 8])
    own = policy.assign(rows.shapes(np.arange(rows.count), 0))
    for step in Plan(rows, policy, global_batch_size=2, leftover=leftover).steps(0):
        assert {policy.buckets[own[row]] for row in step.rows[step.rows >= 0].tolist()} == {step.bucket}


@given(sizes_of_shards, st.integers(0, 99), kinds, bounds_of_boxes)
def test_groups_stand_in_batches_with_room_for_all(
    fake_rows, sizes: list[int], seed: int, kind: str, bounds: list[int]
):
    rows, policy = rows_of_boxes(fake_rows, sizes, seed), policy_of(kind, bounds)
    labels = np.random.default_rng(seed).integers(-1, 3, rows.count)
    mixture = Mixture((ShardSpan(0, len(sizes)),), Groups(labels, 2, 0, "test"))
    check(rows, policy, list(Plan(rows, policy, global_batch_size=8, mixture=mixture).steps(1)), 1)


@given(sizes_of_shards, st.integers(0, 99), kinds, bounds_of_boxes)
def test_an_order_has_batches_with_room_for_all(fake_rows, sizes: list[int], seed: int, kind: str, bounds: list[int]):
    rows, policy = rows_of_boxes(fake_rows, sizes, seed), policy_of(kind, bounds)
    order = np.random.default_rng(seed).permutation(rows.count)
    plan = OrderedPlan(Plan(rows, policy, global_batch_size=4), order)
    steps = list(plan.steps(0))
    check(rows, policy, steps, 0)
    assert [row for step in steps for row in step.rows.tolist() if row >= 0] == order.tolist()
    parts_agree(steps, [list(plan.steps(0, rank=rank, world_size=2)) for rank in range(2)])


def test_weights_leave_each_row_its_room(fake_rows):
    rows, policy = rows_of_boxes(fake_rows, [60, 60], 5), policy_of("shapes", [1, 4])
    plan = WeightedPlan(
        Plan(rows, policy, global_batch_size=8), RowWeights(np.full(rows.count, 1.5), name="half more", seed=0)
    )
    steps = list(plan.steps(0))
    assert sum(int((step.rows >= 0).sum()) for step in steps) > rows.count
    for step in steps:
        assert (rows.boxes[step.rows[step.rows >= 0]].clip(max=4) <= step.bucket.boxes).all()
    assert plan.steps_of_buckets(0) == [sum(step.bucket == bucket for step in steps) for bucket in policy.buckets]


buckets_of_any_kind = st.lists(
    st.builds(
        Bucket,
        st.integers(1, 4),
        st.integers(0, 1),
        st.just(0),
        st.integers(0, 2),
        st.just(0),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=10,
    unique=True,
)


@given(buckets_of_any_kind)
def test_merged_rows_reach_one_last_group_whatever_the_buckets(buckets: list[Bucket]):
    holding = set(range(len(buckets)))
    for group, targets in merge_groups(buckets):
        holding -= set(group)
        holding |= set(targets)
        for bucket, target in zip(group, targets, strict=False):
            assert buckets[target].length >= buckets[bucket].length
    assert holding == set()


@given(kinds, bounds_of_boxes)
def test_a_bucket_that_covers_two_holds_both(kind: str, bounds: list[int]):
    buckets = policy_of(kind, bounds).buckets
    for i, row in enumerate(cover_table(buckets).tolist()):
        for j, k in enumerate(row):
            pair, found = (buckets[i], buckets[j]), buckets[k]
            assert (found.length, found.patches, found.boxes) == (
                max(bucket.length for bucket in pair),
                max(bucket.patches for bucket in pair),
                max(bucket.boxes for bucket in pair),
            )
            assert found[1:3] == buckets[i][1:3]


def test_what_a_shape_leaves_over_goes_to_more_boxes_of_the_same_shape(fake_rows):
    rows = fake_rows([4], [5] * 4, height=[64, 64, 10, 10], width=[64, 64, 30, 30], boxes=[1, 4, 1, 4])
    policy = LengthAspectPolicy([8, 77], IMAGES, [1, 4])
    steps = list(Plan(rows, policy, global_batch_size=2, shuffle=False).steps(0))
    assert [(step.bucket, step.rows.tolist()) for step in steps] == [
        (Bucket(8, 64, 64, boxes=4), [0, 1]),
        (Bucket(8, 32, 96, boxes=4), [2, 3]),
    ]


def test_shapes_of_rows_in_several_passes_have_their_boxes(fake_rows):
    rows = rows_of_boxes(fake_rows, [10], 2)
    found: Shapes = rows.shapes_of(np.array([3, 4, 3, 7]) + (np.array([0, 1, 1, 0]) << 40))
    boxes: NDArray[np.int64] = rows.boxes[[3, 4, 3, 7]]
    assert found.boxes.tolist() == boxes.tolist()
