"""Buckets: the bounds with least padding, the bucket of a row, and where a rest goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import Bucket, LengthAspectPolicy, Shapes, choose_lengths
from mmdata.plan.buckets import merge_groups


def padded_tokens(histogram: list[int], bounds: list[int]) -> int:
    """Token places when each caption is padded to the smallest bound that holds it."""
    return sum(count * min(b for b in bounds if b >= length) for length, count in enumerate(histogram) if count)


def test_choose_lengths_example_of_the_docstring():
    histogram = np.zeros(21, np.int64)
    histogram[[4, 5, 20]] = [10, 10, 1]
    assert choose_lengths(histogram, 1) == [20]
    assert choose_lengths(histogram, 2) == [5, 20]
    assert choose_lengths(histogram, 3) == choose_lengths(histogram, 9) == [4, 5, 20]
    tokens = 4 * 10 + 5 * 10 + 20
    assert padded_tokens(histogram.tolist(), [5, 20]) - tokens == 10
    assert padded_tokens(histogram.tolist(), [4, 20]) - tokens == 150


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any),
    st.integers(1, 6),
)
def test_choose_lengths_pads_as_little_as_the_best_of_all_choices(histogram: list[int], count: int):
    bounds = choose_lengths(np.array(histogram), count)
    present = [length for length, captions in enumerate(histogram) if captions]
    assert bounds == sorted(set(bounds))
    assert len(bounds) <= count
    assert bounds[-1] == present[-1]
    choices = (
        [*chosen, present[-1]]
        for size in range(min(count, len(present)))
        for chosen in itertools.combinations(present[:-1], size)
    )
    assert padded_tokens(histogram, bounds) == min(padded_tokens(histogram, choice) for choice in choices)


def test_choose_lengths_tells_counts_of_billions_apart():
    # [2, 3] pads one token for each caption of length 1, [1, 3] one for each of length 2.
    assert choose_lengths(np.array([0, 10**12, 10**12 + 1, 1]), 2) == [2, 3]
    assert choose_lengths(np.array([0, 10**12 + 1, 10**12, 1]), 2) == [1, 3]


def test_choose_lengths_of_nothing_is_refused():
    with pytest.raises(ValueError, match="choose_lengths: the histogram is empty"):
        choose_lengths(np.zeros(5, np.int64), 3)


def shapes(*rows: tuple[int, int, int]) -> Shapes:
    """Shapes from (length, height, width) rows."""
    return Shapes(*np.array(rows, np.int64).reshape(-1, 3).T)


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


def test_merge_groups_join_the_longest_texts_then_each_image_shape():
    buckets = LengthAspectPolicy([8, 16], [(2, 2), (2, 3)]).buckets
    assert merge_groups(buckets) == [([1, 3], [1, 3]), ([1, 0], [3, 2]), ([3, 2], [])]
    assert merge_groups(buckets[:2]) == [([1, 0], [])]


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
