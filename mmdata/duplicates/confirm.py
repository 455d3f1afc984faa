"""Whether two thumbnails show one picture: one is laid onto the other, and no place may differ.

The search finds pictures that are composed alike. A copy that was cropped fits its original after a shift and a
stretch of at most `MAX_SHIFT`; they are found by Gauss-Newton steps on the brightness. What differs then is
measured where it differs most, since two pictures that differ in one small thing are two pictures.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mmdata.duplicates.signature import Bytes, Floats, brightness, colours

Ints = NDArray[np.int64]

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


def difference(first: Bytes, second: Bytes, *, flipped: bool = False) -> Floats:
    """How much the pictures of n pairs differ: at most `NEAR` for near copies, 10 and more for two random photos.

    Args:
        first, second: thumbnails, uint8 (n, THUMBNAIL_BYTES).
        flipped: whether the first ones are mirrored before.

    Returns:
        float32 (n,): the largest difference of a place, in units of what is tolerated there; the smaller one of laying
        the first onto the second and the second onto the first.
    """
    found = [np.empty(0, np.float32)]
    for begin in range(0, len(first), CHUNK_PAIRS):
        one, other = (
            (brightness(part), colours(part)) for part in (first[begin:][:CHUNK_PAIRS], second[begin:][:CHUNK_PAIRS])
        )
        if flipped:
            one = (one[0][..., ::-1], one[1][..., ::-1])
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
        for mirrored in (False, True)[: 1 + flipped]:
            alike = np.flatnonzero(_composed_alike(first, second, flipped=mirrored) & ~near)
            near[alike] = difference(first[alike], second[alike], flipped=mirrored) <= most
        found.append(near)
    return np.concatenate(found)


def _composed_alike(first: Bytes, second: Bytes, *, flipped: bool) -> NDArray[np.bool_]:
    """Whether 8 × 8 means of the brightness agree so far that a shift may explain the rest; saves most fits."""
    means = [brightness(part).reshape(-1, 8, 4, 8, 4).mean((2, 4)) for part in (first, second)]
    if flipped:
        means[0] = means[0][..., ::-1]
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


def _interpolation(stretch: Floats, shift: Floats, side: int) -> Floats:
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
