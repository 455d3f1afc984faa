"""Images that somebody has opened with Pillow: the file behind one, or the image turned upright."""

from __future__ import annotations

from PIL import Image, ImageFile, ImageOps

from mmdata.forked import new_lock
from mmdata.images.probe import sniff

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image of each EXIF orientation upright."""

_reading = new_lock()  # an image may be given twice, and its file has one position


def file_of(image: Image.Image) -> bytes | None:
    """The file of an image that was opened, and not loaded or changed since; None for any other.

    Decoded from its file an image has the pixels that the loader gives it: Pillow's own decoding loses the alpha of a
    BMP, among others.
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
    return data if sniff(data) else None


def turned(image: Image.Image) -> Image.Image:
    """A copy of an image, upright by its orientation in EXIF or XMP data."""
    if image.format == "JXL" and not getattr(image, "jpeg", False):
        return image.copy()  # libjxl has turned it; EXIF data in the file are to be ignored
    return ImageOps.exif_transpose(image)


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """A loaded image turned as an EXIF orientation (1 to 8) says."""
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)
