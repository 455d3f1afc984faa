"""Reads the size of a JPEG XL image: its plugin for Pillow decodes all pixels when it opens a file.

Source: ISO/IEC 18181-1 (codestream, annex D) and 18181-2 (container).
"""

from __future__ import annotations

import struct

MAX_BOXES = 1024
"""Most boxes of a file that are looked at."""

_CODESTREAM = b"\xff\x0a"
_HEAD_BYTES = 32
"""Bytes of the codestream that hold all that is read, which takes 14 at most."""
_SIDE_BITS = (9, 13, 18, 30)
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
"""(width, height) of the aspect ratios 1 to 7."""


def jxl_size(data: bytes | memoryview) -> tuple[int, int]:
    """(height, width) as displayed, and as libjxl decodes.

    Raises:
        ValueError: the header is damaged, or the file ends before its end.
    """
    head = _codestream(memoryview(data))
    if not head.startswith(_CODESTREAM):
        raise ValueError(f"the codestream starts with {head[:2]!r}, not with {_CODESTREAM!r}")
    value, left = int.from_bytes(head, "little") >> 16, 8 * len(head) - 16

    def take(count: int) -> int:
        """The next number of `count` bits, the lowest first."""
        nonlocal value, left
        if count > left:
            raise ValueError("ends within its header: cut short")
        found, value, left = value & ((1 << count) - 1), value >> count, left - count
        return found

    is_small = take(1)

    def side() -> int:
        return 8 * (1 + take(5)) if is_small else 1 + take(_SIDE_BITS[take(2)])

    height, ratio = side(), take(3)
    width = height * _RATIOS[ratio - 1][0] // _RATIOS[ratio - 1][1] if ratio else side()
    orientation = 1
    if not take(1) and take(1):  # not all is as usual, and there are further fields
        orientation = 1 + take(3)  # as EXIF numbers them
        if take(2) == 0 and take(1):  # without a preview and another size to show it at, which no animation has
            raise ValueError("an animation is not supported: pillow-jxl-plugin gives its last frame, not its first")
    return (width, height) if orientation >= 5 else (height, width)


def _codestream(view: memoryview) -> bytes:
    """The first bytes of the codestream, bare or in a container's first box of it."""
    if bytes(view[:2]) == _CODESTREAM:
        return bytes(view[:_HEAD_BYTES])
    at = 0
    for _ in range(MAX_BOXES):
        if at + 16 > len(view):
            raise ValueError(f"ends after {len(view)} bytes, before the codestream: cut short")
        size, kind, large = struct.unpack_from(">I4sQ", view, at)
        size, begin = (large, at + 16) if size == 1 else (size, at + 8)
        end = at + size if size else len(view)  # 0: to the end of the file
        if kind in (b"jxlc", b"jxlp"):
            begin += 4 if kind == b"jxlp" else 0  # the number of the part
            return bytes(view[begin : min(end, begin + _HEAD_BYTES)])
        at = end
    raise ValueError(f"no codestream in its first {MAX_BOXES} boxes")
