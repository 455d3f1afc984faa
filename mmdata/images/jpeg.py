"""JPEG through libjpeg-turbo, strictly: sizes, pixels as numpy arrays, and whether a file decodes. Imports no torch."""

from __future__ import annotations

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from mmdata.errors import BadSample, Reason
from mmdata.images.pillow import MAX_PIXELS, refused

WITHOUT_COLOURS = ("CMYK", "YCCK")
"""Colour spaces that are left to Pillow, which converts them through their ICC profile."""


def jpeg_header(data: bytes | memoryview) -> tuple[int, int, str]:
    """Height and width as stored, and colour space ("YCbCr", "GRAY", …) of a JPEG.

    Raises:
        ValueError: the header does not parse.
    """
    height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width), colours


def jpeg_size(data: bytes | memoryview, orientation: int = 1) -> tuple[int, int]:
    """(height, width) of a JPEG as displayed, from its header.

    Raises:
        BadSample: the header does not parse.
    """
    try:
        height, width, _ = jpeg_header(data)
    except ValueError as error:
        raise refused("JPEG", error) from error
    return oriented_size(height, width, orientation)


def oriented_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """(height, width) as displayed, from the stored ones and the EXIF orientation."""
    return (width, height) if orientation >= 5 else (height, width)


def decode_jpeg(data: bytes | memoryview, min_height: int = 0, min_width: int = 0) -> NDArray[np.uint8] | None:
    """Decode a JPEG to RGB, (H, W, 3), not yet oriented; None if it is of a colour space that is left to Pillow.

    Args:
        data: the whole file.
        min_height, min_width: the file is decoded at the smallest of libjpeg-turbo's scales that gives at least this
            size; 0 decodes it at full size. At any scale all its bits are read, and the same damage is found.

    Raises:
        BadSample: more pixels than the limit.
        ValueError: the file is damaged.
    """
    height, width, colours = jpeg_header(data)
    if height * width > MAX_PIXELS:  # the limit at which Pillow refuses the other formats
        detail = f"{width}×{height} pixels: more than {MAX_PIXELS} in all"
        raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
    if colours in WITHOUT_COLOURS:
        return None

    # simplejpeg's defaults, accurate DCT and upsampling, give what Pillow and torchvision give, bit for bit.
    def decoded(*, strict: bool) -> NDArray[np.uint8]:
        return simplejpeg.decode_jpeg(data, "RGB", min_height=min_height, min_width=min_width, strict=strict)

    try:
        return decoded(strict=True)
    except ValueError as warning:
        # Extra bytes before the end marker (FF D9) are odd, but no pixel is missing. After any other warning pixels are
        # missing, or may be: a lenient decoding does not report the problems behind the first one.
        if not str(warning).endswith("extraneous bytes before marker 0xd9"):
            raise
        return decoded(strict=False)
