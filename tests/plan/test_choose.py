"""Bounds and image shapes chosen from counts: each against the best of all choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.index.columns import ASPECT_BINS, aspect_bin
from mmdata.plan.choose import choose_image_shapes, choose_lengths


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


# Bounds for several image shapes


# Image shapes


def aspects(**images: int) -> np.ndarray:
    """Counts of the aspect bins: `aspects(w4h3=10)` has ten images of 4 × 3."""
    counts = np.zeros(ASPECT_BINS, np.int64)
    for name, count in images.items():
        width, height = map(int, name[1:].split("h"))
        counts[aspect_bin(height, width)] += count
    return counts


def area_kept(images: dict[int, int], chosen: tuple[tuple[int, int], ...]) -> float:
    """Area left of images of area 1, each in the shape that cuts off least."""
    kept = 0.0
    for bin_, count in images.items():
        aspect = 2 ** ((bin_ - 128) / 32)
        ratios = [aspect / (width / height) for height, width in chosen]
        kept += count * max(min(ratio, 1 / ratio) for ratio in ratios)
    return kept


def test_choose_image_shapes_example_of_the_docstring():
    counts = aspects(w3h4=5, w4h3=5)
    assert choose_image_shapes(counts, 2, image_size=224, patch_size=16) == [(256, 192), (192, 256)]


def test_choose_image_shapes_are_no_more_than_crop_less():
    counts = aspects(w3h4=5, w4h3=5, w1h1=1)
    assert choose_image_shapes(counts, 9, image_size=224, patch_size=16) == [(256, 192), (224, 224), (192, 256)]
    assert choose_image_shapes(aspects(w1h1=1), 9, image_size=224, patch_size=16) == [(224, 224)]


def test_choose_image_shapes_serve_the_common_images():
    assert choose_image_shapes(aspects(w3h4=1, w4h3=99), 1, image_size=224, patch_size=16) == [(192, 256)]


def test_choose_image_shapes_of_equal_aspect_take_the_most_patches():
    # At most 9 patches, at least 1: 2:1 may be 1 × 2 or 2 × 4 of them.
    assert choose_image_shapes(aspects(w2h1=1), 1, image_size=30, patch_size=10, tolerance=0.9) == [(20, 40)]


def test_choose_image_shapes_of_extreme_images_are_as_long_as_patches_allow():
    assert choose_image_shapes(aspects(w100h1=3), 2, image_size=48, patch_size=16, tolerance=0.0) == [(16, 144)]
    assert choose_image_shapes(aspects(w1h100=3), 2, image_size=48, patch_size=16, tolerance=0.0) == [(144, 16)]


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, ASPECT_BINS - 1), st.integers(1, 100), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.3]),
)
def test_choose_image_shapes_crop_as_little_as_the_best_of_all_choices(
    images: dict[int, int], count: int, side: int, tolerance: float
):
    counts = np.zeros(ASPECT_BINS, np.int64)
    counts[list(images)] = list(images.values())
    chosen = choose_image_shapes(counts, count, image_size=side * 8, patch_size=8, tolerance=tolerance)
    patches = side * side
    allowed = [
        (rows * 8, columns * 8)
        for rows in range(1, patches + 1)
        for columns in range(1, patches + 1)
        if patches * (1 - tolerance) - 1e-9 <= rows * columns <= patches
    ]
    assert 1 <= len(chosen) <= count
    assert set(chosen) <= set(allowed)
    assert [width / height for height, width in chosen] == sorted({width / height for height, width in chosen})
    best = max(area_kept(images, choice) for choice in itertools.combinations(allowed, min(count, len(allowed))))
    assert math.isclose(area_kept(images, tuple(chosen)), best, rel_tol=1e-8)


def test_choose_image_shapes_lack_at_most_a_tenth_of_the_patches():
    counts = np.bincount(
        aspect_bin(np.ones(10**4), np.exp(np.random.default_rng(0).normal(0.2, 0.4, 10**4))), minlength=ASPECT_BINS
    )
    for height, width in choose_image_shapes(counts, 8, image_size=384, patch_size=16):
        assert height % 16 == width % 16 == 0
        assert 0.9 * 24**2 <= (height // 16) * (width // 16) <= 24**2


@pytest.mark.parametrize(("image_size", "patch_size"), [(8, 16), (40, 16)])
def test_choose_image_shapes_needs_whole_patches(image_size: int, patch_size: int):
    message = f"image_size {image_size} is no multiple of patch_size 16: image shapes consist of whole patches"
    with pytest.raises(ValueError, match=message):
        choose_image_shapes(aspects(w1h1=1), 1, image_size=image_size, patch_size=patch_size)


def test_choose_image_shapes_of_nothing_is_refused():
    with pytest.raises(ValueError, match="choose_image_shapes: the histogram of aspect ratios is empty"):
        choose_image_shapes(np.zeros(ASPECT_BINS, np.int64), 1, image_size=32, patch_size=16)
