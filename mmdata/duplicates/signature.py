"""What is kept of an image to find its near copies: a thumbnail of 1,536 bytes, and a perceptual hash of 64 bits.

Both are a pure function of the image's pixels as displayed: EXIF orientation applied, transparency on white.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from mmdata.images.decode import decode

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SIDE = 32
"""Side of the thumbnail's brightness, in pixels: that of the DCT of a pHash."""
COLOUR_SIDE = SIDE // 2
"""Side of each of its two colour channels, in pixels: JPEG keeps no more of them either."""
THUMBNAIL_BYTES = SIDE**2 + 2 * COLOUR_SIDE**2
DECODED_SIDE = 2 * SIDE
"""A JPEG is decoded at the smallest scale with at least this many pixels a side."""
BITS = 8
"""The hash has a bit for each of the BITS × BITS lowest frequencies."""

_TO_YCC = torch.tensor([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])


def thumbnail(data: bytes | memoryview, *, format: str, orientation: int = 1, checked: bool = False) -> Bytes:
    """The thumbnail of an encoded image, stretched to a square.

    Args:
        data, format, orientation, checked: see `mmdata.images.decode.decode`.

    Returns:
        uint8 (THUMBNAIL_BYTES,): brightness (SIDE, SIDE), then Cb and Cr (COLOUR_SIDE, COLOUR_SIDE), as JFIF defines
        them.

    Raises:
        BadSample: the image does not decode.
    """
    least = (DECODED_SIDE, DECODED_SIDE)
    image = decode(data, format=format, orientation=orientation, at_least=least, checked=checked)
    small = interpolate(image[None], (SIDE, SIDE), mode="bilinear", antialias=True)[0]
    channels = torch.tensordot(_TO_YCC, small.float(), 1)
    colours = channels[1:].reshape(2, COLOUR_SIDE, 2, COLOUR_SIDE, 2).mean(dim=(2, 4)) + 128
    flat = torch.cat([channels[0].flatten(), colours.flatten()])
    found: Bytes = flat.round().clamp(0, 255).to(torch.uint8).numpy()
    return found


def brightness(thumbnails: Bytes) -> Floats:
    """The brightness of n thumbnails: (n, THUMBNAIL_BYTES) → float32 (n, SIDE, SIDE), 0 to 255."""
    return thumbnails[:, : SIDE**2].reshape(-1, SIDE, SIDE).astype(np.float32)


def colours(thumbnails: Bytes) -> Floats:
    """Cb and Cr of n thumbnails: (n, THUMBNAIL_BYTES) → float32 (n, 2, COLOUR_SIDE, COLOUR_SIDE), 0 to 255."""
    return thumbnails[:, SIDE**2 :].reshape(-1, 2, COLOUR_SIDE, COLOUR_SIDE).astype(np.float32)


def dct_rows() -> NDArray[np.float64]:
    """The BITS lowest rows of the orthonormal DCT-II of SIDE values: (BITS, SIDE)."""
    frequency, place = np.arange(BITS)[:, None], np.arange(SIDE)[None]
    rows = np.sqrt(2 / SIDE) * np.cos(np.pi * (2 * place + 1) * frequency / (2 * SIDE))
    rows[0] /= np.sqrt(2)
    return rows


def spread(coefficients: Floats) -> Floats:
    """By how much n × 64 coefficients are above the median of their 64: float32 (n, 64); above 0 is a bit that is 1.

    Coefficients of an image of one colour are rounding errors of zero, and count as zero.
    """
    coefficients = coefficients.reshape(len(coefficients), -1)
    coefficients = np.where(np.abs(coefficients) < _ZERO, np.float32(0), coefficients)
    half = coefficients.shape[1] // 2
    parts = np.partition(coefficients, (half - 1, half), axis=1)
    return (coefficients - (parts[:, half - 1 : half] + parts[:, half : half + 1]) / 2).astype(np.float32)


def pack(bits: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """(n, 64) bits as whole numbers (n,), the first bit the highest, as `imagehash` writes it in hexadecimal."""
    packed: Any = np.packbits(bits, axis=1)
    return packed.view(">u8")[:, 0].astype(np.uint64)


def perceptual_hashes(thumbnails: Bytes) -> NDArray[np.uint64]:
    """The pHash of n thumbnails, uint64 (n,): which of the 8 × 8 lowest frequencies of the DCT lie above their median.

    Source: the algorithm of `imagehash.phash`, whose own thumbnail is made by another filter.
    """
    rows = dct_rows().astype(np.float32)
    return pack(spread(rows @ brightness(thumbnails) @ rows.T) > 0)


_ZERO = 0.05
"""A coefficient below this is zero: whole brightness levels make larger ones; float32 makes errors of 0.01."""
