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

from mmdata.duplicates.search import LEVELS, MAX_UNLIKE, NEAR, Pairs, are_near, candidate_pairs
from mmdata.duplicates.signature import Signed, brightness, colours

Ints = NDArray[np.int64]

CHUNK_IMAGES = 4096
"""Images whose means are taken together: 20 MB."""
ROUNDS = 32
"""Rounds of merging images with one hash; more than this many different pictures hardly ever have one."""
MERGED = NEAR / 2
"""Largest difference of images with one hash that are searched as one; the hash of a copy that was moved differs."""

MAX_PAIRS = 64
"""Most images before it that an image is laid onto: those whose mean brightness and colours are closest to its own."""


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
        bounded: images with more candidates than the `MAX_PAIRS` that were compared.
    """

    representative: Ints
    pairs: Pairs
    links: Pairs = field(default_factory=_none)
    bounded: int = 0

    def below(self, images: int) -> NearPairs:
        """Those of the images up to a number."""
        pairs, links = (each[each.max(1, initial=-1) < images] for each in (self.pairs, self.links))
        return NearPairs(self.representative[:images], pairs, links, self.bounded)


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
    budget = _Budget(signed, searched)
    near = [_none()]
    for pairs in candidate_pairs(
        signed.hashes[searched],
        lambda begin, end: signed.thumbnails[searched[begin:end]],
        flipped=flipped,
        on_rows=on_rows,
    ):
        new = searched[budget.choose(pairs if limit is None else pairs[searched[pairs[:, 0]] < limit])]
        near.append(new[are_near(new, lambda rows: signed.thumbnails[rows], flipped=flipped)])
    found = np.unique(np.concatenate(near), axis=0)  # sorted by i, then j
    links = _links(signed, NearPairs(representative, found), known, flipped=flipped)
    if limit is not None:
        links = links[links.min(1, initial=limit) < limit]
    return NearPairs(representative, found, links, int(np.count_nonzero(budget.is_full)))


class _Budget:
    """Chooses which candidates are compared: each pair once, and at most `MAX_PAIRS` for the later of its images.

    Pairs whose mean brightness differs more than that of near copies can (`confirm`) are left out before.
    """

    def __init__(self, signed: Signed, searched: Ints) -> None:
        self._count = max(1, len(searched))
        self._used = np.zeros(len(searched), np.int64)
        self.is_full = np.zeros(len(searched), np.bool_)
        self._runs: list[Ints] = []  # codes of chosen pairs, sorted; each more than twice as long as the next
        means, contrasts = [np.empty((0, 3), np.float32)], [np.empty(0, np.float32)]
        for begin in range(0, len(searched), CHUNK_IMAGES):
            part = signed.thumbnails[searched[begin : begin + CHUNK_IMAGES]]
            light, colour = brightness(part), colours(part).mean((2, 3))
            means.append(np.concatenate([light.mean((1, 2))[:, None], colour], axis=1).astype(np.float32))
            contrasts.append(light.reshape(-1, 8, 4, 8, 4).mean((2, 4)).std((1, 2)).astype(np.float32))
        self._means, self._contrasts = np.concatenate(means), np.concatenate(contrasts)

    def choose(self, pairs: Pairs) -> Pairs:
        """Those of some pairs i < j that are to be compared, sorted."""
        codes = np.unique(pairs @ np.array([self._count, 1]))
        for run in self._runs:
            codes = codes[run[np.minimum(np.searchsorted(run, codes), len(run) - 1)] != codes]
        pairs = np.stack(np.divmod(codes, self._count), axis=1)
        may_be = np.abs(self._means[pairs[:, 0], 0] - self._means[pairs[:, 1], 0]) <= (
            LEVELS + 0.1 + MAX_UNLIKE * self._contrasts[pairs].min(1, initial=np.inf)
        )
        codes, pairs = codes[may_be], pairs[may_be]
        later = pairs[:, 1]
        order = np.lexsort((np.abs(self._means[pairs[:, 0]] - self._means[later]).max(1), later))
        begins = np.searchsorted(later[order], later[order])
        rank = self._used[later[order]] + np.arange(len(order)) - begins
        self.is_full[later[order[rank >= MAX_PAIRS]]] = True
        chosen = np.sort(order[rank < MAX_PAIRS])
        np.add.at(self._used, later[chosen], 1)
        if len(chosen):
            self._runs.append(codes[chosen])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]))]
        return pairs[chosen]


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
