"""Buckets of images at their own size: the bucket of a row, and where a rest goes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import Bucket, NativePolicy, Plan
from mmdata.plan.buckets import merge_groups

from .conftest import shapes


def test_native_policy_names_its_buckets():
    policy = NativePolicy([16, 32], [64, 256], patch_size=16)
    assert policy.buckets == (Bucket(16, 0, 0, 64), Bucket(32, 0, 0, 64), Bucket(16, 0, 0, 256), Bucket(32, 0, 0, 256))


def test_bucket_says_what_its_images_are():
    assert Bucket(16, 0, 0, 256).image == "256 patches"
    assert Bucket(16, 224, 288).image == "224 × 288"


def test_native_policy_example_of_the_docstring():
    policy = NativePolicy([77], [64, 256], patch_size=16)
    assert policy.assign(shapes((5, 100, 130), (5, 100, 150), (5, 1000, 1500))).tolist() == [0, 1, 1]


def test_native_policy_takes_the_smallest_bounds_that_hold_caption_and_image():
    policy = NativePolicy([16, 77], [4, 6, 9], patch_size=10)
    rows = shapes((16, 20, 20), (17, 20, 20), (1, 20, 21), (1, 21, 21), (99, 1, 61), (16, 1, 40))
    assert [policy.buckets[i] for i in policy.assign(rows)] == [
        Bucket(16, 0, 0, 4),
        Bucket(77, 0, 0, 4),
        Bucket(16, 0, 0, 6),
        Bucket(16, 0, 0, 9),
        Bucket(77, 0, 0, 9),
        Bucket(16, 0, 0, 4),
    ]


def test_native_policy_assigns_nothing_to_no_rows():
    assert NativePolicy([77], [4], patch_size=16).assign(shapes()).tolist() == []


@pytest.mark.parametrize(
    ("lengths", "patches", "patch_size", "message"),
    [
        ([], [4], 16, r"lengths must rise: got \[\]"),
        ([8, 8], [4], 16, r"lengths must rise: got \[8, 8\]"),
        ([8], [], 16, r"patches must rise, from 1 on: got \[\]"),
        ([8], [9, 4], 16, r"patches must rise, from 1 on: got \[9, 4\]"),
        ([8], [0, 4], 16, r"patches must rise, from 1 on: got \[0, 4\]"),
        ([8], [4], 0, r"patch_size must be 1 pixel or more: got 0"),
    ],
)
def test_native_policy_refuses(lengths: list[int], patches: list[int], patch_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        NativePolicy(lengths, patches, patch_size=patch_size)


def test_merge_groups_go_to_more_patches_whatever_the_order_of_the_buckets():
    few, many = [Bucket(8, 0, 0, 64), Bucket(16, 0, 0, 64)], [Bucket(8, 0, 0, 256), Bucket(16, 0, 0, 256)]
    assert merge_groups(few + many) == [([3, 1], [3, 1]), ([1, 0], [3, 2]), ([3, 2], [])]
    assert merge_groups(many + few) == [([1, 3], [1, 3]), ([3, 2], [1, 0]), ([1, 0], [])]


rows_of_images = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 120), st.integers(1, 120)), min_size=1, max_size=60
)


@given(rows_of_images, st.sampled_from([1, 2, 4, 6]))
def test_plan_never_gives_a_row_fewer_patches_or_less_text_than_its_own_bucket(
    fake_rows, images: list[tuple[int, int, int]], size: int
):
    lengths, height, width = zip(*images, strict=True)
    policy = NativePolicy([8, 16, 40], [4, 16, 49], patch_size=16)
    rows = fake_rows([len(images)], lengths, height=height, width=width)
    plan = Plan(rows, policy, global_batch_size=size, seed=1)
    seen: list[int] = []
    for step in plan.steps(0):
        for row in step.rows[step.rows >= 0].tolist():
            seen.append(row)
            needed = math.ceil(height[row] / 16) * math.ceil(width[row] / 16)
            assert step.bucket.patches >= min(needed, 49)
            assert step.bucket.length >= lengths[row]
    assert sorted(seen) == list(range(len(images)))
