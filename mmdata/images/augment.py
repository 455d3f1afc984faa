"""Augmentation of a training crop in uint8: horizontal flip, colour jitter, grayscale.

Values are those of torchvision.transforms.v2.functional, which converts to float and back, rounding down, in each
adjustment. This module converts an image once and rounds in place: all four adjustments take a third of the time.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from mmdata.config.images import AugmentConfig

NUM_DRAWS = 8
"""How many random numbers an image needs."""

JITTER_PROB = 0.8
"""Probability that the colours of a crop change at all: that of SimCLR and of OpenCLIP's recipes."""
HUE_SHARE = 0.25
"""Largest turn of the hue for each unit of the strength of the other changes: 0.2 for 0.8 in SimCLR, 0.08 for 0.32 in
OpenCLIP's recipes."""

_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
_ORDERS = list(permutations(_ADJUSTMENTS))
_WHITE = 255.0
_HUE_SCALE = 255.999 / 255  # torchvision makes a float v of [0, 1] the integer below v · 255.999


class Augmentation(NamedTuple):
    """Changes of an image, in the order in which they are applied.

    Attributes:
        flip: mirror the image horizontally.
        adjustments: (name, factor) pairs. A factor of 1 changes nothing in brightness, contrast and saturation; the
            factor of hue is a part of the colour circle, -0.5 to 0.5, and 0 changes nothing.
        grayscale: make all colours grey.
    """

    flip: bool
    adjustments: list[tuple[str, float]]
    grayscale: bool


def draw_changes(augment: AugmentConfig, uniforms: list[float]) -> Augmentation:
    """Choose the changes of an image.

    Args:
        augment: probabilities and ranges.
        uniforms: `NUM_DRAWS` numbers in [0, 1).

    Example:
        With color_jitter 0.4 and a number of 0.25 for brightness its factor is 0.8: a quarter of the way from 0.6 to
        1.4.

    Source: torchvision's ColorJitter, whose adjustments come in random order; its probability, and grayscale after it,
    as in open_clip. The strengths: Chen et al. 2020, SimCLR, appendix A (arXiv:2002.05709).
    """
    u_flip, u_jitter, u_order, *u_factors, u_grayscale = uniforms
    factors: dict[str, float] = {}
    for name, u in zip(_ADJUSTMENTS, u_factors, strict=True):
        spread = augment.color_jitter
        low, high = (-HUE_SHARE * spread, HUE_SHARE * spread) if name == "hue" else (max(0.0, 1 - spread), 1 + spread)
        factors[name] = low + u * (high - low)
    is_changed = augment.color_jitter > 0 and u_jitter < JITTER_PROB
    order = _ORDERS[int(u_order * len(_ORDERS))] if is_changed else ()
    return Augmentation(
        flip=u_flip < augment.horizontal_flip_prob,
        adjustments=[(name, factors[name]) for name in order],
        grayscale=u_grayscale < augment.grayscale_prob,
    )


def apply_changes(changes: Augmentation, image: Tensor) -> None:
    """Change an image in place.

    Args:
        changes: as `draw_changes` gives them.
        image: uint8 (3, H, W), RGB.
    """
    if changes.flip:
        image.copy_(image.flip(2))
    if not changes.adjustments and not changes.grayscale:
        return
    values = image.float()  # whole numbers 0 … 255 before and after each step
    for name, factor in changes.adjustments:
        if name == "brightness":
            _round_down(values.mul_(factor))
        elif name == "contrast":
            _blend(values, _luma(values).mean(dim=(0, 1, 2), keepdim=True), factor)
        elif name == "saturation":
            _blend(values, _luma(values), factor)
        else:
            _shift_hue(values, factor)
    image.copy_(_luma(values) if changes.grayscale else values)


def _round_down(values: Tensor) -> None:
    values.clamp_(0, _WHITE).floor_()


def _blend(values: Tensor, other: Tensor, factor: float) -> None:
    _round_down(values.mul_(factor).add_(other, alpha=1 - factor))


def _luma(values: Tensor) -> Tensor:
    """Brightness of each pixel as torchvision weighs it: (1, H, W)."""
    red, green, blue = values.split(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _shift_hue(values: Tensor, factor: float) -> None:
    """Turn the colour circle by `factor` of a whole turn; the greatest and the least value of a pixel stay as they are.

    A pixel's hue h, in sixths of a turn, decides how far each channel lies below the greatest: (greatest - least) times
    clamp(2 - |k - 2|, 0, 1), where k is h + 5 for red, h + 3 for green and h + 1 for blue, modulo 6. This is one
    formula for all six sectors of the circle, where torchvision looks channels up sector by sector; it takes a third of
    the time. Rounding differs by one level in about one of 10,000 values.

    Example:
        (200, 100, 0) has h = 0.5; a third of a turn makes it 2.5. Then k is 1.5 for red, 5.5 for green and 3.5 for
        blue, whose values lie 1, 0 and 0.5 times 200 below 200: (0, 200, 100).

    Source: the conversions between RGB and HSV of Smith 1978, Color gamut transform pairs.
    """
    red, green, blue = values
    greatest = torch.maximum(torch.maximum(red, green), blue)
    spread = greatest - torch.minimum(torch.minimum(red, green), blue)  # (H, W)
    # The hue of the unturned pixel: the greatest channel says which third of the circle, the other two where in it.
    is_red, is_green = greatest == red, greatest == green
    hue = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    hue.div_(spread.clamp_min(1)).add_(torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0))).add_(6 * factor)
    for channel, offset in zip(values, (5, 3, 1), strict=True):
        torch.add(hue, offset, out=channel)
        channel.div_(6).sub_(channel.floor()).mul_(6)  # modulo 6; torch's remainder takes five times as long
        channel.sub_(2).abs_().neg_().add_(2).clamp_(0, 1)  # 2 - |k - 2|, in place
        channel.mul_(spread).neg_().add_(greatest).mul_(_HUE_SCALE)
    _round_down(values)
