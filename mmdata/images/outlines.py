"""Outlines of objects, run lengths or polygons as COCO's, and the image in whose pixels they are given.

They are drawn at the size of the batch, where the crop of their image has gone: nothing is drawn of boxes that a crop
leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.images.decode import mirrored, oriented, oriented_size
from mmdata.images.regions import Floats, Geometry, Regions

Mask = NDArray[np.uint8]

LARGEST = 2**31
"""Largest number of an annotation."""
FINER = 3
"""Polygons are drawn so many times as large: Pillow fills whatever an edge touches, half a pixel more on each side."""
MAX_DIGITS = 7
"""Most characters, of 5 bits each, of one number in a compressed string of run lengths."""


@dataclass(frozen=True)
class Frame:
    """The image in whose pixels something is annotated: a file before its EXIF orientation, and before it was shrunk.

    Attributes:
        size: (height, width) as stored.
        orientation: EXIF orientation, 1 to 8, by which it is upright.
        image: (height, width) of the upright image that is decoded now.
    """

    size: tuple[int, int]
    orientation: int
    image: tuple[int, int]

    def points(self, points: Floats) -> Floats:
        """Points (…, 2) of the frame, x before y, in pixels of the upright image."""
        height, width = oriented_size(*self.size, self.orientation)
        down, across = mirrored(self.orientation)
        turned = points[..., ::-1] if self.orientation >= 5 else points
        turned = np.where((across, down), (width, height) - turned, turned)
        return turned * (self.image[1] / width, self.image[0] / height)

    def upright(self, regions: Regions) -> Regions:
        """Boxes and key points in pixels of the upright image; outlines stay as they are."""
        return regions.moved(self.points)

    def sampled(self, mask: Mask, geometry: Geometry) -> Mask:
        """A mask of the frame at the pixels of the batch."""
        turned = oriented(mask[..., None], self.orientation)[..., 0]
        scale = turned.shape[0] / self.image[0], turned.shape[1] / self.image[1]
        return geometry._replace(crop=geometry.crop.scaled(*scale)).sampled(turned)


@dataclass(frozen=True)
class RunLengths:
    """A mask as numbers of its pixels that are alternately outside and inside, down its columns, the left one first.

    Attributes:
        counts: int64 (k,), whose sum is the number of pixels.
        frame: the image that it is a mask of.
    """

    counts: NDArray[np.int64]
    frame: Frame

    def draw(self, geometry: Geometry) -> Mask:
        """The mask in the batch, uint8 (H, W), 1 inside."""
        height, width = self.frame.size
        columns = np.repeat(np.arange(len(self.counts)) % 2, self.counts).astype(np.uint8)
        return self.frame.sampled(columns.reshape(width, height).T, geometry)


@dataclass(frozen=True)
class Polygons:
    """Areas between corners, in pixels of the upright image; none: an object without an outline.

    Attributes:
        corners: (k, 2) of each area, x before y.
    """

    corners: list[Floats]

    def draw(self, geometry: Geometry) -> Mask:
        """The mask in the batch, uint8 (H, W), 1 inside."""
        height, width = geometry.size
        image = Image.new("L", (FINER * width, FINER * height))
        canvas = ImageDraw.Draw(image)
        for corners in self.corners:
            # To Pillow whole numbers are the middles of pixels.
            canvas.polygon((FINER * geometry.points(corners) - 0.5).ravel().tolist(), fill=1)
        return np.asarray(image)[FINER // 2 :: FINER, FINER // 2 :: FINER]


def outline_of(value: Any, frame: Frame) -> RunLengths | Polygons:
    """The outline that an annotation's `segmentation` is: run lengths, a list of polygons, or None, which is empty.

    Raises:
        BadSample: it is something else; run lengths are of another image, or do not add up.
    """
    if isinstance(value, dict):
        return _run_lengths(cast("dict[str, Any]", value), frame)
    if value is None:
        return Polygons([])
    if not isinstance(value, list):
        raise _bad(f"{excerpt(value)}; expected run lengths or polygons")
    corners: list[Floats] = []
    for polygon in cast("list[Any]", value):
        if not isinstance(polygon, list) or len(polygon := cast("list[Any]", polygon)) < 6 or len(polygon) % 2:
            raise _bad(f"polygon {excerpt(polygon)}; expected x and y of three or more corners")
        if not are_numbers(polygon):
            raise _bad(f"polygon {excerpt(polygon)}: its corners are not all numbers")
        height, width = frame.size
        # Pillow draws with 32 bits; nobody sees how an edge runs that ends further away.
        near = np.clip(np.array(polygon, np.float64).reshape(-1, 2), (-width, -height), (2 * width, 2 * height))
        corners.append(frame.points(near))
    return Polygons(corners)


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether all values are finite numbers, none of them a boolean."""
    return all(type(value) in (int, float) and -LARGEST <= value <= LARGEST for value in values)


def _run_lengths(value: dict[str, Any], frame: Frame) -> RunLengths:
    size, counts = value.get("size"), value.get("counts")
    if size != list(frame.size):
        own = "{} × {}".format(*frame.size)
        raise _bad(f"run lengths of size {excerpt(size)}, and the image has {own} pixels (height × width)")
    if isinstance(counts, str):
        counts = _unpacked(counts)
    if not isinstance(counts, list) or not all(type(n) is int and 0 <= n <= LARGEST for n in cast("list[Any]", counts)):
        raise _bad(f"counts {excerpt(counts)}; expected whole numbers from 0 on, or a compressed string")
    if (total := sum(cast("list[int]", counts))) != frame.size[0] * frame.size[1]:
        raise _bad(f"run lengths add up to {total:,} pixels, and the image has {frame.size[0] * frame.size[1]:,}")
    return RunLengths(np.array(counts, np.int64), frame)


def _unpacked(text: str) -> Sequence[int]:
    """The numbers in a compressed string of COCO's.

    Each character has 5 bits of a number, the lowest first, and a bit that says whether more follow. The numbers are
    signed; from the fourth on they are the difference to the number two before.
    """
    counts: list[int] = []
    number, bits = 0, 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or bits == 5 * MAX_DIGITS:
            raise _bad(f"counts {excerpt(text)}: not a compressed string of run lengths")
        number |= (code & 31) << bits
        bits += 5
        if code & 32:
            continue
        if code & 16:
            number -= 1 << bits
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
        number, bits = 0, 0
    if bits:
        raise _bad(f"counts {excerpt(text)}: the compressed string is cut")
    return counts


def _bad(detail: str) -> BadSample:
    return BadSample(Reason.BAD_FIELD, detail)
