"""Images in their own aspect ratio as patches, for SigLIP 2 NaFlex: choose the size, cut, pad.

Sizes and patches are those of transformers' Siglip2ImageProcessor, which is not imported because that takes seconds.
"""

from __future__ import annotations

import math

from torch import Tensor

# Bounds and precision of the search for a scale; transformers' numbers.
_LEAST_SCALE = 1e-6
_GREATEST_SCALE = 100.0
_STEP = 1e-5


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
        if _whole(height, scale, patch_size) * _whole(width, scale, patch_size) <= patches:
            low = scale
        else:
            high = scale
    return _whole(height, low, patch_size) * patch_size, _whole(width, low, patch_size) * patch_size


def _whole(side: int, scale: float, patch_size: int) -> int:
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
