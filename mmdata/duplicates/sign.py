"""One pass over the images of an index: each distinct image is read and decoded once, and its signature kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmdata.duplicates.signature import THUMBNAIL_BYTES, Bytes, perceptual_hashes, thumbnail
from mmdata.errors import BadSample, Reason
from mmdata.hashing import fast_hash
from mmdata.images import FORMATS
from mmdata.index import Index, ShardStore

Ints = NDArray[np.int64]

CHUNK_IMAGES = 64
"""Images that a thread signs together."""
COLUMNS = ("image_offset", "image_bytes", "image_format", "orientation", "image_xxh3")


@dataclass(frozen=True)
class Signed:
    """The distinct images of an index, numbered by the first row that has them.

    Attributes:
        image_of: int64 (rows,), the image of each row.
        first_rows: int64 (images,), the first row of each image; rising.
        hashes: uint64 (images,), the perceptual hash of each; 0 where `known` is False.
        known: bool (images,), whether the image could be decoded.
        thumbnails: uint8 (images, THUMBNAIL_BYTES), a map of a file without a name.
        problems: why a row's image could not be read, by row; the reason, and its details.
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
    _, first_rows, image_of = np.unique(index.column("image_hash"), return_index=True, return_inverse=True)
    order = np.argsort(first_rows)
    number_of = np.empty_like(order)
    number_of[order] = np.arange(len(order))
    image_of, first_rows = number_of[image_of.reshape(-1)], first_rows[order]
    count = len(first_rows)
    signed = Signed(image_of, first_rows, np.zeros(count, np.uint64), np.zeros(count, np.bool_), _memory(count, folder))
    signer = _Signer(index, signed)
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            for done in pool.map(signer.sign, range(0, count, CHUNK_IMAGES)):
                on_rows(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return signed


class _Signer:
    def __init__(self, index: Index, signed: Signed) -> None:
        self._index, self._signed, self._store = index, signed, ShardStore(index)
        self._by_image = np.argsort(signed.image_of, kind="stable")
        self._starts = np.searchsorted(signed.image_of[self._by_image], np.arange(len(signed.first_rows) + 1))

    def sign(self, begin: int) -> int:
        """Sign CHUNK_IMAGES images, from one number on; returns how many there were."""
        signed = self._signed
        end = min(begin + CHUNK_IMAGES, len(signed.first_rows))
        self._sign_rows(signed.first_rows[begin:end])
        # The rows of an image have equal bytes, unless a shard changed since: then another row may be whole.
        for image in (begin + np.flatnonzero(~signed.known[begin:end])).tolist():
            for row in self._by_image[self._starts[image] + 1 : self._starts[image + 1]]:
                if not signed.known[image]:
                    self._sign_rows(np.array([row]))
        found = begin + np.flatnonzero(signed.known[begin:end])
        signed.hashes[found] = perceptual_hashes(signed.thumbnails[found])
        return end - begin

    def _sign_rows(self, rows: Ints) -> None:
        columns = {name: values.tolist() for name, values in self._index.take(rows, COLUMNS).items()}
        shards, _ = self._index.locate(rows)
        for i, (row, shard) in enumerate(zip(rows.tolist(), shards.tolist(), strict=True)):
            image = self._signed.image_of[row]
            try:
                found = self._thumbnail(shard, {name: values[i] for name, values in columns.items()})
            except BadSample as bad:
                self._signed.problems[row] = bad
            else:
                self._signed.thumbnails[image] = found
                self._signed.known[image] = True

    def _thumbnail(self, shard: int, columns: dict[str, int]) -> Bytes:
        data = self._store.read(shard, columns["image_offset"], columns["image_bytes"])
        if fast_hash(data) != columns["image_xxh3"]:
            raise BadSample(Reason.FILE_CHANGED, "image is not the one indexed; `mmdata verify` tells what changed")
        image_format, orientation = FORMATS[columns["image_format"]], columns["orientation"]
        return thumbnail(data, format=image_format, orientation=orientation, checked=True)


def _memory(count: int, folder: Path) -> Bytes:
    """Room for thumbnails in a file that ends with this process, however it ends."""
    if not count:
        return np.empty((0, THUMBNAIL_BYTES), np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, count * THUMBNAIL_BYTES)  # a full disk is an error now, not SIGBUS later
        return np.memmap(file, np.uint8, mode="r+", shape=(count, THUMBNAIL_BYTES))
