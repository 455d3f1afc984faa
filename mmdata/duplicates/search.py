"""Near copies among many images: pairs whose hashes are close are found first, then their thumbnails are compared.

Pairs of rows whose perceptual hashes are close, without comparing all pairs; crops of a few per cent included.

A crop of 5 % changes up to 28 of the 64 bits, more than strangers may differ in. So each row looks up not one hash but
one for each of 16 windows of its thumbnail: a copy is close to one of the windows. The 24 bits of the lowest
frequencies, which change least, are the key of a table of all rows. For each window the rows under its key are
looked up, and those under the keys in which some of its 5 least certain bits differ; those whose 64 bits differ in at
most `MAX_DISTANCE` are candidates. That is 512 look-ups a row, each of which finds rows / 2^24 strangers.

Whether two thumbnails show one picture: one is laid onto the other, and no place may differ.

The search finds pictures that are composed alike. A copy that was cropped fits its original after a shift and a
stretch of at most `MAX_SHIFT`; they are found by Gauss-Newton steps on the brightness. What differs then is
measured where it differs most, since two pictures that differ in one small thing are two pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mmdata.duplicates.signature import BITS, SIDE, Bytes, Floats, brightness, colours, dct_rows, mirrored, pack, spread

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Pairs = Ints
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

NEAR = 1.75
"""Largest difference of near copies, as `difference` measures it."""
MAX_SHIFT = 0.06
"""Share of a side by which a copy is moved at its centre, and stretched, at most to fit."""
SHIFT_TOLERANCE = 13.0
"""More is tolerated of a copy that had to be moved, by this times the move as a share of the side: 5 % give 1.65 times.

What was never cropped fits without a move. So do siblings, such as two drawings of different skin tones.
"""
STEPS = 3
LEVELS = 4.0
"""Levels (of 256) by which a place of two copies may differ where the picture is smooth…"""
SLOPE = 0.15
"""…and the share of the contrast around it that is added where it is not: an edge never fits exactly."""
BORDER = 2
"""Pixels at the border that are not compared: a crop has lost them."""
CHUNK_PAIRS = 512
MAX_UNLIKE = 0.7
"""Unmoved copies differ by at most this share of their contrast at 8 × 8 pixels."""


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

    def near(self, thumbnails: Bytes) -> Iterator[Pairs]:
        """Pairs (i, row) of a thumbnail i of (m, THUMBNAIL_BYTES) and a row of the table; a pair may come twice."""
        values = _of_windows(brightness(thumbnails))
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
        for looked_up in [part, mirrored(part)] if flipped else [part]:
            for pairs in table.near(looked_up):
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


def _of_windows(images: Floats) -> Floats:
    """`spread` of each window of m images: (16 m, 64), the windows of an image one after the other."""
    begin, length = np.array(WINDOWS).T
    enlarged = _interpolation(length - 1, begin + length / 2 - 0.5, SIDE)
    one_side = (dct_rows() @ enlarged).reshape(-1, SIDE).astype(np.float32)  # (4 · 8, SIDE)
    found = one_side @ images @ one_side.T
    windows = found.reshape(-1, len(WINDOWS), BITS, len(WINDOWS), BITS).transpose(0, 1, 3, 2, 4)
    return spread(windows.reshape(-1, BITS * BITS))


def _key_bits() -> Ints:
    """Places of the bits of the key in a hash: the lowest frequencies without the mean, the lowest first."""
    order = sorted(range(1, BITS * BITS), key=lambda bit: (sum(divmod(bit, BITS)), max(divmod(bit, BITS))))
    return np.array(order[:KEY_BITS])


def _keys(hashes: Hashes) -> Ints:
    keys = np.zeros(len(hashes), np.int64)
    for bit in _key_bits().tolist():
        keys = (keys << 1) | ((hashes >> np.uint64(63 - bit)) & np.uint64(1)).astype(np.int64)
    return keys


def difference(first: Bytes, second: Bytes) -> Floats:
    """How much the pictures of n pairs differ: at most `NEAR` for near copies, 10 and more for two random photos.

    Args:
        first, second: thumbnails, uint8 (n, THUMBNAIL_BYTES).

    Returns:
        float32 (n,): the largest difference of a place, in units of what is tolerated there; the smaller one of laying
        the first onto the second and the second onto the first.
    """
    found = [np.empty(0, np.float32)]
    for begin in range(0, len(first), CHUNK_PAIRS):
        one, other = (
            (brightness(part), colours(part)) for part in (first[begin:][:CHUNK_PAIRS], second[begin:][:CHUNK_PAIRS])
        )
        found.append(np.minimum(_laid_onto(*one, *other), _laid_onto(*other, *one)))
    return np.concatenate(found)


def are_near(
    pairs: Ints, thumbnails: Callable[[Ints], Bytes], *, flipped: bool = False, most: float = NEAR
) -> NDArray[np.bool_]:
    """Which pairs of rows (n, 2) are near copies, bool (n,).

    Args:
        pairs: of rows.
        thumbnails: gives those of some rows, which need not rise.
        flipped: whether a mirrored copy is one, too.
        most: largest difference of near copies.
    """
    found = [np.empty(0, np.bool_)]
    for begin in range(0, len(pairs), CHUNK_PAIRS):
        first, second = (thumbnails(rows) for rows in pairs[begin : begin + CHUNK_PAIRS].T)
        near = np.zeros(len(first), np.bool_)
        for one in [first, mirrored(first)] if flipped else [first]:
            alike = np.flatnonzero(_composed_alike(one, second) & ~near)
            near[alike] = difference(one[alike], second[alike]) <= most
        found.append(near)
    return np.concatenate(found)


def _composed_alike(first: Bytes, second: Bytes) -> NDArray[np.bool_]:
    """Whether 8 × 8 means of the brightness agree so far that a shift may explain the rest; saves most fits."""
    means = [brightness(part).reshape(-1, 8, 4, 8, 4).mean((2, 4)) for part in (first, second)]
    contrast = np.minimum(*(part.std((1, 2)) for part in means))
    return np.sqrt(((means[0] - means[1]) ** 2).mean((1, 2))) <= LEVELS + MAX_UNLIKE * contrast


def _laid_onto(light: Floats, colour: Floats, onto: Floats, onto_colour: Floats) -> Floats:
    shifts = _fit(light, onto)
    rest = _moved(light, shifts) - onto
    worst = _worst(_blurred(rest), _contrast(onto), BORDER)
    moved = _moved(colour.reshape(-1, *colour.shape[2:]), np.repeat(shifts, 2, axis=0)).reshape(colour.shape)
    of_colour = _worst(
        (moved - onto_colour).reshape(-1, *colour.shape[2:]),
        _contrast(onto_colour.reshape(-1, *colour.shape[2:])),
        BORDER // 2,
    )
    moves = np.maximum(*(np.abs(shifts[:, at]) / 2 + np.abs(shifts[:, at + 1]) for at in (0, 2)))
    found = np.maximum(worst, of_colour.reshape(-1, 2).max(1)) / (1 + SHIFT_TOLERANCE * moves)
    return found.astype(np.float32)


def _fit(images: Floats, onto: Floats) -> Floats:
    """Stretch and shift along height and width, float32 (n, 4), that lay images (n, s, s) onto others."""
    shifts = np.zeros((len(images), 4), np.float32)
    places = _places(images.shape[1])
    for _ in range(STEPS):
        moved = _moved(images, shifts)
        down, right = (np.gradient(moved, axis=axis) * images.shape[1] for axis in (1, 2))
        slopes = np.stack([down * places[:, None], down, right * places, right], 1).reshape(len(images), 4, -1)
        normal = slopes @ slopes.transpose(0, 2, 1)
        # A picture without contrast along a side says nothing about a shift there: a little damping keeps it at 0.
        normal[:, range(4), range(4)] += (1e-3 * np.trace(normal, axis1=1, axis2=2) / 4 + 1)[:, None]
        rest = (onto - moved).reshape(len(images), -1, 1)
        shifts = np.clip(shifts + np.linalg.solve(normal, slopes @ rest)[..., 0], -MAX_SHIFT, MAX_SHIFT)
    return shifts.astype(np.float32)


def _moved(images: Floats, shifts: Floats) -> Floats:
    """Images (n, s, s), stretched and shifted by (n, 4), with linear interpolation."""
    down, right = (_interpolation(shifts[:, at], shifts[:, at + 1], images.shape[1]) for at in (0, 2))
    return down @ images @ right.transpose(0, 2, 1)


def _interpolation(stretch: NDArray[Any], shift: NDArray[Any], side: int) -> NDArray[Any]:
    """Matrices (n, side, side) that stretch and shift `side` values, by linear interpolation."""
    at = ((1 + stretch)[:, None] * _places(side) + shift[:, None] + 0.5) * side - 0.5
    return np.maximum(0, 1 - np.abs(np.clip(at, 0, side - 1)[:, :, None] - np.arange(side, dtype=np.float32)))


def _places(side: int) -> Floats:
    """Centres of the pixels of a side, -0.5 to 0.5."""
    return ((np.arange(side) + 0.5) / side - 0.5).astype(np.float32)


def _around(images: Floats) -> Floats:
    """The 3 × 3 pixels around each pixel: (n, s, s, 3, 3)."""
    return sliding_window_view(np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge"), (3, 3), axis=(1, 2))


def _blurred(images: Floats) -> Floats:
    return _around(images).mean((3, 4))


def _contrast(images: Floats) -> Floats:
    around = _around(images)
    return around.max((3, 4)) - around.min((3, 4))


def _worst(rest: Floats, contrast: Floats, border: int) -> Floats:
    found = np.abs(rest) / (LEVELS + SLOPE * contrast)
    return found[:, border:-border, border:-border].max((1, 2))
