"""Flip, colour jitter and grayscale: torchvision's values, drawn from the row's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional

from mmdata.config.images import AugmentConfig
from mmdata.images.augment import NUM_DRAWS, Augmentation, apply_changes, draw_changes
from mmdata.images.pixels import PixelTransform
from tests.images.placed import patches, pixels, png


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8))


def torchvisions(image: Tensor, changes: Augmentation) -> Tensor:
    if changes.flip:
        image = functional.horizontal_flip(image)
    for name, factor in changes.adjustments:
        image = getattr(functional, f"adjust_{name}")(image, factor)
    return functional.rgb_to_grayscale(image, 3) if changes.grayscale else image


def applied(changes: Augmentation, image: Tensor) -> Tensor:
    out = image.clone()
    apply_changes(changes, out)
    return out


FACTORS = st.floats(0.0, 3.0)
ADJUSTMENTS = st.lists(st.tuples(st.sampled_from(["brightness", "contrast", "saturation"]), FACTORS), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), ADJUSTMENTS, st.booleans(), st.integers(0, 10), st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_augment_equals_torchvision(
    flip: bool, adjustments: list[tuple[str, float]], grayscale: bool, seed: int, shape: tuple[int, int]
):
    image, changes = noise(*shape, seed), Augmentation(flip, adjustments, grayscale)
    assert torch.equal(applied(changes, image), torchvisions(image, changes))


def test_augment_hue_equals_torchvision_up_to_one_level():
    levels = torch.tensor([0, 1, 2, 50, 127, 128, 200, 254, 255], dtype=torch.uint8)
    image = torch.cartesian_prod(levels, levels, levels).T.reshape(3, 27, 27)  # greys and equal channels among them
    for source in (image, noise(120, 120)):
        for factor in [-0.5, -1 / 3, -0.11, 0.0, 0.02, 1 / 6, 0.25, 0.5]:
            changes = Augmentation(False, [("hue", factor)], False)
            difference = (applied(changes, source).int() - torchvisions(source, changes).int()).abs()
            assert difference.max() <= 1
            assert (difference > 0).float().mean() < 0.01


def test_augment_hue_of_a_third_of_a_turn_exchanges_the_channels():
    image = torch.tensor([200, 100, 0], dtype=torch.uint8).view(3, 1, 1)
    assert applied(Augmentation(False, [("hue", 1 / 3)], False), image).flatten().tolist() == [0, 200, 100]


def test_augment_draws_as_told():
    augment = AugmentConfig(horizontal_flip_prob=0.5, color_jitter=0.4, grayscale_prob=0.2)
    #           flip  jitter order brightness contrast saturation hue grayscale
    numbers = [0.49, 0.79, 0.0, 0.25, 0.9, 0.5, 0.75, 0.2]
    flip, adjustments, grayscale = draw_changes(augment, numbers)
    assert (flip, grayscale) == (True, False)
    assert [name for name, _ in adjustments] == ["brightness", "contrast", "saturation", "hue"]
    # 0.6 … 1.4 each, -0.1 … 0.1
    assert [factor for _, factor in adjustments] == pytest.approx([0.8, 1.32, 1.0, 0.05])
    strong = draw_changes(AugmentConfig(color_jitter=2.0), numbers).adjustments
    assert [factor for _, factor in strong] == pytest.approx([0.75, 2.7, 1.5, 0.25])  # 0 … 3, never below 0
    assert draw_changes(augment, [0.5, 0.8, 0.0, 0.25, 0.9, 0.5, 0.75, 0.19]) == Augmentation(False, [], True)


def test_augment_adjustments_come_in_every_order():
    augment = AugmentConfig(color_jitter=0.1)
    orders = {
        tuple(name for name, _ in draw_changes(augment, [0.9, 0.5, order / 24, *[0.5] * 5]).adjustments)
        for order in range(24)
    }
    assert len(orders) == 24


def test_augment_of_nothing_changes_nothing():
    assert draw_changes(AugmentConfig(), [0.0] * NUM_DRAWS) == Augmentation(False, [], False)


def test_augment_changes_the_same_crop():
    """The draws of the crop are not touched: the same box, with and without augmentation."""
    image = png(noise(60, 80), number=11)
    flipped = PixelTransform("train", crop_scale=(0.2, 0.8), augment=AugmentConfig(horizontal_flip_prob=1.0), seed=3)
    plain = PixelTransform("train", crop_scale=(0.2, 0.8), seed=3)
    assert torch.equal(pixels(flipped, image, (32, 48)).flip(2), pixels(plain, image, (32, 48)))


def test_augment_flips_patches_as_images():
    image = noise(32, 64)
    augment = AugmentConfig(horizontal_flip_prob=1.0)
    found = [
        patches(PixelTransform("train", crop_scale=(1.0, 1.0), augment=given, patch_size=8, seed=2), png(source), 32)
        for given, source in [(augment, image), (None, image)]
    ]
    (shape, ours), (plain_shape, plain) = found
    assert shape == plain_shape
    rows, columns = shape

    def whole(cut: Tensor) -> Tensor:
        grid = cut[: rows * columns].view(rows, columns, 8, 8, 3)
        return grid.permute(4, 0, 2, 1, 3).reshape(3, rows * 8, columns * 8)

    assert torch.equal(whole(ours).flip(2), whole(plain))


def test_augment_leaves_the_eval_transform_alone():
    image = png(noise(60, 80))
    augment = AugmentConfig(horizontal_flip_prob=0.5, color_jitter=0.4)
    eval_alone = pixels(PixelTransform("eval"), image, (32, 32))
    assert torch.equal(pixels(PixelTransform("eval", augment=augment), image, (32, 32)), eval_alone)
