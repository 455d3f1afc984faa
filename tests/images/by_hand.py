"""Image files put together byte by byte, of kinds that Pillow does not write."""

from __future__ import annotations

import struct
import zlib
from typing import Any


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    size: tuple[int, int], bits: int, colours: int, lines: list[bytes], *, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG of (height, width), with chunks before and after the pixels; `colours` is the standard's number."""
    header = struct.pack(">IIBBBBB", size[1], size[0], bits, colours, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + before
        + png_chunk(b"IDAT", pixels)
        + after
        + png_chunk(b"IEND", b"")
    )


_TYPES = {3: "H", 4: "I"}  # of TIFF's tags: short and long


def tiff(size: tuple[int, int], strips: list[bytes], *, order: str = "<", **tags: int | list[int]) -> bytes:
    """A TIFF of (height, width), uncompressed unless its tags (t258=8, ...) say so, in one page."""
    entries: dict[int, Any] = {256: size[1], 257: size[0], 259: 1, 262: 1, 278: size[0]}
    entries |= {int(name[1:]): value for name, value in tags.items()}
    entries |= {273: [0] * len(strips), 279: [len(strip) for strip in strips]}
    begin = 8 + 2 + 12 * len(entries) + 4
    longest = begin + sum(4 * len(values) for values in entries.values() if isinstance(values, list))
    entries[273] = [longest + sum(map(len, strips[:i])) for i in range(len(strips))]
    directory, further = b"", b""
    for tag, values in sorted(entries.items()):
        values = values if isinstance(values, list) else [values]
        kind = 4 if tag in (273, 279) else 3
        packed = struct.pack(f"{order}{len(values)}{_TYPES[kind]}", *values)
        directory += struct.pack(f"{order}HHI", tag, kind, len(values))
        if len(packed) <= 4:
            directory += packed.ljust(4, b"\0")
        else:
            directory += struct.pack(f"{order}I", begin + len(further))
            further += packed
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(f"{order}IH", 8, len(entries)) + directory + bytes(4) + further
    return head.ljust(longest, b"\0") + b"".join(strips)


def bmp(size: tuple[int, int], bits: int, lines: list[bytes], *, palette: bytes = b"", top_down: bool = False) -> bytes:
    """A BMP of (height, width) with Windows' header of 40 bytes; `lines` from the top, of 4n bytes each."""
    pixels = b"".join(lines if top_down else lines[::-1])
    offset = 14 + 40 + len(palette)
    height = -size[0] if top_down else size[0]
    colours = len(palette) // 4
    header = struct.pack("<IiiHHIIiiII", 40, size[1], height, 1, bits, 0, len(pixels), 2835, 2835, colours, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(pixels), 0, 0, offset) + header + palette + pixels
