"""What is known of parts of an image, boxes, key points and masks, and where it lies in the pixels of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.images.crop import Crop

Floats = NDArray[np.float64]


class Geometry(NamedTuple):
    """How the pixels of an image came into a batch.

    Attributes:
        crop: the part of the upright image that was taken, in its pixels.
        size: (height, width) that it was resized to.
        flipped: whether it was then mirrored left to right.
    """

    crop: Crop
    size: tuple[int, int]
    flipped: bool = False

    def points(self, points: Floats) -> Floats:
        """Points (…, 2) of the upright image, x before y, in pixels of the batch."""
        crop, (height, width) = self.crop, self.size
        scale = np.array([width / crop.width, height / crop.height])
        moved = (points - (crop.left, crop.top)) * scale
        if self.flipped:
            moved[..., 0] = width - moved[..., 0]
        return moved


@dataclass(frozen=True)
class Regions:
    """What is known of parts of an image, in pixels of the upright image.

    Attributes:
        boxes: float64 (n, 4), left, top, right and bottom, inside the image.
        keypoints: float64 (n, K, 3), x, y and visibility; None: not asked for.
        mask: uint8 (h, w), a class for each pixel of the upright image; None: not asked for.
        outlines: of each box, what `mmdata.images.outlines` draws; None: not asked for.
    """

    boxes: Floats
    keypoints: Floats | None = None
    mask: NDArray[np.uint8] | None = None
    outlines: list[Any] | None = None


@dataclass(frozen=True)
class Followed:
    """The regions that a crop has kept, in pixels of the batch.

    Attributes:
        kept: int64 (m,), places of the boxes among those of `Regions`, rising.
        boxes: float64 (m, 4), left, top, right and bottom, inside the crop.
        keypoints: float64 (m, K, 3).
        masks: uint8 (h, w) or (m, h, w).
    """

    kept: NDArray[np.int64]
    boxes: Floats
    keypoints: Floats | None = None
    masks: NDArray[np.uint8] | None = None
