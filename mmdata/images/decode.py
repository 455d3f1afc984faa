"""Decodes image files of all formats to RGB as numpy arrays, and checks that a file decodes. Imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, Reason
from mmdata.images.jpeg import decode_jpeg, jpeg_header
from mmdata.images.pillow import decode_pillow
from mmdata.images.png import check_png
from mmdata.images.probe import PARSE_ERRORS, ImageInfo, refused


def decode_pixels(
    data: bytes | memoryview, format: str, *, least: tuple[int, int] = (0, 0), checked: bool = False
) -> NDArray[np.uint8]:
    """Decode an image file; `mmdata.images.image.decode` says how.

    Args:
        data: the whole file.
        format: its format by magic bytes.
        least: (height, width) as stored: a JPEG is decoded at the smallest of libjpeg-turbo's scales that gives at
            least this size; (0, 0) decodes it at full size.
        checked: True if `probe` has read these bytes before; a PNG's checksums are then not compared again.

    Returns:
        uint8 (H, W, 3), RGB, not yet oriented.

    Raises:
        BadSample: the image is truncated, corrupt, of an unsupported kind, or too large to decode safely.
    """
    try:
        if format == "JPEG" and (pixels := decode_jpeg(data, *least)) is not None:
            return pixels
        if format == "PNG" and not checked:
            check_png(data)
        return decode_pillow(data, format)
    except (RuntimeError, *PARSE_ERRORS) as error:
        raise refused(format, "does not decode", error) from error


def check_decodes(data: bytes | memoryview, info: ImageInfo) -> None:
    """Read every bit of an image's pixels, and compare their size with the header's.

    A JPEG is decoded at an eighth of its size: libjpeg-turbo then reads the same bits, finds the same damage, and
    leaves out most of the arithmetic behind it.

    Args:
        data: the whole file.
        info: `probe(data)`.

    Raises:
        BadSample: the image does not decode.
    """
    pixels = decode_pixels(data, info.format, least=(1, 1), checked=True)
    check_size(info, *(jpeg_header(data)[:2] if info.format == "JPEG" else pixels.shape[:2]))


def check_size(info: ImageInfo, height: int, width: int) -> None:
    """Raise BadSample if the pixels of an image are not as many, before orientation, as its header says."""
    if (height, width) != (info.height, info.width):
        detail = f"header says {info.width}×{info.height} pixels, there are {width}×{height}"
        raise BadSample(Reason.CORRUPT_IMAGE, detail)
