"""Pairs of rows whose perceptual hashes are close, without comparing all pairs; crops of a few per cent included.

A crop of 5 % changes up to 28 of the 64 bits, more than strangers may differ in. So each row looks up not one hash but
one for each of 16 windows of its thumbnail: a copy is close to one of the windows. The 24 bits of the lowest
frequencies, which change least, are the key of a table of all rows. For each window the rows under its key are
looked up, and those under the keys in which some of its 5 least certain bits differ; those whose 64 bits differ in at
most `MAX_DISTANCE` are candidates. That is 512 look-ups a row, each of which finds rows / 2^24 strangers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mmdata.duplicates.signature import BITS, SIDE, Bytes, Floats, brightness, dct_rows, pack, spread

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Pairs = NDArray[np.int64]
"""Pairs of rows, int64 (n, 2)."""

CROP = 0.05
"""Share of the height and of the width that a crop may take away."""
MAX_DISTANCE = 14
"""Bits in which a window's hash and the hash of its copy may differ."""
KEY_BITS = 24
UNSURE_BITS = 5
CHUNK_ROWS = 256
"""Rows that are looked up together: 130,000 look-ups, 20 MB."""
MAX_FOUND = 2**21
"""Rows found that are compared together, 16 bytes each."""

WINDOWS = ((0.0, 1.0), (0.0, 1 - CROP), (CROP, 1 - CROP), (CROP / 2, 1 - CROP))
"""Begin and length of a window along one side, as shares of it; with those along the other side there are 16."""


class HashTable:
    """The rows of some thumbnails by the key of their hash.

    Args:
        hashes: uint64 (n,), as `perceptual_hashes` gives them.
    """

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        keys = _keys(hashes)
        self._rows = np.argsort(keys, kind="stable")
        self._starts = np.zeros(2**KEY_BITS + 1, np.int64)
        np.cumsum(np.bincount(keys, minlength=2**KEY_BITS), out=self._starts[1:])

    def near(self, thumbnails: Bytes, *, flipped: bool = False) -> Iterator[Pairs]:
        """Pairs (i, row) of a thumbnail i of (m, THUMBNAIL_BYTES) and a row of the table; a pair may come twice.

        Args:
            thumbnails: of which rows that are near are looked for.
            flipped: whether mirrored copies are looked for, and not others.
        """
        values = _of_windows(brightness(thumbnails), flipped=flipped)
        hashes, owners = pack(values > 0), np.arange(len(values)) // len(WINDOWS) ** 2
        in_key = _key_bits()
        least = np.argpartition(np.abs(values[:, in_key]), UNSURE_BITS, axis=1)[:, :UNSURE_BITS]
        bits = np.left_shift(1, KEY_BITS - 1 - least)
        changes = bits @ np.array(list(product((0, 1), repeat=UNSURE_BITS))).T  # (windows, 2^UNSURE_BITS)
        probes = (_keys(hashes)[:, None] ^ changes).ravel()
        yield from self._look_up(probes, np.repeat(np.arange(len(hashes)), changes.shape[1]), hashes, owners)

    def _look_up(self, probes: Ints, windows: Ints, hashes: Hashes, owners: Ints) -> Iterator[Pairs]:
        counts = self._starts[probes + 1] - self._starts[probes]
        found = np.flatnonzero(counts)
        probes, windows, counts = probes[found], windows[found], counts[found]
        ends = np.cumsum(counts)
        begin = 0
        while begin < len(probes):
            done = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, done + MAX_FOUND, side="right")))
            part = counts[begin:end]
            places = np.arange(int(part.sum())) + np.repeat(
                self._starts[probes[begin:end]] - (np.cumsum(part) - part), part
            )
            rows, of = self._rows[places], np.repeat(windows[begin:end], part)
            near = popcount(self.hashes[rows] ^ hashes[of]) <= MAX_DISTANCE
            if near.any():
                yield np.unique(np.stack([owners[of[near]], rows[near]], axis=1), axis=0)
            begin = end


def candidate_pairs(
    hashes: Hashes,
    thumbnails: Callable[[int, int], Bytes],
    *,
    flipped: bool = False,
    on_rows: Callable[[int], object] = lambda _: None,
) -> Iterator[Pairs]:
    """Pairs (i, j) of rows, i < j, that may be near copies; a pair may come several times.

    Args:
        hashes: uint64 (n,), of all rows.
        thumbnails: gives those of the rows from one number up to another.
        flipped: whether mirrored copies are looked for, too.
        on_rows: called with the number of rows that have been looked up, as they are.
    """
    table = HashTable(hashes)
    for first in range(0, len(hashes), CHUNK_ROWS):
        part = thumbnails(first, min(first + CHUNK_ROWS, len(hashes)))
        for mirrored in (False, True)[: 1 + flipped]:
            for pairs in table.near(part, flipped=mirrored):
                pairs[:, 0] += first
                different = pairs[pairs[:, 0] != pairs[:, 1]]
                if len(different):
                    yield np.sort(different, axis=1)
        on_rows(len(part))


def popcount(values: Hashes) -> NDArray[np.uint8]:
    """How many bits of each value are 1; numpy has `bitwise_count` from version 2 on."""
    values = values - ((values >> np.uint64(1)) & np.uint64(0x5555555555555555))
    values = (values & np.uint64(0x3333333333333333)) + ((values >> np.uint64(2)) & np.uint64(0x3333333333333333))
    values = (values + (values >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return ((values * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint8)


def _of_windows(images: Floats, *, flipped: bool) -> Floats:
    """`spread` of each window of m images: (16 m, 64), the windows of an image one after the other."""
    if flipped:
        images = images[:, :, ::-1]
    rows = dct_rows()
    one_side = np.concatenate([rows @ _window(*window) for window in WINDOWS]).astype(np.float32)  # (4 · 8, SIDE)
    found = one_side @ images @ one_side.T
    windows = found.reshape(-1, len(WINDOWS), BITS, len(WINDOWS), BITS).transpose(0, 1, 3, 2, 4)
    return spread(windows.reshape(-1, BITS * BITS))


def _window(begin: float, length: float) -> NDArray[np.float64]:
    """The matrix (SIDE, SIDE) that enlarges a part of SIDE values to all of them, by linear interpolation."""
    places = np.clip((begin + (np.arange(SIDE) + 0.5) / SIDE * length) * SIDE - 0.5, 0, SIDE - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(SIDE)))


def _key_bits() -> Ints:
    """Places of the bits of the key in a hash: the lowest frequencies without the mean, the lowest first."""
    order = sorted(range(1, BITS * BITS), key=lambda bit: (sum(divmod(bit, BITS)), max(divmod(bit, BITS))))
    return np.array(order[:KEY_BITS])


def _keys(hashes: Hashes) -> Ints:
    keys = np.zeros(len(hashes), np.int64)
    for bit in _key_bits().tolist():
        keys = (keys << 1) | ((hashes >> np.uint64(63 - bit)) & np.uint64(1)).astype(np.int64)
    return keys
