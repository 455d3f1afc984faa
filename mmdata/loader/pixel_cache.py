"""Decoded images in one file, each at a place that the index alone decides: epochs after the first decode nothing.

A record is a hash of 8 bytes, four floats for the part of the original that the image shows, and the pixels. The hash
is of all that follows it, and of key and row; it is written last, and compared at each reading. A record that is
missing, was torn by a kill or is damaged is no record: its image is decoded again, and never has other pixels. So any
number of threads and processes write without a lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from mmdata.config import DataConfig
from mmdata.errors import explain
from mmdata.hashing import fast_hash, hash64
from mmdata.images.crop import Crop
from mmdata.images.pixels import PixelTransform, SmallImage, small_sizes
from mmdata.index import Index
from mmdata.safe_read import open_regular
from mmdata.storage import ShardCache
from mmdata.storage.cache import GB, PIXELS
from mmdata.system import IS_POSIX, lock_file, read_at, read_into, write_at

logger = logging.getLogger("mmdata")

HASH_BYTES, SHOWN_BYTES = 8, 32
WHAT = "cache of pixels"
DECODERS = ("simplejpeg", "pillow", "torch")
"""Packages of which another version may give other pixels."""


class PixelCache:
    """The images of an index's first rows, as small as `shorter_side` says. Safe to share between threads.

    Without room on the disk, or where the folder is read-only, nothing more is kept, and a warning says so.

    Args:
        index: of the rows.
        transform: makes the images small.
        folder: of such files, created if it is missing.
        max_bytes: total size of the files in the folder. Those that no process uses make room, the least recently used
            first.

    Attributes:
        path: of the file.
        rows: the first so many rows of the index have a place.

    Raises:
        DataError: something else than a regular file has the file's name.
    """

    def __init__(self, index: Index, transform: PixelTransform, folder: Path, *, max_bytes: int) -> None:
        key = json.dumps(_key(index, transform)).encode()
        self._seed = hash64(key) % 2**64
        self._folder = ShardCache(folder, max_bytes=max_bytes)
        self.path = folder / f"{hashlib.sha256(key).hexdigest()}{PIXELS}"
        self._file: int | None = None
        self._is_filled = True
        assert transform.shorter_side is not None
        self._sizes = small_sizes(_first_sizes(index, transform.shorter_side, max_bytes), transform.shorter_side)
        self._offsets = _offsets(self._sizes)
        self.rows = len(self._sizes)
        self._open()
        logger.log(
            logging.INFO if self.rows == len(index) else logging.WARNING,
            "data.loading.cache_pixels_gb: decoded images of %d rows of %d (%.0f %%) are kept in '%s', %.3g GB; others "
            "are decoded in each epoch",
            *(self.rows, len(index), 100 * self.rows / max(1, len(index)), self.path, self._offsets[self.rows] / GB),
        )

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, transform: PixelTransform) -> Self | None:
        """The cache that `data.loading.cache_pixels_gb` asks for; None: it asks for none."""
        if (size_gb := data.loading.cache_pixels_gb) is None:
            return None
        return cls(
            index, transform, ShardCache.from_config(data.loading).folder / "pixels", max_bytes=int(size_gb * GB)
        )

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def read(self, row: int) -> SmallImage | None:
        """The image of a row; None if it is not kept."""
        if self._file is None or row >= self.rows:
            return None
        begin, end = self._offsets[row : row + 2].tolist()
        body = np.empty(end - begin - HASH_BYTES, np.uint8)
        try:
            kept = read_at(self._file, HASH_BYTES, begin)
            # Not a mapping: it ends the process with SIGBUS if another program cuts the file or the disk fails.
            if not any(kept) or read_into(self._file, body.data, begin + HASH_BYTES) < len(body):
                return None
        except OSError:  # the disk fails, and the shards may lie on another one
            return None
        if kept != self._hash(row, body):
            return None
        pixels = torch.from_numpy(body[SHOWN_BYTES:]).view(*self._sizes[row].tolist(), 3)
        return SmallImage(pixels.permute(2, 0, 1), Crop(*body[:SHOWN_BYTES].view(np.float64).tolist()), row)

    def write(self, small: SmallImage) -> None:
        """Keep the image of the row that is its number, if it has a place."""
        row = small.number
        if self._file is None or not self._is_filled or row >= self.rows:
            return
        if list(small.image.shape[1:]) != self._sizes[row].tolist():  # its header gives another size
            return
        pixels, begin = small.image.permute(1, 2, 0).reshape(-1).numpy(), int(self._offsets[row])
        body = np.concatenate([np.array(small.shown, np.float64).view(np.uint8), pixels])
        try:
            write_at(self._file, body.data, begin + HASH_BYTES)
            write_at(self._file, self._hash(row, body), begin)
        except OSError as error:
            self._end_filling(error)

    def _hash(self, row: int, body: NDArray[np.uint8]) -> bytes:
        return fast_hash(body.data, seed=(self._seed + row) % 2**64).to_bytes(HASH_BYTES, "little", signed=True)

    def _open(self) -> None:
        """Open the file, and make room for it. One that this user may not write is read."""
        try:
            with self._folder.locked():
                self.path.touch()  # its time says when it was used last
                self._file = open_regular(self.path, WHAT, flags=os.O_RDWR)
                if IS_POSIX:  # elsewhere no open file can be removed, and bytes are locked
                    lock_file(self._file, shared=True)
                own = os.fstat(self._file).st_size
                room = max(0, own + self._folder.make_room(int(self._offsets[-1]) - own))
            self.rows = int(np.searchsorted(self._offsets, room, side="right")) - 1
            os.ftruncate(self._file, int(self._offsets[self.rows]))  # says what it may take, and takes nothing yet
        except OSError as error:
            self._end_filling(error)
            with suppress(OSError):
                self._file = open_regular(self.path, WHAT) if self._file is None else self._file

    def _end_filling(self, error: OSError) -> None:
        if self._is_filled:
            self._is_filled = False
            logger.warning(
                "data.loading.cache_pixels_gb: '%s': %s. No more decoded images are kept there. The batches are the "
                "same; images that are not kept are decoded in each epoch",
                self.path,
                explain(error),
            )


def _key(index: Index, transform: PixelTransform) -> dict[str, Any]:
    """What the pixels and their places depend on, as JSON."""
    return {
        "format": 1,
        "index": index.fingerprint,
        "shorter_side": transform.shorter_side,
        "exact": transform.exact,
        "decoders": {package: version(package) for package in DECODERS},
        # torch resizes with other instructions on other processors, and may round otherwise.
        "processor": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }


def _first_sizes(index: Index, shorter_side: int, max_bytes: int) -> NDArray[np.int64]:
    """(height, width) of upright images, int64 (n, 2), of the first shards, which take `max_bytes`, or of all."""
    found, taken = [np.empty((0, 2), np.int64)], 0
    for number in range(index.num_shards):
        shard = index.shard(number)
        stored = np.stack([shard.fixed("height"), shard.fixed("width")], axis=1).astype(np.int64)
        found.append(np.where(shard.fixed("orientation")[:, None] >= 5, stored[:, ::-1], stored))
        taken += int(_offsets(small_sizes(found[-1], shorter_side))[-1])
        if taken > max_bytes:
            break
    return np.concatenate(found)


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the records of images of these sizes (n, 2) begin in the file, and where the last one ends: (n + 1,)."""
    return np.concatenate([[0], (HASH_BYTES + SHOWN_BYTES + 3 * sizes.prod(axis=1)).cumsum()])
