"""Crops of decoded images, resized in uint8, or cut into patches at their own aspect ratio (SigLIP 2 NaFlex).

Sizes and patches are those of transformers' Siglip2ImageProcessor, which is not imported because that takes seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import interpolate

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

_EDGE = 1e-6
"""Tolerance in pixels for edges that lie half-way between two pixels, or at one: products of sizes are rounded."""


# Bounds and precision of the search for a scale; transformers' numbers.
_LEAST_SCALE = 1e-6
_GREATEST_SCALE = 100.0
_STEP = 1e-5


class Crop(NamedTuple):
    """A rectangle in an image, in pixels from the top left corner; its edges may lie between pixels."""

    top: float
    left: float
    height: float
    width: float

    def scaled(self, y: float, x: float) -> Crop:
        """The same part of the image after it was resized to y times its height and x times its width."""
        return Crop(self.top * y, self.left * x, self.height * y, self.width * x)


UNKNOWN = Crop(0, 0, 0, 0)
"""The part of an image that a user's transform shows: nobody knows it."""


def shown_of_jpeg(size: tuple[int, int], decoded: tuple[int, int], mirrored: tuple[bool, bool]) -> Crop:
    """What a JPEG that was decoded at a fraction of its size shows, in pixels of the image.

    libjpeg-turbo makes n × n pixels of each block of 8 × 8, and rounds the size up: the last pixels of a row or column
    may reach beyond the image.

    Args:
        size: (height, width) of the image, upright.
        decoded: (height, width) of what was decoded, upright.
        mirrored: whether top and bottom, and left and right, were turned round after decoding, so that what reaches
            beyond the image came first.

    Example:
        1001 rows at 1/8 are 126, which cover 1008 rows. Row 1000 of the image begins at 125, not at 125.9.
    """
    # libjpeg-turbo takes the least n that gives a size; of a few pixels two may give the same.
    n = next(n for n in (8, *range(1, 8)) if decoded == (-(-size[0] * n // 8), -(-size[1] * n // 8)))
    height, width = decoded[0] * 8 / n, decoded[1] * 8 / n
    return Crop(size[0] - height if mirrored[0] else 0.0, size[1] - width if mirrored[1] else 0.0, height, width)


def eval_crop(size: tuple[int, int], shape: tuple[int, int]) -> Crop:
    """The box that CLIP's preprocessing keeps: the image is resized to cover the target, then cropped at its centre.

    Args:
        size: (height, width) of the image.
        shape: (height, width) of the target.

    Example:
        480 × 640 pixels to 224 × 224: the image becomes 224 × 298, of which columns 37 to 261 are kept. In the image
        itself these are columns 79.5 to 560.5: eval_crop((480, 640), (224, 224)) is about Crop(0, 79.5, 480, 481).

    Source: torchvision's Resize, which rounds the longer side down, and CenterCrop, which rounds the offset.
    """
    (height, width), (rows, columns) = size, shape
    if height * columns <= width * rows:  # the height decides
        covering = (rows, max(columns, rows * width // height))
    else:
        covering = (max(rows, columns * height // width), columns)
    top, left = round((covering[0] - rows) / 2), round((covering[1] - columns) / 2)
    return Crop(top, left, rows, columns).scaled(height / covering[0], width / covering[1])


def train_crop(
    size: tuple[int, int],
    shape: tuple[int, int],
    uniforms: list[float],
    *,
    scale: tuple[float, float],
    hold: Box | None = None,
) -> Crop:
    """A random box, of random area and of about the target's aspect ratio.

    The area is uniform over the part of `scale` in which a box of an allowed ratio fits into the image; if none fits,
    it is the largest that does. The logarithm of the ratio is uniform over the allowed ratios with which a box of that
    area fits. The position is uniform over the image.

    Args:
        size: (height, width) of the image.
        shape: (height, width) of the target.
        uniforms: four numbers in [0, 1): for area, ratio, top and left.
        scale: share of the image's area that the box covers (min, max).
        hold: a part of the image that the box holds: its sides grow where they are shorter, whatever `scale` says, and
            its position is uniform over those that hold it.

    Example:
        480 × 720 pixels to 224 × 224, scale (0.9, 1): the ratios 3/4 to 4/3 are allowed, so the largest box has
        480 × 640 pixels, a share of 0.89. All boxes have this size; they differ in `left`, 0 to 80. With scale
        (0.5, 1), shares are uniform from 0.5 to 0.89; with a share of 0.8 the ratios 1.2 to 4/3 fit.

    Source: torchvision's RandomResizedCrop, with two differences. The ratio varies by 3/4 to 4/3 around the target's
    ratio, not around 1. And torchvision draws up to ten times until a box fits, which makes large areas rarer, and then
    takes the largest box at the centre; for images of 3:2 and scale (0.9, 1) it always does.
    """
    height, width = size
    u_area, u_ratio, u_top, u_left = uniforms
    own, target = width / height, shape[1] / shape[0]
    low, high = target * 3 / 4, target * 4 / 3
    # A box with a share s of the area and a ratio r fits if s · own <= r <= own / s. For an s to exist with low <= r <=
    # high, s may be at most high / own and own / low.
    largest = min(1.0, high / own, own / low)
    least, most = min(scale[0], largest), min(scale[1], largest)
    share = least + u_area * (most - least)
    low, high = max(low, share * own), min(high, own / share)
    ratio = low * (high / low) ** u_ratio
    area = share * height * width
    box_height = min(height, max(1, round(math.sqrt(area / ratio))))
    box_width = min(width, max(1, round(math.sqrt(area * ratio))))
    if hold is None:
        top, left = int(u_top * (height - box_height + 1)), int(u_left * (width - box_width + 1))
        return Crop(top, left, box_height, box_width)
    top, box_height = _holding(hold[1], hold[3], u_top, box_height, height)
    left, box_width = _holding(hold[0], hold[2], u_left, box_width, width)
    return Crop(top, left, box_height, box_width)


def _holding(begin: float, end: float, u: float, length: int, side: int) -> tuple[int, int]:
    """First pixel and length of a stretch that holds another, its place uniform among those that do."""
    first, last = math.floor(begin), math.ceil(end)
    length = max(length, last - first)
    low, high = max(0, last - length), min(first, side - length)
    return low + int(u * (high - low + 1)), length


def resize_crop(image: Tensor, box: Crop, out: Tensor) -> None:
    """Resize a box of an image into `out`: bicubic with antialias, in uint8.

    Args:
        image: uint8 (3, H, W).
        box: inside the image, as `whole_pixels` gives it.
        out: uint8 (3, h, w), overwritten.
    """
    top, left, height, width = box
    region, size = image[:, top : top + height, left : left + width], out.shape[1:]
    if size == (height, width):
        out.copy_(region)
    else:
        out.copy_(interpolate(region[None], size, mode="bicubic", antialias=True)[0])


def whole_pixels(box: Crop, size: tuple[int, int], *, outwards: bool = False) -> Crop:
    """A box of an image of `size` in whole pixels, of which there is one at least.

    Edges are rounded to the nearest pixel, and halves outwards, so a centred box stays centred; with `outwards` all are
    rounded outwards, so the result holds the box.
    """
    top, height = _whole(box.top, box.top + box.height, size[0], outwards)
    left, width = _whole(box.left, box.left + box.width, size[1], outwards)
    return Crop(top, left, height, width)


def _whole(begin: float, end: float, side: int, outwards: bool) -> tuple[int, int]:
    """The first pixel of a stretch and the number of its pixels."""
    if outwards:
        first, last = math.floor(begin + _EDGE), math.ceil(end - _EDGE)
    else:
        first, last = math.ceil(begin - 0.5 - _EDGE), math.floor(end + 0.5 + _EDGE)
    first = min(max(0, first), side - 1)
    return first, max(1, min(side, last) - first)


def native_size(height: int, width: int, *, patch_size: int, patches: int) -> tuple[int, int]:
    """The largest size with an image's aspect ratio, in whole patches, that has at most `patches` of them.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        patch_size: side of a patch, in pixels; both sides of the result are multiples of it.
        patches: largest number of patches.

    Returns:
        (height, width) in pixels.

    Example:
        480 × 640 pixels, 256 patches of 16: native_size gives (224, 288), which are 14 · 18 = 252 patches.

    Source: get_image_size_for_max_num_patches of transformers; the same search, so that the sizes are the same.
    """
    low, high = _LEAST_SCALE, _GREATEST_SCALE
    while high - low >= _STEP:
        scale = (low + high) / 2
        if _patches(height, scale, patch_size) * _patches(width, scale, patch_size) <= patches:
            low = scale
        else:
            high = scale
    return _patches(height, low, patch_size) * patch_size, _patches(width, low, patch_size) * patch_size


def _patches(side: int, scale: float, patch_size: int) -> int:
    """Patches along a side of an image that is resized by `scale`."""
    return max(1, math.ceil(side * scale / patch_size))


def write_patches(image: Tensor, out: Tensor, *, patch_size: int) -> None:
    """Cut an image into patches, row by row, and pad them with zeros.

    Args:
        image: uint8 (3, H, W); H and W are multiples of patch_size.
        out: uint8 (N, patch_size² · 3), overwritten; the values of a patch are in the order height, width, channel.
        patch_size: side of a patch, in pixels.
    """
    rows, columns = image.shape[1] // patch_size, image.shape[2] // patch_size
    grid = image.view(3, rows, patch_size, columns, patch_size).permute(1, 3, 2, 4, 0)
    out[: rows * columns].view(rows, columns, patch_size, patch_size, 3).copy_(grid)
    out[rows * columns :] = 0
