"""What is known of parts of an image, boxes, key points and masks, and where it lies in the pixels of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmdata.images.crop import Box, Crop

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Tolerance of shares of areas: of a box that a crop just holds, no part is lost."""


class Geometry(NamedTuple):
    """How the pixels of an image came into a batch.

    Coordinates are continuous: the pixel in the top left corner covers 0 to 1, and its centre is at 0.5.

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

    def to_original(self, part: Crop) -> Crop:
        """A part of the pixels, which are not flipped, in those of the upright image."""
        (top, left, height, width), (rows, columns) = self.crop, self.size
        y, x = height / rows, width / columns
        return Crop(top + part.top * y, left + part.left * x, part.height * y, part.width * x)

    def from_original(self, part: Crop) -> Crop:
        """A part of the upright image in the pixels, which are not flipped."""
        (top, left, height, width), (rows, columns) = self.crop, self.size
        y, x = rows / height, columns / width
        return Crop((part.top - top) * y, (part.left - left) * x, part.height * y, part.width * x)

    def sampled(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What a mask (h, w) of the upright image has at the centre of each pixel of the batch: uint8 `size`.

        The nearest pixel is that of torchvision's NEAREST_EXACT, which lies where the image's own pixels come from. Its
        NEAREST takes the pixel under the corner: a mask would lie up to half a pixel beside its image and its boxes.
        """
        (top, left, height, width), (rows, columns) = self.crop, self.size
        down = top + (np.arange(rows) + 0.5) * (height / rows)
        across = left + (np.arange(columns) + 0.5) * (width / columns)
        # A crop may reach beyond the image, where its last pixels go on.
        down, across = (
            at.astype(np.int64).clip(0, side - 1) for at, side in zip((down, across), mask.shape, strict=True)
        )
        return mask[down[:, None], across[::-1] if self.flipped else across]


class Outline(Protocol):
    """The mask of a box's object, known by its outline or its run lengths in the upright image."""

    def draw(self, geometry: Geometry) -> NDArray[np.uint8]:
        """The mask in pixels of a batch: uint8 `geometry.size`, 1 where the object is."""
        ...


@dataclass(frozen=True)
class Regions:
    """What is known of parts of an image, in pixels of the upright image.

    Attributes:
        boxes: float64 (n, 4), left, top, right and bottom, inside the image.
        keypoints: float64 (n, K, 3), x, y and visibility; None: not asked for.
        mask: uint8 (h, w), a class for each pixel of the upright image; None: not asked for.
        outlines: of each box; None: not asked for.
        labels: the class of each box, -1 where it has none; with the phrases, what nothing here looks at.
        texts: the phrase of each box, "" where it has none.
    """

    boxes: Floats
    keypoints: Floats | None = None
    mask: NDArray[np.uint8] | None = None
    outlines: Sequence[Outline] | None = None
    labels: Sequence[int] = ()
    texts: Sequence[str] = ()

    def moved(self, move: Callable[[Floats], Floats]) -> Regions:
        """The regions after `move` has moved each point (…, 2); the mask and outlines stay."""
        keypoints, corners = self.keypoints, move(self.boxes.reshape(-1, 2, 2))
        if keypoints is not None:
            keypoints = np.concatenate([move(keypoints[..., :2]), keypoints[..., 2:]], axis=-1)
        boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=-1)
        return replace(self, boxes=boxes, keypoints=keypoints)


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


def follow(
    regions: Regions, geometry: Geometry, *, min_visible: float, swaps: Sequence[tuple[int, int]] = ()
) -> Followed:
    """The regions of an image in the pixels of a batch.

    Boxes are cut at the edges of the crop. Key points are not: one outside the crop keeps its coordinates, which are
    then outside the batch's pixels, and has visibility 0.

    Args:
        regions: of the upright image.
        geometry: how its pixels came into the batch.
        min_visible: share of a box's area that must lie within the crop; a box of which nothing does is left out.
        swaps: pairs of key points that exchange their places where the image was mirrored, as left and right eye.

    Example:
        A crop of rows 0 to 100 and columns 100 to 200, resized to 50 × 50 and mirrored: of the box (90, 10, 120, 20)
        two thirds are within, and it becomes (40, 5, 50, 10).
    """
    (top, left, height, width), boxes = geometry.crop, regions.boxes
    within = boxes.clip([left, top, left, top], [left + width, top + height, left + width, top + height])
    area = _areas(within)
    kept = np.flatnonzero((area > 0) & (area >= min_visible * (1 - ROUNDING) * _areas(boxes)))
    rows, columns = geometry.size
    moved = Regions(within[kept], None if regions.keypoints is None else regions.keypoints[kept]).moved(geometry.points)
    followed = moved.boxes.clip(0, [columns, rows, columns, rows])  # products are rounded
    if (keypoints := moved.keypoints) is not None:
        is_inside = (keypoints[..., :2] >= 0) & (keypoints[..., :2] <= (columns, rows))
        keypoints[..., 2] *= is_inside.all(axis=-1)
        if geometry.flipped:
            for one, other in swaps:
                keypoints[:, [one, other]] = keypoints[:, [other, one]]
    masks = None
    if regions.mask is not None:
        masks = geometry.sampled(regions.mask)
    elif regions.outlines is not None:
        drawn = [regions.outlines[place].draw(geometry) for place in kept.tolist()]
        masks = np.stack(drawn) if drawn else np.zeros((0, rows, columns), np.uint8)
    return Followed(kept, followed, keypoints, masks)


def hull(boxes: Floats) -> Box | None:
    """The smallest box that holds all boxes (n, 4); None where there is none."""
    if not len(boxes):
        return None
    (left, top), (right, bottom) = boxes[:, :2].min(axis=0).tolist(), boxes[:, 2:].max(axis=0).tolist()
    return left, top, right, bottom


def _areas(boxes: Floats) -> Floats:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
