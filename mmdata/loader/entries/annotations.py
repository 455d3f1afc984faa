"""Annotations of an image as they stand in JSON or arrays: in whose pixels they are, and what is refused.

All that is checked here raises BadSample, whose detail says what was got and what was expected.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.images.decode import oriented, oriented_size
from mmdata.images.outlines import LARGEST, Frame, are_numbers
from mmdata.images.pillow import MAX_PIXELS
from mmdata.images.regions import Floats
from mmdata.tars import clean_caption

ROUNDING = 1e-6
"""Share of an image by which relative boxes may lie outside it."""


def frame_of(content: Any, image: tuple[int, int], orientation: int, pixels: str = "original") -> Frame:
    """The image in whose pixels boxes are, whose size is compared with the one in the JSON beside them.

    Args:
        content: of the member with the boxes. "original_height" and "original_width" are the size before the image was
            shrunk, upright if there is an "original_orientation"; else "height" and "width" are the size.
        image: (height, width) of the upright image in the shard.
        orientation: EXIF orientation of the image in the shard.
        pixels: `TargetsConfig.box_pixels`; only "original" regards the size before the image was shrunk.

    Raises:
        BadSample: it is the size of another image.

    Example:
        A photo of 480 × 640 pixels, of which orientation 6 makes 640 × 480: frame_of({"height": 480, "width": 640},
        (640, 480), 6) is Frame((480, 640), 6, (640, 480)), and with pixels "upright" Frame((640, 480), 1, (640, 480)).
    """
    said = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    stored = oriented_size(*image, orientation)
    original = _size_in(said, "original_") if pixels == "original" else None
    known = original or _size_in(said, "") or stored
    if pixels == "upright":
        frame, is_own = Frame(image, 1, image), known in (image, stored)
    elif original is None:
        frame, is_own = Frame(stored, orientation, image), known == stored
    else:
        if (turned := said.get("original_orientation")) is not None:
            if type(turned) is not int or not 1 <= turned <= 8:
                raise BadSample(Reason.BAD_FIELD, f"original_orientation is {excerpt(turned)}; expected 1 to 8")
            original, orientation = oriented_size(*original, turned), turned
        frame = Frame(original, orientation, image)
        is_own = _is_scaled(oriented_size(*frame.size, frame.orientation), image)
    if is_own:
        return frame
    raise _of_another("boxes are of an image", known, stored, image)


def _of_another(what: str, size: tuple[int, ...], stored: tuple[int, int], image: tuple[int, int]) -> BadSample:
    sizes = [" × ".join(map(str, one)) for one in (size, stored)]
    remedy = " before its EXIF orientation: box_pixels: upright is for what is of the image as displayed"
    remedy = remedy if size == image else ""
    detail = f"{what} of {sizes[0]} pixels (height × width), and the image has {sizes[1]}{remedy}"
    return BadSample(Reason.BAD_FIELD, detail)


def _size_in(said: dict[str, Any], prefix: str) -> tuple[int, int] | None:
    sides = [said.get(f"{prefix}{name}") for name in ("height", "width")]
    if None in sides:
        return None
    if not all(type(side) in (int, float) and side == int(side) > 0 for side in cast("list[Any]", sides)):
        raise BadSample(Reason.BAD_FIELD, f"{prefix}height and {prefix}width are {sides}; expected numbers of pixels")
    height, width = map(int, cast("list[Any]", sides))
    if height * width > MAX_PIXELS:
        raise BadSample(Reason.BAD_FIELD, f"boxes are of an image of {height} × {width} pixels: more than {MAX_PIXELS}")
    return height, width


def _is_scaled(size: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether an image of `size` may have been shrunk to that of `image`, whose sides are rounded to whole pixels."""
    least = max((now - 1) / before for before, now in zip(size, image, strict=True))
    most = min((now + 1) / before for before, now in zip(size, image, strict=True))
    return least < most


def boxes_of(value: Any, box_format: str, frame: Frame) -> Floats:
    """Boxes as they are given, float64 (n, 4), as left, top, right and bottom in pixels of the frame."""
    found: list[Any] = []
    for place, one in enumerate(as_list(value)):
        box = cast("dict[str, Any]", one).get("bbox") if isinstance(one, dict) else one
        if not isinstance(box, list) or len(box := cast("list[Any]", box)) != 4 or not are_numbers(box):
            raise BadSample(Reason.BAD_FIELD, f"box {place} is {str(box)[:80]}; expected four numbers")
        found.append(box)
    boxes = np.array(found, np.float64).reshape(-1, 4)
    if box_format == "xywh":
        boxes[:, 2:] += boxes[:, :2]
    if (reversed_ := np.flatnonzero((boxes[:, 2:] < boxes[:, :2]).any(axis=1))).size:
        detail = "its width or height is negative" if box_format == "xywh" else "it ends before it begins"
        raise BadSample(Reason.BAD_FIELD, f"box {reversed_[0]} is {found[reversed_[0]]} ({box_format}): {detail}")
    height, width = frame.size
    if box_format == "relative":
        if (beyond := np.flatnonzero(((boxes < -ROUNDING) | (boxes > 1 + ROUNDING)).any(axis=1))).size:
            detail = f"box {beyond[0]} is {found[beyond[0]]}, and relative boxes lie from 0 to 1: see box_format"
            raise BadSample(Reason.BAD_FIELD, detail)
        return boxes.clip(0, 1) * (width, height, width, height)
    with_area = boxes[(boxes[:, 2:] > boxes[:, :2]).all(axis=1)]
    if height * width > 1 and len(with_area) and with_area.min() >= 0 and with_area.max() <= 1:
        raise BadSample(Reason.BAD_FIELD, "all boxes lie from 0 to 1: shares of the image? box_format: relative")
    return boxes


def as_list(values: Any) -> list[Any]:
    """A list, or an array as one; None is empty."""
    listed: Any = values.tolist() if isinstance(values, np.ndarray) else [] if values is None else values
    if not isinstance(listed, list):
        raise BadSample(Reason.BAD_FIELD, f"{excerpt(values)}; expected a list with one for each box")
    return cast("list[Any]", listed)


def of_each(values: Any, number: int) -> list[Any]:
    """A value for each box; None where there are none."""
    if values is None:
        return [None] * number
    if len(listed := as_list(values)) != number:
        raise BadSample(Reason.BAD_FIELD, f"{len(listed)} for {number} boxes")
    return listed


def label_of(value: Any, classes: dict[str, int]) -> int | None:
    """The class of a box, -1 where it has none; None: a name that is not among the classes."""
    if value is None:
        return -1
    if classes and isinstance(value, str):
        return classes.get(value)
    if classes or type(value) is not int or not 0 <= value < LARGEST:
        expected = "a name of data.targets.box_classes" if classes else "a whole number from 0 on"
        raise BadSample(Reason.BAD_FIELD, f"class {excerpt(value)}; expected {expected}")
    return value


def phrase_of(value: Any) -> str:
    if value is None:
        return ""
    try:
        return clean_caption(value)
    except BadSample as bad:
        if bad.reason is Reason.EMPTY_CAPTION:
            return ""
        raise BadSample(Reason.BAD_FIELD, f"phrase {excerpt(value)}: {bad.detail}") from bad


def keypoints_of(value: Any, number: int) -> list[Any]:
    """The numbers of a box's key points; zeros for a box without any."""
    if value is None:
        return [0] * (3 * number)
    flat = flattened(value)
    if not isinstance(value, list) or not are_numbers(flat) or len(flat) != 3 * number:
        raise BadSample(Reason.BAD_FIELD, f"key points {excerpt(value)}; expected x, y and visibility of {number}")
    return flat


def flattened(value: Any) -> list[Any]:
    """Numbers in one list, or in lists of three, as one list."""
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    if listed and all(isinstance(one, list) and len(cast("list[Any]", one)) == 3 for one in listed):
        return [number for one in listed for number in one]
    return listed


def upright_mask(mask: NDArray[np.uint8], image: tuple[int, int], orientation: int, pixels: str) -> NDArray[np.uint8]:
    """A mask of all classes as the image is upright; the mask is so itself if `pixels` are "upright"."""
    orientation = 1 if pixels == "upright" else orientation
    if mask.shape != (size := oriented_size(*image, orientation)):
        raise _of_another("a mask", mask.shape, size, image)
    return oriented(mask[..., None], orientation)[..., 0]
