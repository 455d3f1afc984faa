"""The search for near copies against all pairs, and the rules that make groups of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mmdata.duplicates import groups
from mmdata.duplicates.groups import NearPairs, components, leaders, near_others, near_pairs
from mmdata.duplicates.search import MAX_DISTANCE, NEAR, are_near, candidate_pairs, difference, popcount
from mmdata.duplicates.signature import SIDE, THUMBNAIL_BYTES, Signed, perceptual_hashes


def smooth(count: int, seed: int, *, begin: float = 0, length: float = 1) -> NDArray[np.uint8]:
    """Thumbnails of random smooth pictures, grey, or of a part of them: a share of height and width."""
    rng = np.random.default_rng(seed)
    places = begin + (np.arange(SIDE) + 0.5) / SIDE * length
    waves = np.cos(np.pi * np.outer(places, np.arange(8)))
    weights = rng.normal(0, 1, (count, 8, 8)) / (1 + np.add.outer(np.arange(8), np.arange(8)))
    images = 128 + 40 * waves @ weights @ waves.T
    found = np.full((count, THUMBNAIL_BYTES), 128, np.uint8)
    found[:, : SIDE**2] = images.reshape(count, -1).clip(0, 255).round().astype(np.uint8)
    return found


def test_hash_is_the_dct_of_its_definition():
    image = smooth(1, 5)
    light = image[0, : SIDE**2].reshape(SIDE, SIDE).astype(float)
    places = (2 * np.arange(SIDE) + 1) * np.pi / (2 * SIDE)
    low = np.array(
        [[(light * np.outer(np.cos(places * u), np.cos(places * v))).sum() for v in range(8)] for u in range(8)]
    )
    low *= np.outer(*[np.where(np.arange(8) == 0, np.sqrt(1 / SIDE), np.sqrt(2 / SIDE))] * 2)
    bits = "".join("01"[int(above)] for above in (low > np.median(low)).ravel())
    assert int(perceptual_hashes(image)[0]) == int(bits, 2)


def test_popcount_is_that_of_python():
    values = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert popcount(values).tolist() == [int(value).bit_count() for value in values]


def test_search_finds_what_all_pairs_find():
    images = smooth(600, 0)
    noise = np.random.default_rng(1).integers(-3, 4, images[:200].shape)
    images = np.concatenate([images, (images[:200] + noise).clip(0, 255).astype(np.uint8)])
    hashes = perceptual_hashes(images)
    found = {tuple(pair) for pairs in candidate_pairs(hashes, lambda a, b: images[a:b]) for pair in pairs.tolist()}
    first, second = np.triu_indices(len(images), 1)
    distances = popcount(hashes[first] ^ hashes[second])
    near = {(int(i), int(j)) for i, j in np.stack([first, second], 1)[distances <= 4]}
    assert len(near) > 150
    assert len(near - found) <= 0.02 * len(near)
    assert all((i, i + 600) in found for i in range(200))


@pytest.mark.parametrize(("begin", "length"), [(0, 0.95), (0.05, 0.95), (0.02, 0.96)])
def test_search_finds_a_crop_and_it_is_confirmed(begin: float, length: float):
    images, crops = smooth(300, 2), smooth(300, 2, begin=begin, length=length)
    hashes = perceptual_hashes(np.concatenate([images, crops]))
    both = np.concatenate([images, crops])
    found = {tuple(pair) for part in candidate_pairs(hashes, lambda a, b: both[a:b]) for pair in part.tolist()}
    assert np.mean([(i, i + 300) in found for i in range(300)]) >= 0.98
    if length == 0.95:  # the hashes alone are too far apart
        assert popcount(hashes[:300] ^ hashes[300:]).max() > MAX_DISTANCE
    assert (difference(images, crops) <= NEAR).mean() >= 0.98
    assert (difference(images[1:], crops[:-1]) > NEAR).all()


def near(count: int, *pairs: tuple[int, int], merged: dict[int, int] | None = None) -> NearPairs:
    representative = np.arange(count)
    for image, first in (merged or {}).items():
        representative[image] = first
    return NearPairs(representative, np.array(pairs, np.int64).reshape(-1, 2))


def test_groups_do_not_chain_and_components_do():
    chain = near(4, (0, 1), (1, 2), (2, 3))
    assert leaders(chain).tolist() == [0, 0, 2, 2]
    assert components(chain).tolist() == [0, 0, 0, 0]


def test_merged_images_follow_their_representative():
    found = near(5, (0, 1), merged={2: 1, 4: 3})
    assert leaders(found).tolist() == [0, 0, 0, 3, 3]
    assert components(found).tolist() == [0, 0, 0, 3, 3]


def test_other_images_are_found_through_representatives():
    found = near(6, (0, 1), (2, 3), merged={4: 1, 5: 1})
    others = np.array([False, False, False, True, False, True])
    assert near_others(found, others).tolist() == [5, 5, 3, 3, 5, 5]


def test_no_images_have_no_pairs():
    assert list(candidate_pairs(np.empty(0, np.uint64), lambda a, b: np.empty((0, THUMBNAIL_BYTES), np.uint8))) == []


def signed(thumbnails: NDArray[np.uint8]) -> Signed:
    count = len(thumbnails)
    known = np.ones(count, np.bool_)
    return Signed(np.arange(count), np.arange(count), perceptual_hashes(thumbnails), known, thumbnails)


def test_an_image_is_linked_to_another_of_its_hash_that_its_representative_is_not_near():
    levels = np.array([0, 3, 10])  # 1 is merged with 0, and 2 is near 1 alone
    images = np.repeat(smooth(1, 5), 3, axis=0)
    images[:, : SIDE**2] = (images[:, : SIDE**2] + levels[:, None]).clip(0, 255)
    assert len(np.unique(perceptual_hashes(images))) == 1
    assert (difference(images[[0, 1, 0]], images[[1, 2, 2]]) <= NEAR).tolist() == [True, True, False]
    found = near_pairs(signed(images))
    assert (found.representative.tolist(), found.pairs.tolist(), found.links.tolist()) == ([0, 0, 2], [], [[2, 1]])
    assert components(found).tolist() == [0, 0, 0]
    assert near_others(found, np.array([False, False, True])).tolist() == [-1, 2, 2]
    assert near_others(found, np.array([False, True, False])).tolist() == [1, 1, 1]
    assert found.below(2).links.tolist() == []


@pytest.mark.sweep
def test_images_of_one_colour_are_compared_with_the_closest_only(monkeypatch: pytest.MonkeyPatch):
    compared: list[int] = []

    def counting(pairs: NDArray[np.int64], thumbnails: Any, **settings: Any) -> NDArray[np.bool_]:
        compared.append(len(pairs))
        return are_near(pairs, thumbnails, **settings)

    monkeypatch.setattr(groups, "are_near", counting)
    images = np.repeat(np.random.default_rng(0).integers(0, 256, (400, 3)), [1] * 400, axis=0)
    thumbnails = np.repeat(images, [SIDE**2, 256, 256], axis=1).astype(np.uint8)
    found = near_pairs(signed(thumbnails))
    assert found.bounded == 0
    assert sum(compared) < 400 * 399 / 2 / 4
    first, second = np.triu_indices(400, 1)
    pairs = np.stack([first, second], 1)[np.isin(first, found.representative) & np.isin(second, found.representative)]
    all_near = pairs[are_near(pairs, lambda rows: thumbnails[rows])]
    assert found.pairs.tolist() == all_near.tolist()
    compared.clear()
    monkeypatch.setattr(groups, "MAX_PAIRS", 2)
    few = near_pairs(signed(thumbnails))
    assert 0 < few.bounded < 400
    assert sum(compared) < 400 * (2 + 2 * groups.ROUNDS)
    assert {tuple(pair) for pair in few.pairs.tolist()} <= {tuple(pair) for pair in all_near.tolist()}
