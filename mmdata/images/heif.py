"""Reads the header of a HEIF image: HEIC or AVIF. No pixel is decoded, and no decoder is needed.

Source: ISO/IEC 14496-12 (boxes) and 23008-12 (items and their properties).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_BOXES = 4096
"""Most boxes of a file, or in a box, that are looked at."""
MAX_ITEMS = 65_536
"""Most items whose properties are looked through for those of the image."""

_AVIF = (b"avif", b"avis")
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
_EITHER = (b"mif1", b"msf1")
"""Brands (`ftyp`) of files whose further brands say how the image is coded."""

_ORIENTATIONS = {None: (1, 8, 3, 6), 0: (4, 5, 2, 7), 1: (2, 7, 4, 5)}
"""EXIF orientation of a mirroring (`imir`; None without one) after 0 to 3 quarter turns (`irot`)."""


@dataclass(frozen=True)
class HeifHeader:
    """What the properties of the primary image say.

    Attributes:
        height, width: pixels as coded.
        displayed: (height, width) after cropping (`clap`), turning (`irot`) and mirroring, as libheif decodes.
        orientation: turning and mirroring in the order of the standard, as an EXIF orientation. They alone count: EXIF
            data in the file may say another, which the standard tells readers to ignore.
    """

    height: int
    width: int
    displayed: tuple[int, int]
    orientation: int


def heif_format(head: bytes) -> str | None:
    """ "AVIF" or "HEIF" if a file begins as such an image does, else None; `head` is its first 64 bytes."""
    if head[4:8] != b"ftyp":
        return None
    major = head[8:12]
    if major in _AVIF:
        return "AVIF"
    if major in _HEIC:
        return "HEIF"
    if major not in _EITHER:
        return None
    end = min(int.from_bytes(head[:4], "big"), len(head))
    further = [head[at : at + 4] for at in range(16, end, 4)]
    is_avif = any(brand in _AVIF for brand in further) and not any(brand in _HEIC for brand in further)
    return "AVIF" if is_avif else "HEIF"


def read_heif(data: bytes | memoryview) -> HeifHeader:
    """Read the header.

    Raises:
        ValueError: it is damaged, the file ends before its end, or it holds no still image.
    """
    view = memoryview(data)
    kinds: set[bytes] = set()
    for kind, content in _boxes(view):
        kinds.add(kind)
        if kind == b"meta":
            return _of_primary(content[4:])
    if b"moov" in kinds:
        raise ValueError("a sequence without a still image is not supported")
    raise ValueError(f"ends after {len(view)} bytes, without a box b'meta'")


def _of_primary(meta: memoryview) -> HeifHeader:
    primary: int | None = None
    properties: list[tuple[bytes, memoryview]] = []
    associations: list[memoryview] = []
    for kind, content in _boxes(meta):
        if kind == b"pitm":
            primary = _number(content, 4, 4 if _number(content, 0, 1) else 2)
        elif kind == b"iprp":
            for inner, inside in _boxes(content):
                if inner == b"ipco":
                    properties += _boxes(inside)
                elif inner == b"ipma":
                    associations.append(inside)
    if primary is None:
        raise ValueError("no box b'pitm' says which of its images is shown")
    numbers = [number for box in associations for number in _properties_of(box, primary)]
    if any(number > len(properties) for number in numbers):
        raise ValueError(f"its image has property {max(numbers)} of {len(properties)}")
    return _header([properties[number - 1] for number in numbers if number])


def _header(properties: list[tuple[bytes, memoryview]]) -> HeifHeader:
    """The header that an image's properties make, in their order."""
    sizes = [(_number(content, 8, 4), _number(content, 4, 4)) for kind, content in properties if kind == b"ispe"]
    if not sizes or 0 in sizes[0]:
        raise ValueError("no size (ispe) of its image" if not sizes else "a side of its image is 0")
    height, width = coded = sizes[0]
    turns, mirror = 0, None
    for kind, content in properties:
        if kind == b"clap":
            height, width = _cropped(height, width, content)
        elif kind == b"irot":
            turns = _number(content, 0, 1) & 3
            height, width = (width, height) if turns % 2 else (height, width)
        elif kind == b"imir":
            mirror = _number(content, 0, 1) & 1
    return HeifHeader(*coded, (height, width), _ORIENTATIONS[mirror][turns])


def _cropped(height: int, width: int, clap: memoryview) -> tuple[int, int]:
    """(height, width) that a clean aperture leaves, its edges rounded as libheif rounds them."""
    if len(clap) < 32:
        raise ValueError("a cropping (clap) that is cut short")
    wide, wide_by, high, high_by, x, x_by, y, y_by = struct.unpack_from(">IIIIiIiI", clap)
    if 0 in (wide_by, high_by, x_by, y_by):
        raise ValueError("a cropping (clap) divides by 0")
    kept = _kept(height, Fraction(high, high_by), Fraction(y, y_by))
    return kept, _kept(width, Fraction(wide, wide_by), Fraction(x, x_by))


def _kept(side: int, kept: Fraction, offset: Fraction) -> int:
    """Pixels of a side that are kept, of `kept` around the middle moved by `offset`."""
    first = math.floor(offset + Fraction(side - 1, 2) - (kept - 1) / 2)
    last = math.floor(kept - 1 + first + Fraction(1, 2))
    found = min(side - 1, last) - max(0, first) + 1
    if found < 1:
        raise ValueError("a cropping (clap) leaves nothing")
    return found


def _properties_of(ipma: memoryview, item: int) -> list[int]:
    """Numbers of an item's properties, from 1; 0 stands for none."""
    id_bytes = 4 if _number(ipma, 0, 1) else 2
    bytes_each = 2 if _number(ipma, 3, 1) & 1 else 1
    at = 8
    for _ in range(min(_number(ipma, 4, 4), MAX_ITEMS)):
        found, count = _number(ipma, at, id_bytes), _number(ipma, at + id_bytes, 1)
        at += id_bytes + 1
        if found == item:
            most = 2 ** (8 * bytes_each - 1) - 1  # the highest bit says whether a reader must know the property
            return [_number(ipma, at + i * bytes_each, bytes_each) & most for i in range(count)]
        at += count * bytes_each
    return []


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Kind and content of the boxes that lie one after the other."""
    at = 0
    for _ in range(MAX_BOXES):
        if at == len(data):
            return
        size, kind, begin = _number(data, at, 4), bytes(data[at + 4 : at + 8]), at + 8
        if size == 1:
            size, begin = _number(data, begin, 8), begin + 8
        end = len(data) if size == 0 else at + size  # 0: to the end
        if not begin <= end <= len(data):
            raise ValueError(f"a box {kind!r} of {size} bytes where {len(data) - at} are left: cut short")
        yield kind, data[begin:end]
        at = end
    raise ValueError(f"more than {MAX_BOXES} boxes")


def _number(data: memoryview, at: int, count: int) -> int:
    """A number of `count` bytes."""
    if at + count > len(data):
        raise ValueError("ends within its header: cut short")
    return int.from_bytes(data[at : at + count], "big")
