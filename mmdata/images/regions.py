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

    def sampled(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Stand-in."""
        crop, (height, width), flipped = self
        rows = (crop.top + (np.arange(height) + 0.5) * crop.height / height).astype(np.int64)
        columns = (crop.left + (np.arange(width) + 0.5) * crop.width / width).astype(np.int64)
        rows, columns = rows.clip(0, mask.shape[0] - 1), columns.clip(0, mask.shape[1] - 1)
        return mask[rows[:, None], columns[::-1] if flipped else columns]


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


class Written(NamedTuple):
    geometry: Geometry
    followed: Followed | None


def upright(regions: Regions, size: tuple[int, int], orientation: int) -> Regions:
    from dataclasses import replace

    h, w = size

    def turn(p: Floats) -> Floats:
        x, y = p[..., 0], p[..., 1]
        hh, ww = h, w
        if orientation >= 5:
            x, y, hh, ww = y, x, w, h
        x = ww - x if orientation in (2, 3, 6, 7) else x
        y = hh - y if orientation in (3, 4, 7, 8) else y
        return np.stack([x, y], -1)

    corners = turn(regions.boxes.reshape(-1, 2, 2))
    boxes = np.concatenate([corners.min(1), corners.max(1)], 1)
    keypoints = regions.keypoints
    if keypoints is not None:
        keypoints = np.concatenate([turn(keypoints[..., :2]), keypoints[..., 2:]], -1)
    from mmdata.images.decode import oriented

    mask = None if regions.mask is None else oriented(regions.mask[..., None], orientation)[..., 0]
    return replace(regions, boxes=boxes, keypoints=keypoints, mask=mask)


def follow(regions: Regions, geometry: Geometry, *, min_visible: float, swaps: Any = ()) -> Followed:
    crop = geometry.crop
    corner = np.array([crop.left, crop.top])
    corners = regions.boxes.reshape(-1, 2, 2).clip(corner, corner + (crop.width, crop.height))
    area = (corners[:, 1] - corners[:, 0]).prod(1)
    whole = (regions.boxes[:, 2:] - regions.boxes[:, :2]).prod(1)
    kept = np.flatnonzero((area > 0) & (area >= min_visible * whole))
    moved = geometry.points(corners[kept])
    boxes = np.concatenate([moved.min(1), moved.max(1)], 1)
    keypoints = regions.keypoints
    if keypoints is not None:
        p = geometry.points(keypoints[kept, :, :2])
        inside = ((p >= 0) & (p <= (geometry.size[1], geometry.size[0]))).all(-1)
        keypoints = np.concatenate([p, (keypoints[kept, :, 2] * inside)[..., None]], -1)
    masks = None
    if regions.mask is not None:
        masks = geometry.sampled(regions.mask)
    elif regions.outlines is not None:
        masks = np.zeros((len(kept), *geometry.size), np.uint8)
        for i, k in enumerate(kept):
            masks[i] = regions.outlines[k].draw(geometry)
    return Followed(kept, boxes, keypoints, masks)
