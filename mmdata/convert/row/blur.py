"""Blurs boxes of an image, such as faces. Boxes that are not understood cost the row: no such image is published.

Pillow blurs with integers, so every processor gives the same pixels.

Source of the measures: Yang et al. 2022, "A Study of Face Obfuscation in ImageNet" (arXiv:2103.06191), as img2dataset
applies them to DataComp's `face_bboxes`; here each box has a blur of its own size, and its edge is not blended.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, cast

from PIL import Image, ImageFilter

from mmdata.errors import BadSample, Reason, excerpt

MAX_BOXES = 1000
"""Most boxes of an image."""
SPREAD = 0.1
"""Of a box's longer side in pixels: the standard deviation of the blur, and the margin that is blurred around it."""
_NEAR = (-1.0, 2.0)
"""Coordinates beyond these are no shares of a side, but pixels."""


class BlurBox(NamedTuple):
    """A box in an image as displayed, in shares of its width and height, within 0 and 1."""

    left: float
    top: float
    right: float
    bottom: float


def parse_boxes(cell: Any) -> list[BlurBox]:
    """The boxes in a cell of a table.

    Args:
        cell: a list of [left, top, right, bottom], or one as JSON text; None, blanks and an empty list are no boxes.

    Raises:
        BadSample: it is something else, or a box is empty or outside the image. What is partly outside is cut off.
    """
    found = cell
    if isinstance(cell, str):
        try:
            found = json.loads(cell) if cell.strip() else None
        except (ValueError, RecursionError):
            raise _bad(cell, "is no JSON") from None
    if found is None:
        return []
    if not isinstance(found, list):
        raise _bad(cell, "is no list of boxes")
    boxes = cast("list[Any]", found)
    if len(boxes) > MAX_BOXES:
        raise _bad(cell, f"holds {len(boxes)} boxes; at most {MAX_BOXES} are blurred")
    return [_box(one) for one in boxes]


def blur(image: Image.Image, boxes: list[BlurBox]) -> Image.Image:
    """A copy of an image with its boxes blurred, and a margin around each; the other pixels stay.

    Args:
        image: RGB, upright.
        boxes: may overlap; there the larger one's blur holds.

    Example:
        In an image of 640 × 480 pixels the box (0.25, 0.25, 0.5, 0.75) has 160 × 240 pixels, from 160 across and 120
        down. Its blur has a standard deviation of 24 pixels, and covers 136 to 344 across and 96 to 384 down.
    """
    blurred = image.copy()
    for box in sorted(boxes, key=lambda one: (_longer_side(one, image), one)):
        spread = SPREAD * _longer_side(box, image)
        covered = _within(image, box, spread)
        sigma = max(1.0, spread)
        # Three box blurs in a row, which reach about three standard deviations: no pixel beyond these counts.
        around = _within(image, box, spread + math.ceil(3 * sigma) + 3)
        part = image.crop(around).filter(ImageFilter.GaussianBlur(sigma))
        left, top = around[:2]
        inner = (covered[0] - left, covered[1] - top, covered[2] - left, covered[3] - top)
        blurred.paste(part.crop(inner), covered)
    return blurred


def _box(found: Any) -> BlurBox:
    if not isinstance(found, list) or len(cast("list[Any]", found)) != 4:
        raise _bad(found, "is no box of four numbers, [left, top, right, bottom]")
    numbers = cast("list[Any]", found)
    if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        raise _bad(found, "is no box of four numbers, [left, top, right, bottom]")
    if not all(_NEAR[0] <= number <= _NEAR[1] for number in numbers):  # written so that NaN is refused too
        raise _bad(found, "is no box in shares of the image's width and height, 0 to 1; pixels are not taken")
    left, top, right, bottom = (min(1.0, max(0.0, float(number))) for number in numbers)
    if not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
        raise _bad(found, "is an empty box: its right must be beyond its left, and its bottom below its top")
    if not (left < right and top < bottom):
        raise _bad(found, "is a box outside the image")
    return BlurBox(left, top, right, bottom)


def _bad(cell: Any, what: str) -> BadSample:
    quoted = excerpt(str(cast("list[Any]", cell)) if isinstance(cell, list) else cell)
    return BadSample(Reason.BROKEN_ROW, f"boxes to blur: {quoted} {what}")


def _longer_side(box: BlurBox, image: Image.Image) -> float:
    return max((box.right - box.left) * image.width, (box.bottom - box.top) * image.height)


def _within(image: Image.Image, box: BlurBox, margin: float) -> tuple[int, int, int, int]:
    """Left, top, right and bottom, in whole pixels, of a box with a margin in pixels, as far as the image goes."""
    return (
        max(0, math.floor(box.left * image.width - margin)),
        max(0, math.floor(box.top * image.height - margin)),
        min(image.width, math.ceil(box.right * image.width + margin)),
        min(image.height, math.ceil(box.bottom * image.height + margin)),
    )
