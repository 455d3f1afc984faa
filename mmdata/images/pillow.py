"""Decodes images of all of Pillow's modes as 8-bit RGB on a background.

Pillow's own conversions clip 16 and 32 bits, ignore some transparency, and misread the values of a few kinds of file.
This module converts those by what their headers say, and refuses images whose values have no single meaning.
"""

from __future__ import annotations

import io
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageFile, ImagePalette
from PIL.TiffImagePlugin import TiffImageFile

from mmdata.errors import BadSample, Reason
from mmdata.images.jxl import read_jxl
from mmdata.images.libtiff import raising_errors
from mmdata.images.opened import turned, upright
from mmdata.images.probe import DEFAULT_LIMITS, open_image

BACKGROUND = (255, 255, 255)
"""Colour under transparent pixels."""

# tags of TIFF
_BITS = 258
_PHOTOMETRIC = 262
_COLOUR_MAP = 320

_WHITE_IS_ZERO = 0  # a value of _PHOTOMETRIC

Pixels = NDArray[np.uint8]


def decode_pillow(data: bytes | memoryview, format: str) -> Pixels:
    """Decode an image; the first frame of an animation, the first page of several.

    Args:
        data: the whole file.
        format: its format by magic bytes.

    Returns:
        uint8 (H, W, 3), RGB.

    Raises:
        BadSample: more pixels than the limit, or values without a single meaning.
        Exception: Pillow's own errors, and ValueError: the image does not decode.
    """
    try:
        return _decode(data, format)
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
    return _of_any_mode(turned(image))


def _of_any_mode(image: Image.Image) -> Pixels:
    """A loaded image whose mode says all about its values, (H, W, 3)."""
    if image.mode.startswith("I;16"):
        return _grey(_levels_of_16_bits(image))
    if image.mode == "I":
        detail = "Pillow's mode I does not say which value is white; convert the image to I;16, L or RGB"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
    if image.mode == "F":
        return _grey(_levels_of_floats(np.asarray(image)))
    return _rgb(image)


def _decode(data: bytes | memoryview, format: str) -> Pixels:
    if format == "JXL":
        return _jxl(data)
    # Allow only this format: Pillow would try all formats it knows, and one of them passes the data to Ghostscript.
    with open_image(data, format) as image:
        _check_size(image.height, image.width)
        if format == "BMP":
            return _bmp(image, data)
        if format == "GIF":
            return _gif(image)
        if format == "PNG":
            return _png(image, data)
        if format == "TIFF":
            return _tiff(cast(TiffImageFile, image))
        if format == "HEIF":
            image.load()  # libheif turns it upright
            return _of_any_mode(image)
        return _loaded(image)


def _check_size(height: int, width: int) -> None:
    if height * width > DEFAULT_LIMITS.max_pixels:
        detail = f"{width}×{height} pixels: more than {DEFAULT_LIMITS.max_pixels} in all"
        raise BadSample(Reason.IMAGE_TOO_LARGE, detail)


def _loaded(image: ImageFile.ImageFile) -> Pixels:
    """All pixels of an image, (H, W, 3), by Pillow's conversions."""
    image.load()
    return _rgb(image)


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


def _grey(levels: Pixels) -> Pixels:
    """(H, W) to (H, W, 3)."""
    return np.repeat(levels[:, :, None], 3, axis=2)


def _scaled(values: NDArray[Any], bits: int) -> Pixels:
    """Values from 0 to 2^bits - 1 as 0 to 255, rounded."""
    most = 2**bits - 1
    wide = values.astype(np.uint32 if bits <= 16 else np.uint64)
    return ((wide * 255 + most // 2) // most).astype(np.uint8)


def _png(image: ImageFile.ImageFile, data: bytes | memoryview) -> Pixels:
    bits = data[24]  # of a sample; IHDR is always at the same offset
    if bits == 16 and image.mode == "RGB" and "transparency" in image.info:
        return _png_of_16_bits(image, data)
    image.load()
    key = image.info.get("transparency")
    if image.mode == "I;16":
        return _grey(_levels_of_16_bits(image))
    # Pillow scales samples to 8 bits but leaves the transparent colour (key) as it is in the file, where only
    # its low bits count.
    if image.mode == "L" and key is not None and bits < 8:
        image.info["transparency"] = (key & (2**bits - 1)) * 255 // (2**bits - 1)
    elif image.mode == "L" and key is not None:
        image.info["transparency"] = key & 255
    elif image.mode == "RGB" and key is not None:
        image.info["transparency"] = tuple(value & 255 for value in key)
    return _rgb(image)


def _png_of_16_bits(image: ImageFile.ImageFile, data: bytes | memoryview) -> Pixels:
    """RGB of 16 bits with one transparent colour."""
    # Pillow keeps only the high byte of a sample, which many colours share with the transparent one. So the file is
    # decoded twice: read as little-endian, Pillow's "high" bytes are the low ones.
    halves: list[Pixels] = []
    key = np.array(image.info["transparency"], np.uint16)
    for rawmode in ("RGB;16B", "RGB;16L"):
        with open_image(data, "PNG") as half:
            half.tile = [half.tile[0]._replace(args=rawmode)]
            half.load()
            halves.append(np.array(half))
    values = halves[0].astype(np.uint16) << 8 | halves[1]  # (H, W, 3)
    rgb = _scaled(values, 16)
    rgb[(values == key).all(axis=2)] = BACKGROUND
    return rgb


def _tiff(image: TiffImageFile) -> Pixels:
    tags = image.tag_v2
    # The standard wants palettes of 16 bits; some programs write 8 bits, which Pillow would shift to black.
    if image.mode in ("P", "PA") and max(tags[_COLOUR_MAP]) < 256:
        image.palette = ImagePalette.raw("RGB;L", bytes(tags[_COLOUR_MAP]))
    with raising_errors():
        image.load()
    if image.mode == "F":
        levels = _levels_of_floats(np.asarray(image))
    elif image.mode.startswith("I"):
        values = np.asarray(image)
        values = values.view(np.uint32) if image.mode == "I" else values  # Pillow's mode of 32 bits is signed
        levels = _scaled(values, int(tags[_BITS][0]))
    else:
        return _rgb(image)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        levels = 255 - levels
    return _grey(levels)


def _levels_of_16_bits(image: Image.Image) -> Pixels:
    """8-bit levels (H, W) of an image of mode I;16: Pillow's conversion to 8 bits would clip at 255."""
    values = np.asarray(image)
    levels = _scaled(values, 16)
    if (key := image.info.get("transparency")) is not None:
        levels[values == key] = BACKGROUND[0]
    return levels


def _levels_of_floats(values: NDArray[np.float32]) -> Pixels:
    least, most = float(values.min()), float(values.max())
    if not (least >= 0 and most <= 1):  # written so that NaN is refused too
        detail = f"TIFF of floats from {least:g} to {most:g}: only from 0 (black) to 1 (white) are read"
        raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
    return np.rint(values * np.float32(255)).astype(np.uint8)


def _gif(image: ImageFile.ImageFile) -> Pixels:
    """The first frame; a frame smaller than the image is surrounded by the background, as in browsers."""
    left, top, right, bottom = image.tile[0].extents or (0, 0, *image.size)
    rgb = _loaded(image)
    if (left, top, right, bottom) == (0, 0, rgb.shape[1], rgb.shape[0]):
        return rgb
    whole = np.empty_like(rgb)
    whole[:] = BACKGROUND
    whole[top:bottom, left:right] = rgb[top:bottom, left:right]
    return whole


def _jxl(data: bytes | memoryview) -> Pixels:
    """An image of JPEG XL, upright."""
    header = read_jxl(data)
    _check_size(header.height, header.width)  # before it is opened: the plugin decodes all pixels when it opens a file
    try:
        opened = open_image(data, "JXL")
    except RuntimeError as error:  # the plugin's own message is advice to build it from source
        raise ValueError("cut short or damaged") from error
    with opened as image:
        image.load()
        # libjxl turns images upright, but the plugin takes one that was a JPEG from the JPEG in it.
        was_jpeg = getattr(image, "jpeg", False)
        return _of_any_mode(upright(image, header.orientation) if was_jpeg else image)


def _bmp(image: ImageFile.ImageFile, data: bytes | memoryview) -> Pixels:
    tile = image.tile[0]
    bits = int.from_bytes(data[28:30], "little") if data[14] >= 40 else int.from_bytes(data[24:26], "little")
    rawmode, mode = cast("tuple[Any, ...]", tile.args)[0], image.mode
    # If the palette is only black and white, Pillow reads one bit a pixel, whatever the header says.
    is_misread = (mode == "1" and bits != 1) or (mode == "L" and bits != 8)
    if not is_misread and rawmode != "BGRX":
        return _loaded(image)
    if tile.codec_name != "raw":
        raise ValueError("a compressed palette of black and white is not supported")
    _, stride, direction = cast("tuple[str, int, int]", tile.args)
    width, height = image.size
    if tile.offset + stride * height > len(data):
        raise ValueError(f"ends after {len(data)} bytes, before its last pixel: cut short")
    lines = np.frombuffer(data, np.uint8, stride * height, tile.offset).reshape(height, stride)
    lines = lines[::direction]
    if is_misread:
        values = lines if bits == 8 else np.stack([lines >> 4, lines & 15], axis=2).reshape(height, -1)
        return _grey((values[:, :width] * (255 if mode == "1" else 1)).astype(np.uint8))
    # Pillow ignores the fourth byte. It is alpha in files of most programs, and 0 throughout in files without alpha.
    bgra = lines[:, : 4 * width].reshape(height, width, 4)
    alpha = bgra[:, :, 3:].astype(np.uint16)  # (H, W, 1)
    rgb = np.ascontiguousarray(bgra[:, :, 2::-1])
    if not alpha.any() or (alpha == 255).all():
        return rgb
    return ((rgb * alpha + BACKGROUND[0] * (255 - alpha) + 127) // 255).astype(np.uint8)
