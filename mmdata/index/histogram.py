"""Counts captions of a shard by length and aspect ratio, in cells. A cell is one integer, part of the format on disk.

A caption of 12 tokens with an image of 480 × 640 pixels (height × width): round(32 · log2(640 / 480)) = round(13.28) =
13 steps wider than a square, so aspect bin 128 + 13 = 141, and cell 12 · 256 + 141 = 3213. Unpacked, 3213 is (12, 141),
and bin 141 stands for the ratio 2^(13 / 32) = 1.325; the image's own is 1.333.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ASPECT_BINS = 256
"""Number of aspect bins, for ratios from 1:16 to 15.6:1."""
SQUARE_BIN = 128
"""Bin of the ratio 1."""
BINS_PER_OCTAVE = 32
"""Bins for each doubling of the ratio: a bin's ratio is off by a factor of at most 2^(1/64), or 1.1 %."""
MAX_TOKENS = 2**31 // ASPECT_BINS - 1
"""Longest caption that fits into a cell, an int32: 8,388,607 tokens."""

Ints = npt.NDArray[np.integer[Any]]


class Histograms(NamedTuple):
    """The histograms of n shards.

    Attributes:
        offsets: int32 (n + 1,); shard i has cells[offsets[i]:offsets[i + 1]], and counts likewise.
        cells, counts: int32.
    """

    offsets: npt.NDArray[np.int32]
    cells: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


def aspect_bin(height: npt.ArrayLike, width: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Aspect bins of images, EXIF orientation applied.

    Args:
        height: (n,) or scalar, in pixels, positive.
        width: as height.

    Returns:
        int32, shaped as the arguments: 128 for a square, 160 for 2:1 (width : height), 96 for 1:2; from 0 to 255.
    """
    steps = np.round(BINS_PER_OCTAVE * np.log2(np.asarray(width, np.float64) / np.asarray(height, np.float64)))
    return np.clip(steps + SQUARE_BIN, 0, ASPECT_BINS - 1).astype(np.int32)


def aspect_ratio(bins: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Width / height in the geometric middle of a bin: 128 -> 1.0, 160 -> 2.0."""
    return np.exp2((np.asarray(bins, np.float64) - SQUARE_BIN) / BINS_PER_OCTAVE)


def pack_cells(tokens: npt.ArrayLike, bins: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Cells of n captions: tokens · 256 + aspect bin.

    Raises:
        ValueError: a length below 0 or above MAX_TOKENS.
    """
    lengths = np.asarray(tokens, np.int64)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= MAX_TOKENS:
        raise ValueError(f"captions have 0 to {MAX_TOKENS} tokens: got {lengths.min()} to {lengths.max()}")
    return (lengths * ASPECT_BINS + np.asarray(bins, np.int64)).astype(np.int32)


def unpack_cells(cells: Ints) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(tokens, aspect bins) of n cells: the inverse of `pack_cells`."""
    packed = np.asarray(cells, np.int32)
    return packed >> 8, packed & (ASPECT_BINS - 1)


def count_cells(cells: Ints) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The distinct cells of a shard's captions, ascending, and how many captions each has."""
    found, counts = np.unique(np.asarray(cells, np.int32), return_counts=True)
    return found, counts.astype(np.int32)
