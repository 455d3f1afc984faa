"""Opens images with Pillow, and decodes all of Pillow's modes as 8-bit RGB on a background.

Pillow's own conversions clip 16 and 32 bits, ignore some transparency, and misread the values of a few kinds of file.
This module converts the former by what their headers say, and refuses the latter.
"""

from __future__ import annotations

import importlib
import io
import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageFile, ImageOps, ImagePalette, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmdata.errors import BadSample, Reason
from mmdata.images.jxl import jxl_size
from mmdata.processes import new_lock

MAX_PIXELS = 178_956_970
"""Images with more pixels are not decoded: Pillow's limit."""
BACKGROUND = (255, 255, 255)
"""Colour under transparent pixels."""

DECODER_ERRORS = (OSError, EOFError, ValueError, SyntaxError, TypeError, LookupError, RuntimeError, struct.error)
"""Exceptions that decoders raise for damaged files."""
_NOT_READ = ("nsupported", "not supported", "not yet supported", "cannot handle", "unknown pixel mode")
"""Words in a decoder's message which say that the decoder does not implement this kind of file."""

# The plugin classes instead of Image.open: `MAX_PIXELS` replaces Pillow's limit, and no other format can be opened.
PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
    "AVIF": AvifImageFile,
}


class Package(NamedTuple):
    """A package with a decoder: the module and its class, the package, and the extra of mmdata that installs it."""

    module: str
    plugin: str
    name: str
    extra: str


PACKAGES = {
    "HEIF": Package("pillow_heif", "HeifImageFile", "pillow-heif", "heic"),
    "JXL": Package("pillow_jxl.JpegXLImagePlugin", "JXLImageFile", "pillow-jxl-plugin", "jxl"),
}
"""Decoders that are no part of Pillow. They are imported when first needed."""

# tags of TIFF
_SUBFILE, _COMPRESSION, _PHOTOMETRIC, _BITS = 254, 259, 262, 258
_PLANAR, _COLOUR_MAP, _SUB_IFDS, _SAMPLE_FORMAT = 284, 320, 330, 339

_WHITE_IS_ZERO = 0  # a value of _PHOTOMETRIC

_PNG_BITS = 24  # where a PNG says how many bits a sample has

Pixels = NDArray[np.uint8]

_reading = new_lock()  # an image may be given twice, and its file has one position


def decoder_of(format: str) -> type[ImageFile.ImageFile]:
    """The plugin that decodes a format.

    Raises:
        BadSample: it is not installed; the message says what to install.
    """
    if format in PACKAGES:
        package = PACKAGES[format]
        plugin, remedy = import_plugin(package), f"{package.name}: `pip install 'mmdata[{package.extra}]'`"
    else:
        plugin = PLUGINS[format] if format != "AVIF" or features.check("avif") else None
        remedy = "a Pillow with its codec: `pip install -U pillow`"
    if plugin is None:
        raise BadSample(Reason.UNSUPPORTED_FORMAT, f"{format} needs {remedy}")
    return plugin


@cache
def import_plugin(package: Package) -> type[ImageFile.ImageFile] | None:
    """A package's plugin; None if it is not installed."""
    try:
        return getattr(importlib.import_module(package.module), package.plugin)
    except ImportError:  # also of a library that it needs
        return None


def open_image(data: bytes | memoryview, format: str) -> ImageFile.ImageFile:
    """Open an image with Pillow's plugin for `format`; its pixels are not decoded yet, but for JPEG XL.

    Raises:
        BadSample: the decoder for the format is not installed, or a JPEG XL has more pixels than the limit.
        Any of `DECODER_ERRORS`: the header is damaged, or of a kind that is not read (see `refused`).
    """
    plugin = decoder_of(format)
    if format == "JXL":
        _check_size(*jxl_size(data))  # before it is opened: the plugin decodes all pixels when it opens a file
    try:
        image = plugin(io.BytesIO(data))
    except RuntimeError as error:  # of JPEG XL's plugin: its own message is advice to build it from source
        raise ValueError("cut short or damaged") from error
    if isinstance(image, TiffImageFile):
        _check_tiff(image)
    elif isinstance(image, BmpImageFile):
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


def _check_tiff(image: TiffImageFile) -> None:
    """Raise ValueError for kinds of TIFF that Pillow decodes wrongly, or whose values are ambiguous."""
    tags = image.tag_v2
    is_raw = tags.get(_COMPRESSION, 1) == 1
    if 2 in tags.get(_SAMPLE_FORMAT, (1,)):
        raise ValueError("signed samples are not supported: no value of them is black or white")
    if is_raw and tags.get(_PLANAR, 1) == 2 and max(tags.get(_BITS, (1,))) > 8:
        raise ValueError("uncompressed planes of more than 8 bits are not supported")
    # Camera raw files (DNG, NEF, CR2, ...) begin with a thumbnail, and Pillow does not decode the photo behind it.
    if tags.get(_SUBFILE, 0) & 1 and (_SUB_IFDS in tags or tags.next):
        raise ValueError("not supported: its first page is a thumbnail of another one")


def _check_bmp(image: BmpImageFile, data: bytes | memoryview) -> None:
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
        BadSample: more pixels than the limit, or values without a single meaning.
        Exception: any of `DECODER_ERRORS`: the image does not decode.
    """
    try:
        with open_image(data, format) as image:
            _check_size(image.height, image.width)
            tags: dict[int, Any] = getattr(image, "tag_v2", {})
            # The standard wants palettes of 16 bits; some programs write 8 bits, which Pillow would shift to black.
            if image.mode in ("P", "PA") and max(tags.get(_COLOUR_MAP, (256,))) < 256:
                image.palette = ImagePalette.raw("RGB;L", bytes(tags[_COLOUR_MAP]))
            image.load()
            # Pillow scales the samples of a grey PNG to 8 bits, and leaves the transparent value (key) as it is.
            if image.mode == "L" and "transparency" in image.info and format == "PNG":
                image.info["transparency"] *= 255 // (2 ** data[_PNG_BITS] - 1)
            return pixels_of(image) if format in PACKAGES else _in_rgb(image)
    except Image.DecompressionBombError as error:  # a frame that is larger than the whole
        raise BadSample(Reason.IMAGE_TOO_LARGE, str(error)) from error


def pixels_of(image: Image.Image) -> Pixels:
    """The pixels of an image that Pillow has loaded or made, with the conversions of `decode_pillow`.

    Args:
        image: of any mode; its orientation is applied, and the current frame of an animation is taken.

    Returns:
        uint8 (H, W, 3), RGB.

    Raises:
        BadSample: 32-bit values, which have no single meaning in memory, or floats outside 0 to 1.
        Exception: Pillow's own errors: the image does not decode.
    """
    return _in_rgb(turned(image))


def _in_rgb(image: Image.Image) -> Pixels:
    """A loaded image of any mode as RGB on the background, (H, W, 3); of a TIFF its tags say what values mean."""
    tags: dict[int, Any] = getattr(image, "tag_v2", {})
    if image.mode == "F":
        levels = _levels_of_floats(np.asarray(image))
    elif image.mode == "I" and _BITS not in tags:
        detail = "Pillow's mode I does not say which value is white; convert the image to I;16, L or RGB"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
    elif image.mode.startswith("I"):
        levels = _levels_of_integers(image, int(tags.get(_BITS, (16,))[0]))
    else:
        return _rgb(image)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        levels = 255 - levels
    return np.repeat(levels[:, :, None], 3, axis=2)


def _check_size(height: int, width: int) -> None:
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


def _levels_of_integers(image: Image.Image, bits: int) -> Pixels:
    """8-bit levels (H, W) of values from 0 to 2^bits - 1, rounded: Pillow's conversion would clip at 255."""
    values, most = np.asarray(image), 2**bits - 1
    # Pillow's 32 bits are signed.
    wide = values.view(np.uint32).astype(np.uint64) if image.mode == "I" else values.astype(np.uint32)
    levels = ((wide * 255 + most // 2) // most).astype(np.uint8)
    if (key := image.info.get("transparency")) is not None:
        levels[values == key] = BACKGROUND[0]
    return levels


def _levels_of_floats(values: NDArray[np.float32]) -> Pixels:
    least, most = float(values.min()), float(values.max())
    if not (least >= 0 and most <= 1):  # written so that NaN is refused too
        detail = f"TIFF of floats from {least:g} to {most:g}: only from 0 (black) to 1 (white) are read"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
    return np.rint(values * np.float32(255)).astype(np.uint8)


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
    return data if image.format in (*PLUGINS, *PACKAGES, "MPO") else None


def turned(image: Image.Image) -> Image.Image:
    """A copy of an image, upright by its orientation in EXIF or XMP data."""
    if image.format == "JXL" and not getattr(image, "jpeg", False):
        return image.copy()  # libjxl has turned it; EXIF data in the file are to be ignored
    return ImageOps.exif_transpose(image)
