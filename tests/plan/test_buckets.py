"""Buckets: the bucket of a row, the rows of a batch, and where a rest goes."""

from __future__ import annotations

import inspect
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmdata.plan import Bucket, BucketPolicy, LengthAspectPolicy, NativePolicy, Plan, Shapes
from mmdata.plan.buckets import fit_into_budget, merge_groups

from .conftest import shapes


def test_length_aspect_policy_names_its_buckets():
    policy = LengthAspectPolicy([16, 32], [(224, 224), (192, 256)])
    assert policy.buckets == (
        Bucket(16, 224, 224),
        Bucket(32, 224, 224),
        Bucket(16, 192, 256),
        Bucket(32, 192, 256),
    )


def test_length_aspect_policy_takes_the_smallest_bound_that_holds_the_caption():
    policy = LengthAspectPolicy([16, 32, 77], [(224, 224)])
    rows = shapes((1, 10, 10), (15, 10, 10), (16, 10, 10), (17, 10, 10), (32, 10, 10), (77, 10, 10), (500, 10, 10))
    assert policy.assign(rows).tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_length_aspect_policy_takes_the_nearest_aspect_ratio_on_a_log_scale():
    policy = LengthAspectPolicy([77], [(224, 224), (192, 256), (256, 192)])
    # Between 1 and 4/3 the border is sqrt(4/3) = 1.1547; ratios are known to about 1 %.
    rows = shapes((5, 1000, 1140), (5, 1000, 1170), (5, 1140, 1000), (5, 1170, 1000), (5, 10, 1000), (5, 1000, 10))
    assert policy.assign(rows).tolist() == [0, 1, 0, 2, 1, 2]


def test_length_aspect_policy_assigns_nothing_to_no_rows():
    assert LengthAspectPolicy([77], [(1, 1), (1, 2)]).assign(shapes()).tolist() == []


@pytest.mark.parametrize(
    ("lengths", "image_shapes", "message"),
    [
        ([], [(1, 1)], r"lengths must rise: got \[\]"),
        ([3, 3], [(1, 1)], r"lengths must rise: got \[3, 3\]"),
        ([3, 2], [(1, 1)], r"lengths must rise: got \[3, 2\]"),
        ([3], [], r"image_shapes must be different \(height, width\) pairs: got \[\]"),
        ([3], [(1, 2), (1, 2)], r"image_shapes must be different \(height, width\) pairs: got \[\(1, 2\), \(1, 2\)\]"),
    ],
)
def test_length_aspect_policy_refuses(lengths: list[int], image_shapes: list[tuple[int, int]], message: str):
    with pytest.raises(ValueError, match=message):
        LengthAspectPolicy(lengths, image_shapes)


# Batches by token budget


def test_fit_into_budget_example_of_the_docstring():
    buckets = LengthAspectPolicy([16, 77], [(224, 224)]).buckets
    fitted = fit_into_budget(buckets, 65_536, global_batch_size=1024)
    assert fitted == (Bucket(16, 224, 224, rows=304), Bucket(77, 224, 224, rows=240))


def test_fit_into_budget_counts_the_patches_that_a_bucket_names():
    buckets = NativePolicy([36], [64, 164], patch_size=16).buckets
    # 8000 / (36 + 64) = 80, and 8000 / (36 + 164) = 40
    fitted = fit_into_budget(buckets, 8_000, global_batch_size=64, multiple=4)
    assert [bucket.rows for bucket in fitted] == [64, 40]


@given(
    st.lists(st.integers(1, 77), min_size=1, max_size=4, unique=True).map(sorted),
    st.integers(1, 10),
    st.integers(1, 512),
    st.integers(1, 40_000),
)
def test_fit_into_budget_fills_the_budget_and_no_more(lengths: list[int], multiple: int, most: int, budget: int):
    image = [(32, 32), (16, 64), (40, 40)]  # 4 patches of 16 pixels each
    buckets = LengthAspectPolicy(lengths, image[:2] if multiple % 2 else image).buckets
    if budget < multiple * (lengths[-1] + 4) or most < multiple:
        with pytest.raises(ValueError, match="do not fit into token_budget"):
            fit_into_budget(buckets, budget, global_batch_size=most, multiple=multiple)
        return
    for bucket in fit_into_budget(buckets, budget, global_batch_size=most, multiple=multiple):
        size = bucket.rows
        assert size % multiple == 0
        assert size * (bucket.length + 4) <= budget
        assert size <= most
        assert (size + multiple) * (bucket.length + 4) > budget or size + multiple > most


@pytest.mark.parametrize("budget", [100, 2000])
def test_fit_into_budget_names_the_largest_bucket_where_one_does_not_fit(budget: int):
    message = (
        r"^8 rows of 273 tokens and patches \(text 77, image 224 × 224\) do not fit into "
        rf"token_budget {budget} and global_batch_size 64; set token_budget to 2184 or more$"
    )
    with pytest.raises(ValueError, match=message):
        fit_into_budget(LengthAspectPolicy([16, 77], [(224, 224)]).buckets, budget, global_batch_size=64)


# A policy of one's own


def test_bucket_policy_of_the_docstring_makes_a_plan(fake_rows):
    text = inspect.cleandoc(BucketPolicy.__doc__ or "")
    code = textwrap.dedent(text[text.index("    class Upright:") :])
    names = {"Bucket": Bucket, "Shapes": Shapes, "NDArray": NDArray, "np": np}
    exec(code, names)
    rows = fake_rows([3, 3], height=[20, 30, 20, 20, 30, 20], width=[30, 20, 30, 20, 10, 30])
    plan = Plan(rows, names["Upright"](), global_batch_size=2, shuffle=False)
    assert [(step.bucket, step.rows.tolist()) for step in plan.steps(0)] == [
        (Bucket(77, 224, 288), [0, 2]),
        (Bucket(77, 224, 288), [3, 5]),
        (Bucket(77, 288, 224), [1, 4]),
    ]
    assert len(code.splitlines()) <= 10


# The end of an epoch


def test_merge_groups_join_the_longest_texts_then_each_image_shape():
    buckets = LengthAspectPolicy([8, 16], [(2, 2), (2, 3)]).buckets
    assert merge_groups(buckets) == [([1, 3], [1, 3]), ([1, 0], [3, 2]), ([3, 2], [])]
    assert merge_groups(buckets[:2]) == [([1, 0], [])]


def test_merge_groups_of_unequal_bounds_go_on_with_the_shape_of_the_longest_text():
    # Positions: (8, a) 0, (77, a) 1, (20, b) 2, (8, c) 3, (40, c) 4.
    pairs = [(8, (2, 2)), (77, (2, 2)), (20, (2, 3)), (8, (3, 2)), (40, (3, 2))]
    buckets = [Bucket(length, *shape) for length, shape in pairs]
    assert merge_groups(buckets) == [([2], [4]), ([4, 3], [1, 0]), ([1, 0], [])]


@given(
    st.lists(
        st.builds(Bucket, st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=12, unique=True
    )
)
def test_merge_groups_reach_one_last_group_and_never_a_shorter_text(buckets: list[Bucket]):
    merges = merge_groups(buckets)
    assert [targets for _, targets in merges].count([]) == 1
    assert merges[-1][1] == []
    holding = set(range(len(buckets)))  # buckets that may still hold rows
    for group, targets in merges:
        lengths = [buckets[bucket].length for bucket in group]
        assert lengths == sorted(lengths, reverse=True)
        holding -= set(group)
        for bucket, target in zip(group, targets, strict=False):
            assert buckets[target].length >= buckets[bucket].length
            holding.add(target)
    assert holding == set()
