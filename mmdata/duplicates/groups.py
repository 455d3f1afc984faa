"""From signatures to groups of near copies. A group is a first image and its near copies: groups do not chain.

Of images in their order, each joins the first leader that it is a near copy of, and is a leader itself if there is
none. So all of a group look like its leader, and a row of pictures that turns into another, step by step, is cut into
several groups. What must not be parted at all, such as train and val, is decided by `components`, which do chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmdata.duplicates.candidates import Pairs, candidate_pairs
from mmdata.duplicates.confirm import NEAR, are_near
from mmdata.duplicates.sign import Signed

Ints = NDArray[np.int64]

ROUNDS = 32
"""Rounds of merging images with one hash; more than this many different pictures hardly ever have one."""
MERGED = NEAR / 2
"""Largest difference of images with one hash that are searched as one; the hash of a copy that was moved differs."""


def _none() -> Pairs:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class NearPairs:
    """Distinct images that are near copies of each other.

    Attributes:
        representative: int64 (images,), the first image with the same hash and nearly the same thumbnail; the image
            itself for most. What is said of a representative holds for its images.
        pairs: int64 (n, 2), representatives i < j that are near copies; sorted.
        links: int64 (n, 2), a representative and an image of another one, with the same hash, that are near copies
            though the two representatives are not. Of a hash the first `ROUNDS` representatives are compared.
    """

    representative: Ints
    pairs: Pairs
    links: Pairs = field(default_factory=_none)

    def below(self, images: int) -> NearPairs:
        """Those of the images up to a number."""
        pairs, links = (each[each.max(1, initial=-1) < images] for each in (self.pairs, self.links))
        return NearPairs(self.representative[:images], pairs, links)


def near_pairs(
    signed: Signed,
    *,
    flipped: bool = False,
    limit: int | None = None,
    on_rows: Callable[[int], object] = lambda _: None,
) -> NearPairs:
    """Find all near copies among distinct images.

    Images that have the same hash and differ little are searched as one: that keeps the pairs few where one picture
    comes a thousand times.

    Args:
        signed: the images.
        flipped: whether a mirrored copy is one.
        limit: pairs of two images from this number on are left out; None: none is.
        on_rows: called with the number of images that were looked up.
    """
    known = np.flatnonzero(signed.known)
    representative = _merge_equal_hashes(signed, known)
    searched = known[representative[known] == known]
    on_rows(len(known) - len(searched))
    parts = [np.empty(0, np.int64)]
    for pairs in candidate_pairs(
        signed.hashes[searched],
        lambda begin, end: signed.thumbnails[searched[begin:end]],
        flipped=flipped,
        on_rows=on_rows,
    ):
        kept = pairs if limit is None else pairs[searched[pairs[:, 0]] < limit]
        parts.append(np.unique(kept @ np.array([len(searched), 1])))
    codes = np.unique(np.concatenate(parts))  # sorted by i, then j
    pairs = searched[np.stack(np.divmod(codes, max(1, len(searched))), axis=1)]
    near = are_near(pairs, lambda rows: signed.thumbnails[rows], flipped=flipped)
    links = _links(signed, NearPairs(representative, pairs[near]), known, flipped=flipped)
    if limit is not None:
        links = links[links.min(1, initial=limit) < limit]
    return NearPairs(representative, pairs[near], links)


def leaders(near: NearPairs) -> Ints:
    """The leader of each image, int64 (images,): itself, or the first leader that it is a near copy of.

    Example:
        If 0 is near 1, 1 near 2, and 2 near 3, the leaders are 0, 0, 2, 2: what 2 is near, 1, is no leader.
    """
    found = np.arange(len(near.representative))
    for i, j in near.pairs.tolist():  # sorted: when i comes, all before it are decided
        if found[i] == i and found[j] == j:
            found[j] = i
    return found[near.representative]


def components(near: NearPairs) -> Ints:
    """The first image of each image's component, int64 (images,): all that chains of `pairs` and `links` connect.

    Images of two representatives are not compared with each other: a pair of which neither is a representative is
    connected through these, or not at all.

    Example:
        If 0 is near 1, 1 near 2, and 2 near 3, all have 0.
    """
    parent = list(range(len(near.representative)))

    def root(image: int) -> int:
        while parent[image] != image:
            parent[image] = image = parent[parent[image]]
        return image

    linked = near.representative[near.links]
    for i, j in np.concatenate([near.pairs, linked]).tolist():
        first, second = sorted((root(i), root(j)))
        parent[second] = first
    return np.array([root(image) for image in near.representative.tolist()], np.int64)


def near_others(near: NearPairs, is_other: NDArray[np.bool_]) -> Ints:
    """The first of some images that each image is a near copy of, int64 (images,); -1 where there is none.

    Args:
        near: the pairs.
        is_other: bool (images,), which images are looked for.
    """
    none = len(is_other)
    own = np.full(none, none)  # of each representative, the first of its images that is looked for
    others = np.flatnonzero(is_other)
    np.minimum.at(own, near.representative[others], others)
    found = own.copy()
    np.minimum.at(found, near.pairs[:, 0], own[near.pairs[:, 1]])
    np.minimum.at(found, near.pairs[:, 1], own[near.pairs[:, 0]])
    found = found[near.representative]
    for one, other in (near.links.T, near.links[:, ::-1].T):
        np.minimum.at(found, one, np.where(is_other[other], other, none))
    return np.where(found < none, found, -1)


def _links(signed: Signed, near: NearPairs, known: Ints, *, flipped: bool) -> Pairs:
    """Pairs of a representative and an image of another one with the same hash; see `NearPairs.links`."""
    is_own = near.representative[known] == known
    merged, firsts = known[~is_own], known[is_own]
    firsts = firsts[np.argsort(signed.hashes[firsts], kind="stable")]
    hashes = signed.hashes[firsts]
    begins, ends = (np.searchsorted(hashes, signed.hashes[merged], side=side) for side in ("left", "right"))
    count = len(near.representative)
    paired = near.pairs @ np.array([count, 1])
    found = [_none()]
    for number in range(ROUNDS):
        here = begins + number < ends
        if not here.any():
            break
        pairs = np.stack([firsts[begins[here] + number], merged[here]], axis=1)
        both = np.sort(np.stack([pairs[:, 0], near.representative[pairs[:, 1]]], axis=1), axis=1)
        pairs = pairs[(both[:, 0] != both[:, 1]) & ~np.isin(both @ np.array([count, 1]), paired)]
        found.append(pairs[are_near(pairs, lambda rows: signed.thumbnails[rows], flipped=flipped)])
    return np.concatenate(found)


def _merge_equal_hashes(signed: Signed, known: Ints) -> Ints:
    """For each image the first with its hash and with nearly its thumbnail; itself if it is the first."""
    found = np.arange(len(signed.first_rows))
    left = known[np.argsort(signed.hashes[known], kind="stable")]
    for _ in range(ROUNDS):
        if len(left) < 2:
            break
        hashes = signed.hashes[left]
        begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
        first = left[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
        pairs = np.stack([first, left], axis=1)[~begins]
        near = are_near(pairs, lambda rows: signed.thumbnails[rows], most=MERGED)
        found[pairs[near, 1]] = pairs[near, 0]
        left = pairs[~near, 1]
    return found
