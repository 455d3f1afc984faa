"""What is kept of an image to find its near copies: a thumbnail of 1,536 bytes, and a perceptual hash of 64 bits.

Both are a pure function of the image's pixels as displayed: EXIF orientation applied, transparency on white. `sign`
makes them in one pass over an index: each distinct image is read and decoded once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from mmdata.errors import BadSample, Reason
from mmdata.hashing import fast_hash
from mmdata.images import FORMATS
from mmdata.images.decode import decode
from mmdata.index import Index, ShardStore
from mmdata.system import reserve

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

SIDE = 32
"""Side of the thumbnail's brightness, in pixels: that of the DCT of a pHash."""
COLOUR_SIDE = SIDE // 2
"""Side of each of its two colour channels, in pixels: JPEG keeps no more of them either."""
THUMBNAIL_BYTES = SIDE**2 + 2 * COLOUR_SIDE**2
DECODED_SIDE = 2 * SIDE
"""A JPEG is decoded at the smallest scale with at least this many pixels a side."""
BITS = 8
"""The hash has a bit for each of the BITS × BITS lowest frequencies."""

CHUNK_IMAGES = 64
"""Images that a thread signs together."""
COLUMNS = ("image_offset", "image_bytes", "image_format", "orientation", "image_xxh3")
_ZERO = 0.05
"""A coefficient below this is zero: whole brightness levels make larger ones; float32 makes errors of 0.01."""

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


def mirrored(thumbnails: Bytes) -> Bytes:
    """The thumbnails of n pictures turned left to right: uint8 (n, THUMBNAIL_BYTES)."""
    light = thumbnails[:, : SIDE**2].reshape(-1, SIDE, SIDE)
    colour = thumbnails[:, SIDE**2 :].reshape(-1, 2 * COLOUR_SIDE, COLOUR_SIDE)
    return np.concatenate([part[..., ::-1].reshape(len(part), -1) for part in (light, colour)], axis=1)


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
    return (coefficients - np.median(coefficients, axis=1, keepdims=True)).astype(np.float32)


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


@dataclass(frozen=True)
class Signed:
    """The distinct images of an index, numbered by the first row that has them.

    Attributes:
        image_of: int64 (rows,), the image of each row.
        first_rows: int64 (images,), the first row of each image; rising.
        hashes: uint64 (images,), the perceptual hash of each; 0 where `known` is False.
        known: bool (images,), whether the image could be decoded.
        thumbnails: uint8 (images, THUMBNAIL_BYTES), a map of a file without a name.
        problems: why an image could not be read, by its number; the reason, and its details.
    """

    image_of: Ints
    first_rows: Ints
    hashes: NDArray[np.uint64]
    known: NDArray[np.bool_]
    thumbnails: Bytes
    problems: dict[int, BadSample] = field(default_factory=dict[int, BadSample])


def sign(
    index: Index, *, folder: Path, num_workers: int = 1, on_rows: Callable[[int], object] = lambda _: None
) -> Signed:
    """Sign all images of an index. Rows with equal bytes (`image_hash`) have one image.

    Args:
        index: of the shards; those behind URLs are fetched into its cache.
        folder: for the thumbnails, 1,536 bytes a distinct image, until they are no longer used; no file is left.
        num_workers: threads that read and decode.
        on_rows: called with the number of images that were signed.

    Raises:
        DataError: a shard is missing or not the one that was indexed.
        OSError: the disk is full.
    """
    hashes: Any = pa.array(index.column("image_hash"))
    image_of = hashes.dictionary_encode().indices.to_numpy().astype(np.int64)  # in the order of their first rows
    first_rows = np.unique(image_of, return_index=True)[1]
    count = len(first_rows)
    signed = Signed(image_of, first_rows, np.zeros(count, np.uint64), np.zeros(count, np.bool_), _memory(count, folder))
    store = ShardStore(index)
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            chunks = (np.arange(begin, min(begin + CHUNK_IMAGES, count)) for begin in range(0, count, CHUNK_IMAGES))
            for done in pool.map(partial(_sign, index, store, signed), chunks):
                on_rows(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return signed


def _sign(index: Index, store: ShardStore, signed: Signed, images: Ints) -> int:
    """Sign some images by their first rows; returns how many there were."""
    rows = signed.first_rows[images]
    columns = {name: values.tolist() for name, values in index.take(rows, COLUMNS).items()}
    shards, _ = index.locate(rows)
    for i, (image, shard) in enumerate(zip(images.tolist(), shards.tolist(), strict=True)):
        try:
            signed.thumbnails[image] = _thumbnail(store, shard, {name: values[i] for name, values in columns.items()})
        except BadSample as bad:
            signed.problems[image] = bad
        else:
            signed.known[image] = True
    found = images[signed.known[images]]
    signed.hashes[found] = perceptual_hashes(signed.thumbnails[found])
    return len(images)


def _thumbnail(store: ShardStore, shard: int, columns: dict[str, int]) -> Bytes:
    data = store.read(shard, columns["image_offset"], columns["image_bytes"])
    if fast_hash(data) != columns["image_xxh3"]:
        raise BadSample(Reason.FILE_CHANGED, "image is not the one indexed; `mmdata verify` tells what changed")
    image_format, orientation = FORMATS[columns["image_format"]], columns["orientation"]
    return thumbnail(data, format=image_format, orientation=orientation, checked=True)


def _memory(count: int, folder: Path) -> Bytes:
    """Room for thumbnails in a file that ends with this process, however it ends."""
    if not count:
        return np.empty((0, THUMBNAIL_BYTES), np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve(file.fileno(), count * THUMBNAIL_BYTES)
        return np.memmap(file, np.uint8, mode="r+", shape=(count, THUMBNAIL_BYTES))
