"""Reads the header of a JPEG XL image, bare or in its container. No pixel is decoded, and no decoder is needed.

Source: ISO/IEC 18181-1 (codestream, annex D) and 18181-2 (container).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_BOXES = 1024
"""Most boxes of a file that are looked at."""

_CONTAINER = b"\0\0\0\x0cJXL \r\n\x87\n"
_CODESTREAM = b"\xff\x0a"
_HEAD_BYTES = 32
"""Bytes of the codestream that hold all that is read, which takes 24 at most."""
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
"""(width, height) of the aspect ratios 1 to 7."""


class JxlHeader(NamedTuple):
    """What the header says.

    Attributes:
        height, width: pixels as stored.
        orientation: of the codestream, 1 to 8, as EXIF numbers them. It alone counts: EXIF data in the file may say
            another, which the standard tells readers to ignore.
    """

    height: int
    width: int
    orientation: int

    @property
    def displayed(self) -> tuple[int, int]:
        """(height, width) as displayed, and as libjxl decodes."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def is_jxl(head: bytes) -> bool:
    """Whether a file begins as a JPEG XL image does; `head` is its first 12 bytes or more."""
    return head.startswith((_CODESTREAM, _CONTAINER))


def read_jxl(data: bytes | memoryview) -> JxlHeader:
    """Read the header.

    Raises:
        ValueError: it is damaged, the file ends before its end, or it is that of an animation.
    """
    head = _codestream(memoryview(data))
    if not head.startswith(_CODESTREAM):
        raise ValueError(f"the codestream starts with {head[:2]!r}, not with {_CODESTREAM!r}")
    bits = _Bits(head[len(_CODESTREAM) :])
    height, width = _size(bits)
    orientation = 1
    is_default = bits.take(1)
    if not is_default and bits.take(1):  # has further fields
        orientation = 1 + bits.take(3)
        if bits.take(1):
            _size(bits)  # for which it is meant to be shown
        if bits.take(1):
            _preview_size(bits)
        if bits.take(1):
            raise ValueError("an animation is not supported: pillow-jxl-plugin gives its last frame, not its first")
    return JxlHeader(height, width, orientation)


def _codestream(data: memoryview) -> bytes:
    """The first bytes of the codestream, which a container may hold in parts."""
    if bytes(data[:2]) == _CODESTREAM:
        return bytes(data[:_HEAD_BYTES])
    at, head = 0, b""
    for _ in range(MAX_BOXES):
        if at + 8 > len(data):
            raise ValueError(f"ends after {len(data)} bytes, before the codestream: cut short")
        size, kind = struct.unpack_from(">I4s", data, at)
        begin = at + 8
        if size == 1:
            if begin + 8 > len(data):
                raise ValueError(f"ends after {len(data)} bytes, within a box: cut short")
            size, begin = struct.unpack_from(">Q", data, begin)[0], begin + 8
        end = len(data) if size == 0 else at + size  # 0: to the end of the file
        if end < begin:
            raise ValueError(f"a box {kind!r} of {size} bytes")
        if kind in (b"jxlc", b"jxlp"):
            begin += 4 if kind == b"jxlp" else 0  # the number of the part
            head += bytes(data[begin : min(end, begin + _HEAD_BYTES - len(head))])
            if kind == b"jxlc" or len(head) == _HEAD_BYTES or end >= len(data):
                return head
        at = end
    raise ValueError(f"no codestream in its first {MAX_BOXES} boxes")


class _Bits:
    """Numbers of whole bits, the lowest bit of the first byte first."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "little")
        self._left = 8 * len(data)

    def take(self, count: int) -> int:
        """The next number of `count` bits."""
        if count > self._left:
            raise ValueError("ends within its header: cut short")
        found = self._value & ((1 << count) - 1)
        self._value >>= count
        self._left -= count
        return found

    def choice(self, *options: tuple[int, int]) -> int:
        """A number in one of four sizes (U32 of the standard); an option is (offset, bits)."""
        offset, count = options[self.take(2)]
        return offset + self.take(count)


def _size(bits: _Bits) -> tuple[int, int]:
    """SizeHeader: (height, width)."""
    is_small = bits.take(1)

    def side() -> int:
        return 8 * (1 + bits.take(5)) if is_small else bits.choice((1, 9), (1, 13), (1, 18), (1, 30))

    height = side()
    return height, _width(height, bits.take(3)) or side()


def _preview_size(bits: _Bits) -> tuple[int, int]:
    """PreviewHeader: (height, width)."""
    in_eights = bits.take(1)

    def side() -> int:
        if in_eights:
            return 8 * bits.choice((16, 0), (32, 0), (1, 5), (33, 9))
        return bits.choice((1, 6), (65, 8), (321, 10), (1345, 12))

    height = side()
    return height, _width(height, bits.take(3)) or side()


def _width(height: int, ratio: int) -> int:
    """The width that a ratio gives; 0 if it is written out."""
    if not ratio:
        return 0
    across, down = _RATIOS[ratio - 1]
    return height * across // down
