"""Reads the header of an image. Magic bytes decide the format, never the file name; no pixel is decoded.

Index, convert, stream and loader open images here, so each refuses the same images for the same reason.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass

from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from mmdata.errors import BadSample, Reason
from mmdata.images.heif import heif_format, read_heif
from mmdata.images.jxl import is_jxl, read_jxl
from mmdata.images.plugins import PACKAGES, PLUGINS, decoder, remedy
from mmdata.images.png import check_png, metadata_of_png
from mmdata.images.unread import unread_format

FORMATS: tuple[str, ...] = (*PLUGINS, *PACKAGES)
"""Pillow's names. The index column image_format is a position in this tuple, so names may only be appended."""

EXTENSIONS: dict[str, str] = {
    "JPEG": ".jpg",
    "PNG": ".png",
    "WEBP": ".webp",
    "GIF": ".gif",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "AVIF": ".avif",
    "HEIF": ".heic",
    "JXL": ".jxl",
}

_ORIENTATION_TAG = 0x0112

_NOT_READ = ("nsupported", "not supported", "not yet supported", "cannot handle", "unknown pixel mode")
"""Words in a decoder's message which say that the decoder does not implement this kind of file."""

PARSE_ERRORS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, EOFError, struct.error)
"""Exceptions that decoders raise for damaged files."""


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
    max_pixels: int = 178_956_970


DEFAULT_LIMITS = Limits()
NO_LIMITS = Limits(min_side=1, max_aspect=math.inf, max_pixels=2**62)


def sniff(data: bytes | memoryview) -> str | None:
    """The format by magic bytes, or None. `data` holds at least the first 64 bytes of the file."""
    head = bytes(data[:64])
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(b"BM") and head[6:10] == b"\0\0\0\0":
        return "BMP"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if is_jxl(head):
        return "JXL"
    return heif_format(head)


def probe(data: bytes | memoryview, *, limits: Limits = DEFAULT_LIMITS) -> ImageInfo:
    """Read an image's header.

    Raises:
        BadSample: empty_file, not_an_image, unsupported_format, corrupt_image, image_too_small, image_too_large or
            extreme_aspect.
    """
    if not data:
        raise BadSample(Reason.EMPTY_FILE, "image of 0 bytes")
    name = sniff(data)
    if name is None:
        raise _unknown(data)
    if name == "PNG":
        try:
            check_png(data)
        except ValueError as error:
            raise refused(name, "does not decode", error) from error
    try:
        info = _header(data, name)
    # Decompression bombs of pixels and of text end here too.
    except PARSE_ERRORS as error:
        raise refused(name, "header does not parse", error) from error
    except (OverflowError, MemoryError, RuntimeError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadSample(Reason.CORRUPT_IMAGE, f"{name} header cannot be: {error}") from error
    _check(info.height, info.width, limits)
    return info


def _header(data: bytes | memoryview, format: str) -> ImageInfo:
    """What the header says, not yet held against limits; formats whose decoder may be missing need none for it."""
    if format == "JXL":
        return ImageInfo(format, *read_jxl(data).displayed)
    if format == "HEIF":
        return ImageInfo(format, *read_heif(data).displayed)
    if format == "AVIF" and decoder(format) is None:
        heif = read_heif(data)
        return ImageInfo(format, heif.height, heif.width, heif.orientation)
    with open_image(data, format) as image:
        return ImageInfo(format, image.height, image.width, _orientation(image, data))


def open_image(data: bytes | memoryview, format: str) -> ImageFile.ImageFile:
    """Open an image with Pillow's plugin for `format`; its pixels are not decoded yet.

    Raises:
        BadSample: the decoder for the format is not installed; the message says what to install.
        Any of `PARSE_ERRORS`, and others: the header is damaged, or of a kind that is not read (see `refused`).
    """
    plugin = decoder(format)
    if plugin is None:
        raise BadSample(Reason.UNSUPPORTED_FORMAT, f"{format} {remedy(format)}")
    image = plugin(io.BytesIO(data))
    if isinstance(image, TiffImageFile):
        _check_tiff(image)
    return image


def refused(format: str, what: str, error: Exception) -> BadSample:
    """The error for an image that a decoder refuses: unsupported_format if its message says so, else corrupt_image."""
    if any(words in str(error) for words in _NOT_READ):
        return BadSample(Reason.UNSUPPORTED_FORMAT, f"{format}: {error}")
    return BadSample(Reason.CORRUPT_IMAGE, f"{format} {what}: {error}")


_TIFF_SUBFILE, _TIFF_COMPRESSION, _TIFF_PHOTOMETRIC, _TIFF_BITS = 254, 259, 262, 258
_TIFF_PLANAR, _TIFF_SUB_IFDS, _TIFF_SAMPLE_FORMAT, _TIFF_SUBSAMPLING = 284, 330, 339, 530


def _check_tiff(image: TiffImageFile) -> None:
    """Raise ValueError for kinds of TIFF that Pillow decodes wrongly, or whose values are ambiguous."""
    tags = image.tag_v2
    is_raw = tags.get(_TIFF_COMPRESSION, 1) == 1
    if 2 in tags.get(_TIFF_SAMPLE_FORMAT, (1,)):
        raise ValueError("signed samples are not supported: no value of them is black or white")
    if is_raw and tags.get(_TIFF_PLANAR, 1) == 2 and max(tags.get(_TIFF_BITS, (1,))) > 8:
        raise ValueError("uncompressed planes of more than 8 bits are not supported")
    if is_raw and tags.get(_TIFF_PHOTOMETRIC) == 6 and tags.get(_TIFF_SUBSAMPLING, (2, 2)) != (1, 1):
        raise ValueError("uncompressed YCbCr with subsampling is not supported")
    # Camera raw files (DNG, NEF, CR2, ...) begin with a thumbnail, and Pillow does not decode the photo behind it.
    if tags.get(_TIFF_SUBFILE, 0) & 1 and (_TIFF_SUB_IFDS in tags or tags.next):
        raise ValueError("not supported: its first page is a thumbnail of another one")


def _check(height: int, width: int, limits: Limits) -> None:
    shorter, longer = sorted((height, width))
    size = f"{width}×{height} pixels"
    if shorter < limits.min_side:
        raise BadSample(Reason.IMAGE_TOO_SMALL, f"{size}: shorter side under {limits.min_side}")
    if height * width > limits.max_pixels:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"{size}: more than {limits.max_pixels} in all")
    if longer > limits.max_aspect * shorter:
        raise BadSample(Reason.EXTREME_ASPECT, f"{size}: sides differ more than {limits.max_aspect:g} to 1")


def _orientation(image: ImageFile.ImageFile, data: bytes | memoryview) -> int:
    if isinstance(image, TiffImageFile):
        return 1  # Pillow turns TIFF upright while loading, and reports the size after that
    try:
        if isinstance(image, PngImageFile):
            # The plugin's own getexif() would decode all pixels in search of a chunk behind them.
            image.info["exif"], image.info["xmp"] = metadata_of_png(data)
            image.info.pop("XML:com.adobe.xmp", None)
            exif = Image.Image.getexif(image)
        else:
            exif = image.getexif()
        value = exif.get(_ORIENTATION_TAG, 1)
    except Exception:  # an image with corrupt EXIF data is still an image
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _unknown(data: bytes | memoryview) -> BadSample:
    head = bytes(data[:16])
    if name := unread_format(data):
        return BadSample(Reason.UNSUPPORTED_FORMAT, f"{name}, which is not read; starts with {head!r}")
    return BadSample(Reason.NOT_AN_IMAGE, f"starts with {head!r}")
