"""Reads the header of an image. Magic bytes decide the format, never the file name; no pixel is decoded.

Index, convert, stream and loader open images here, so each refuses the same images for the same reason.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageFile

from mmdata.errors import BadSample, Reason
from mmdata.images.pillow import DECODER_ERRORS, MAX_PIXELS, check_png, decoder_of, open_image, refused

EXTENSIONS: dict[str, str] = {
    "JPEG": ".jpg",
    "PNG": ".png",
    "WEBP": ".webp",
    "GIF": ".gif",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "AVIF": ".avif",
    "HEIF": ".heic",
}

FORMATS: tuple[str, ...] = tuple(EXTENSIONS)
"""Pillow's names. The index column image_format is a position in this tuple, so names may only be appended."""

_MAGIC = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "BMP": re.compile(rb"BM....\0\0\0\0", re.DOTALL),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
}


@dataclass(frozen=True)
class ImageInfo:
    """What an image's header says.

    Attributes:
        format: one of `FORMATS`.
        height, width: pixels as stored, before orientation.
        orientation: EXIF orientation still to be applied on load, 1 to 8; 1 is upright.
    """

    format: str
    height: int
    width: int
    orientation: int = 1


@dataclass(frozen=True)
class Limits:
    """Limits on an image's header.

    Attributes:
        min_side: lower bound of the shorter side, in pixels.
        max_aspect: upper bound of longer side / shorter side.
        max_pixels: upper bound of height × width; the default is Pillow's own.
    """

    min_side: int = 2
    max_aspect: float = 20.0
    max_pixels: int = MAX_PIXELS


DEFAULT_LIMITS = Limits()
NO_LIMITS = Limits(min_side=1, max_aspect=math.inf, max_pixels=2**62)


def sniff(data: bytes | memoryview) -> str | None:
    """The format by magic bytes, or None. `data` holds at least the first 64 bytes of the file."""
    head = bytes(data[:64])
    for format, magic in _MAGIC.items():
        if magic.match(head):
            return format
    return _heif_or_avif(head) if head[4:8] == b"ftyp" else None


def _heif_or_avif(head: bytes) -> str | None:
    """By the brands of a file: its own, and those of the readers that it is for."""
    own, end = head[8:12], min(int.from_bytes(head[:4], "big"), len(head))
    brands = {own, *(head[at : at + 4] for at in range(16, end, 4))}
    if any(brand[:3] in (b"hei", b"hev") for brand in brands):
        return "HEIF"
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    return "HEIF" if own in (b"mif1", b"msf1") else None


def probe(data: bytes | memoryview, *, limits: Limits = DEFAULT_LIMITS) -> ImageInfo:
    """Read an image's header.

    Raises:
        BadSample: empty_file, not_an_image, unsupported_format, corrupt_image, image_too_small, image_too_large or
            extreme_aspect.
    """
    if not data:
        raise BadSample(Reason.EMPTY_FILE, "image of 0 bytes")
    format = sniff(data)
    if format is None:
        raise BadSample(Reason.NOT_AN_IMAGE, f"starts with {bytes(data[:16])!r}")
    decoder_of(format)  # says which package is missing
    try:
        exif = check_png(data) if format == "PNG" else b""
        with open_image(data, format) as image:
            info = ImageInfo(format, image.height, image.width, _orientation(image, exif))
    # Decompression bombs of pixels and of text end here too.
    except (*DECODER_ERRORS, OverflowError, MemoryError, Image.DecompressionBombError) as error:
        raise refused(format, error) from error
    _check(info.height, info.width, limits)
    return info


def _check(height: int, width: int, limits: Limits) -> None:
    shorter, longer = sorted((height, width))
    size = f"{width}×{height} pixels"
    if shorter < limits.min_side:
        raise BadSample(Reason.IMAGE_TOO_SMALL, f"{size}: shorter side under {limits.min_side}")
    if height * width > limits.max_pixels:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"{size}: more than {limits.max_pixels} in all")
    if longer > limits.max_aspect * shorter:
        raise BadSample(Reason.EXTREME_ASPECT, f"{size}: sides differ more than {limits.max_aspect:g} to 1")


def _orientation(image: ImageFile.ImageFile, exif: bytes) -> int:
    """The EXIF orientation of an opened image; `exif`: of a PNG, what its chunk holds."""
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF upright while loading, and reports the size after that
    try:
        if exif:
            image.info["exif"] = exif
        # Of a PNG not the plugin's own getexif(), which would decode all pixels in search of a chunk behind them.
        found = Image.Image.getexif(image) if image.format == "PNG" else image.getexif()
        value = found.get(ExifTags.Base.Orientation, 1)
    except Exception:  # an image with corrupt EXIF data is still an image
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
