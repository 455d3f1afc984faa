"""Decodes image files of all formats to RGB, JPEG by libjpeg-turbo, and checks that a file decodes.

Decoding is strict: a truncated image is a `BadSample`, never an image that is padded with grey. Only `decode` needs
torch, which takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import simplejpeg

from mmdata.errors import BadSample, Reason
from mmdata.images.pillow import DECODER_ERRORS, Pixels, check_pixels, check_png, decode_pillow, refused
from mmdata.images.probe import ImageInfo

if TYPE_CHECKING:
    from torch import Tensor

WITHOUT_COLOURS = ("CMYK", "YCCK")
"""Colour spaces that are left to Pillow, which converts them through their ICC profile."""


def decode(
    data: bytes | memoryview,
    *,
    format: str,
    orientation: int = 1,
    at_least: tuple[int, int] | None = None,
    checked: bool = False,
) -> Tensor:
    """Decode an encoded image to a tensor, upright.

    libjpeg-turbo decodes JPEG; Pillow decodes the other formats and CMYK (`mmdata.images.pillow`). Transparency is
    composited on white, samples of 16 bits are scaled to 8, CMYK is converted through its ICC profile if it has
    one, and an animation gives its first frame. The checksums of a PNG are compared.

    Args:
        data: the whole file.
        format: its format by magic bytes, as `mmdata.images.probe` names it.
        orientation: EXIF orientation 1 to 8, applied to the result.
        at_least: (height, width) as displayed: a JPEG is decoded at the smallest of libjpeg-turbo's scales that gives
            at least this size; None decodes it at full size.
        checked: True if `probe` has read these bytes before; a PNG's checksums are then not compared again.

    Returns:
        uint8 (3, H, W), RGB; H and W as displayed. Often a view with the channels last in memory.

    Raises:
        BadSample: the image is truncated, corrupt, of an unsupported kind, or too large to decode safely.
    """
    import torch

    least = oriented_size(*at_least, orientation) if at_least else (0, 0)
    pixels = decode_pixels(data, format, least=least, checked=checked)
    return torch.from_numpy(oriented(pixels, orientation)).permute(2, 0, 1)


def decode_pixels(
    data: bytes | memoryview, format: str, *, least: tuple[int, int] = (0, 0), checked: bool = False
) -> Pixels:
    """Decode an image file; `decode` says how.

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
    except DECODER_ERRORS as error:
        raise refused(format, error) from error


def oriented(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels (H, W, 3) turned upright as an EXIF orientation (1 to 8) says; 5 to 8 exchange height and width."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    down, across = (-1 if is_mirrored else 1 for is_mirrored in mirrored(orientation))
    return pixels if (down, across) == (1, 1) else pixels[::down, ::across].copy()


def mirrored(orientation: int) -> tuple[bool, bool]:
    """Whether an EXIF orientation turns top and bottom, and left and right, round: after the exchange of 5 to 8."""
    return orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)


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


def decode_jpeg(data: bytes | memoryview, min_height: int = 0, min_width: int = 0) -> Pixels | None:
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
    check_pixels(height, width)
    if colours in WITHOUT_COLOURS:
        return None

    # simplejpeg's defaults, accurate DCT and upsampling, give what Pillow and torchvision give, bit for bit.
    def decoded(*, strict: bool) -> Pixels:
        return simplejpeg.decode_jpeg(data, "RGB", min_height=min_height, min_width=min_width, strict=strict)

    try:
        return decoded(strict=True)
    except ValueError as warning:
        # Extra bytes before the end marker (FF D9) are odd, but no pixel is missing. After any other warning pixels are
        # missing, or may be: a lenient decoding does not report the problems behind the first one.
        if not str(warning).endswith("extraneous bytes before marker 0xd9"):
            raise
        return decoded(strict=False)
