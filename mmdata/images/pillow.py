"""Opens images with Pillow, and decodes its modes as 8-bit RGB on a background.

Pillow's own conversions clip 16 and 32 bits, ignore some transparency, and misread the values of a few kinds of file.
This module converts the former by what their headers say, and refuses the latter.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageFile, ImageOps, features

from mmdata.errors import BadSample, Reason
from mmdata.processes import new_lock

MAX_PIXELS = 178_956_970
"""Images with more pixels are not decoded: Pillow's limit."""
BACKGROUND = (255, 255, 255)
"""Colour under transparent pixels."""

DECODER_ERRORS = (OSError, EOFError, ValueError, SyntaxError, TypeError, LookupError, RuntimeError, struct.error)
"""Exceptions that decoders raise for damaged files."""
_NOT_READ = ("nsupported", "not supported", "not yet supported", "cannot handle", "unknown pixel mode")
"""Words in a decoder's message which say that the decoder does not implement this kind of file."""

PLUGINS = {
    "JPEG": ("PIL.JpegImagePlugin", "JpegImageFile"),
    "PNG": ("PIL.PngImagePlugin", "PngImageFile"),
    "WEBP": ("PIL.WebPImagePlugin", "WebPImageFile"),
    "GIF": ("PIL.GifImagePlugin", "GifImageFile"),
    "BMP": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "TIFF": ("PIL.TiffImagePlugin", "TiffImageFile"),
    "AVIF": ("PIL.AvifImagePlugin", "AvifImageFile"),
    "HEIF": ("pillow_heif", "HeifImageFile"),
}
"""Module and class that open a format; not Image.open, whose limit of pixels is the process's."""

# tags of TIFF
_SUBFILE, _COMPRESSION, _PHOTOMETRIC, _BITS = 254, 259, 262, 258
_PLANAR, _COLOUR_MAP, _SUB_IFDS, _SAMPLE_FORMAT = 284, 320, 330, 339

_PNG_BITS = 24  # where a PNG says how many bits a sample has

Pixels = NDArray[np.uint8]

_reading = new_lock()  # an image may be given twice, and its file has one position


def decoder_of(format: str) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    """What opens a file of a format.

    Raises:
        BadSample: it is not installed; the message says what to install.
    """
    module, plugin = PLUGINS[format]
    try:
        if format == "AVIF" and not features.check("avif"):
            raise ImportError
        return getattr(importlib.import_module(module), plugin)
    except ImportError:  # also of a library that it needs
        remedy = "a Pillow with its codec: `pip install -U pillow`"
        if format == "HEIF":
            remedy = "pillow-heif: `pip install 'mmdata[heic]'`"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, f"{format} needs {remedy}") from None


def open_image(data: bytes | memoryview, format: str) -> ImageFile.ImageFile:
    """Open an image with Pillow's plugin for `format`; its pixels are not decoded yet.

    Raises:
        BadSample: the decoder for the format is not installed.
        Any of `DECODER_ERRORS`: the header is damaged, or of a kind that is not read (see `refused`).
    """
    image = decoder_of(format)(io.BytesIO(data))
    if format == "TIFF":
        _check_tiff(image)
    elif format == "BMP":
        _check_bmp(image, data)
    elif format == "PNG" and image.mode == "RGB" and data[_PNG_BITS] == 16 and "transparency" in image.info:
        # Pillow keeps only the high byte of a sample, which many colours share with the transparent one.
        raise ValueError("a transparent colour of 16 bits is not supported")
    return image


def refused(format: str, error: Exception) -> BadSample:
    """The error for an image that a decoder refuses: unsupported_format if its message says so, else corrupt_image."""
    if any(words in str(error) for words in _NOT_READ):
        return BadSample(Reason.UNSUPPORTED_FORMAT, f"{format}: {error}")
    return BadSample(Reason.CORRUPT_IMAGE, f"{format} does not decode: {error}")


def _check_tiff(image: Any) -> None:
    """Raise ValueError for kinds of TIFF that Pillow decodes wrongly, or whose values are ambiguous."""
    tags = image.tag_v2
    is_raw, bits = tags.get(_COMPRESSION, 1) == 1, max(tags.get(_BITS, (1,)))
    if 2 in tags.get(_SAMPLE_FORMAT, (1,)):
        raise ValueError("signed samples are not supported: no value of them is black or white")
    if image.mode in ("F", "I") or (image.mode.startswith("I;") and (bits != 16 or tags.get(_PHOTOMETRIC) == 0)):
        raise ValueError("grey of more than 8 bits is not supported, but for 16 bits from 0 (black) to 65535 (white)")
    if is_raw and tags.get(_PLANAR, 1) == 2 and bits > 8:
        raise ValueError("uncompressed planes of more than 8 bits are not supported")
    # The standard wants palettes of 16 bits; some programs write 8 bits, which Pillow would shift to black.
    if image.mode in ("P", "PA") and max(tags.get(_COLOUR_MAP, (256,))) < 256:
        raise ValueError("a palette of 8 bits is not supported")
    # Camera raw files (DNG, NEF, CR2, ...) begin with a thumbnail, and Pillow does not decode the photo behind it.
    if tags.get(_SUBFILE, 0) & 1 and (_SUB_IFDS in tags or tags.next):
        raise ValueError("not supported: its first page is a thumbnail of another one")


def _check_bmp(image: Image.Image, data: bytes | memoryview) -> None:
    """Raise ValueError where Pillow reads another number of bits than the header says: for palettes of greys."""
    bits = data[28] if data[14] >= 40 else data[24]
    if (image.mode == "1" and bits != 1) or (image.mode == "L" and bits != 8):
        raise ValueError(f"a palette of black and white with {bits} bits is not supported")


def decode_pillow(data: bytes | memoryview, format: str) -> Pixels:
    """Decode an image; the first frame of an animation, the first page of several.

    Args:
        data: the whole file.
        format: its format by magic bytes.

    Returns:
        uint8 (H, W, 3), RGB.

    Raises:
        BadSample: more pixels than the limit.
        Exception: any of `DECODER_ERRORS`: the image does not decode.
    """
    try:
        with open_image(data, format) as image:
            check_pixels(image.height, image.width)
            image.load()
            # Pillow scales the samples of a grey PNG to 8 bits, and leaves the transparent value (key) as it is.
            if image.mode == "L" and "transparency" in image.info and format == "PNG":
                image.info["transparency"] *= 255 // (2 ** data[_PNG_BITS] - 1)
            return _in_rgb(image)
    except Image.DecompressionBombError as error:  # a frame that is larger than the whole
        raise BadSample(Reason.IMAGE_TOO_LARGE, str(error)) from error


def pixels_of(image: Image.Image) -> Pixels:
    """The pixels of an image that Pillow has loaded or made, with the conversions of `decode_pillow`.

    Args:
        image: of any mode; its orientation is applied, and the current frame of an animation is taken.

    Returns:
        uint8 (H, W, 3), RGB.

    Raises:
        BadSample: floats or 32-bit values, which do not say what is white.
        Exception: Pillow's own errors: the image does not decode.
    """
    return _in_rgb(ImageOps.exif_transpose(image))


def _in_rgb(image: Image.Image) -> Pixels:
    """A loaded image as RGB on the background, (H, W, 3)."""
    if image.mode in ("F", "I"):
        detail = f"Pillow's mode {image.mode} does not say which value is white; convert the image to I;16, L or RGB"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
    if not image.mode.startswith("I;"):
        return _rgb(image)
    values = np.asarray(image).astype(np.uint32)
    levels = ((values * 255 + 32767) // 65535).astype(np.uint8)  # rounded: Pillow's conversion would clip at 255
    if (key := image.info.get("transparency")) is not None:
        levels[values == key] = BACKGROUND[0]
    return np.repeat(levels[:, :, None], 3, axis=2)


def check_pixels(height: int, width: int) -> None:
    """Raise BadSample for an image of more pixels than are decoded."""
    if height * width > MAX_PIXELS:
        detail = f"{width}×{height} pixels: more than {MAX_PIXELS} in all"
        raise BadSample(Reason.IMAGE_TOO_LARGE, detail)


def _rgb(image: Image.Image) -> Pixels:
    """A loaded image of 8 bits a sample as RGB on the background, (H, W, 3)."""
    if image.mode == "CMYK":
        image = _cmyk_to_rgb(image)
    elif image.mode == "La":  # Pillow converts premultiplied alpha to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        backdrop = Image.new("RGBA", rgba.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(backdrop, rgba)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _cmyk_to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
            if converted is not None:
                return converted
        except (ImageCms.PyCMSError, OSError):
            pass  # a broken profile: viewers show the plain conversion
    return image.convert("RGB")


def file_of(image: Image.Image) -> bytes | None:
    """The file of an image that was opened, and not loaded or changed since; None for any other.

    Decoded from its file an image has the pixels that the loader gives it.
    """
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or image.fp.closed:
        return None
    is_loaded = getattr(image, "_im", image) is not None
    if is_loaded or image.decoderconfig or image.tell() != 0:  # a draft, or another frame than the first
        return None
    with _reading:
        position = image.fp.tell()
        image.fp.seek(0)
        data = image.fp.read()
        image.fp.seek(position)
    return data if image.format in (*PLUGINS, "MPO") else None


def check_png(data: bytes | memoryview) -> bytes:
    """Compare the checksums of all chunks; decoders do not compare those of the pixels.

    Takes 1 to 2 % of the time of decoding.

    Returns:
        The EXIF data, which may come before or after the pixels; b"" if there are none.

    Raises:
        ValueError: a checksum differs, or the file ends before its IEND chunk.
    """
    view, at = memoryview(data), 8  # behind the signature
    kind = exif = b""
    while kind != b"IEND":  # bytes behind it are not part of the PNG
        if at + 12 > len(view):
            raise ValueError(f"ends after {len(view)} bytes, before its last chunk: cut short")
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 8 + length
        if end + 4 > len(view):
            raise ValueError(f"ends after {len(view)} bytes, within a chunk {kind!r}: cut short")
        if zlib.crc32(view[at + 4 : end]) != struct.unpack_from(">I", view, end)[0]:
            raise ValueError(f"the checksum of a chunk {kind!r} does not fit: damaged")
        if kind == b"eXIf":
            exif = bytes(view[at + 8 : end])
        at = end + 4
    return exif
