"""Retrieval among features: the share of queries that find a match among the first 1, 5, 10 candidates.

A tie counts against the model, and so does NaN: a model that gives everything the same features scores 0.
No full similarity matrix is kept: memory is that of the features and of one tile, some queries against some candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

import torch
from torch import Tensor

from mmdata.train.keys import check_keys
from mmdata.train.precision import full_float32
from mmdata.train.ranks import collectives

RECALL_AT = (1, 5, 10)
TIE = 1e-6
"""Cosines nearer than this count as equal, so that rounding in a tower or a matrix product decides nothing."""


def retrieval(
    image_features: Tensor,
    text_features: Tensor,
    *,
    image_of_text: Tensor | None = None,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    share: bool = False,
    block_rows: int = 1024,
    block_candidates: int = 65_536,
) -> dict[str, float]:
    """Share of queries whose best true match is among the first 1, 5, 10, both ways.

    Args:
        image_features: (N, D), L2-normalised.
        text_features: (M, D), L2-normalised.
        image_of_text: int64 (M,), the image row of each text: an image may have several captions. Every text is a
            query for its image; an image finds any of its texts. Default: text row i is of image row i.
        image_ids: in place of `image_of_text`, integers (N,) or (N, G).
        text_ids: integers (M,) or (M, G). Image i and text j belong together where any of the G ids agree, so that
            equal images or equal captions are no mistakes.
        share: every rank has all features, and compares its part of the queries. A collective.
        block_rows: queries compared at a time.
        block_candidates: with as many candidates; scores are made twice, not kept: 256 MB of them at a time.

    Returns:
        image_to_text_r1, …_r5, …_r10, text_to_image_…; chance_r1, …: the expectation of a random order (the larger
        of the two directions). Shares, 0 to 1.

    Raises:
        ValueError: no image or no text; row counts differ and nothing says what belongs together, or two things do;
            ids of one side only, of other shapes, or no integers; a row without match.

    Example:
        3 images, 3 texts, the right text of images 0 and 1 comes first, that of image 2 second:
        image_to_text_r1 = 2/3, image_to_text_r5 = 1, chance_r1 = 1/3.
    """
    if min(block_rows, block_candidates) < 1:
        raise ValueError(f"block_rows and block_candidates must be 1 or more: got {block_rows} and {block_candidates}")
    sizes = (len(image_features), len(text_features))
    if 0 in sizes:
        raise ValueError(f"retrieval needs an image and a text at least: got {sizes[0]} images and {sizes[1]} texts")
    image_ids, text_ids = _checked_ids(sizes, image_of_text, image_ids, text_ids)
    result: dict[str, float] = {}
    chance = dict.fromkeys(RECALL_AT, 0.0)
    for name, queries, candidates, query_ids, candidate_ids in (
        ("image_to_text", image_features, text_features, image_ids, text_ids),
        ("text_to_image", text_features, image_features, text_ids, image_ids),
    ):
        own = _own_rows(len(queries)) if share else slice(None)
        found = _wrong_before(queries[own], candidates, query_ids[own], candidate_ids, (block_rows, block_candidates))
        wrong_before, matches = _from_all_ranks(found, own, len(queries)) if share else found
        if bool((matches == 0).any()):
            raise ValueError(f"row {int((matches == 0).nonzero()[0])} has no match: its ids occur on its side only")
        for k in RECALL_AT:
            result[f"{name}_r{k}"] = (wrong_before < k).double().mean().item()
            chance[k] = max(chance[k], _chance(matches, len(candidates), k))
    return result | {f"chance_r{k}": value for k, value in chance.items()}


def caption_ids(num_images: int, image_of_text: Tensor, hashes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids (N, G) and (M, G) that agree where a text, or one that is equal to it, is a caption of the image.

    The first is the image's number. The others, the largest number that an image needs, are those of its captions that
    other images have too: most corpora have few.
    """
    device = image_of_text.device
    image_ids = torch.arange(num_images, device=device).unsqueeze(1)
    if hashes is None:
        return image_ids, image_of_text.unsqueeze(1)
    _, caption = hashes.unique(return_inverse=True)  # (M,)
    held = torch.stack([image_of_text, caption], dim=1).unique(dim=0)  # by image, each of its captions once
    shared = held[:, 1].bincount() > 1
    held = held[shared[held[:, 1]]]
    counts = held[:, 0].bincount(minlength=num_images)
    slots = torch.arange(len(held), device=device) - (counts.cumsum(0) - counts)[held[:, 0]]
    more = torch.full((num_images, int(counts.max())), -1, device=device)  # -1 and -2 agree with nothing
    more[held[:, 0], slots] = held[:, 1]
    of_text = caption.where(shared[caption], -2).unsqueeze(1).expand(-1, more.shape[1])
    return torch.cat([image_ids, more], dim=1), torch.cat([image_of_text.unsqueeze(1), of_text], dim=1)


def _checked_ids(
    sizes: tuple[int, int], image_of_text: Tensor | None, image_ids: Tensor | None, text_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ids of N images and M texts, (N, G) and (M, G); see `retrieval`."""
    images, texts = sizes
    if (image_ids is None) != (text_ids is None):
        raise ValueError("image_ids and text_ids belong together: got one of them")
    if image_of_text is not None and image_ids is not None:
        raise ValueError("image_of_text and image_ids both say what belongs together: give one of them")
    if image_ids is None or text_ids is None:
        if image_of_text is None and images != texts:
            raise ValueError(
                f"{images} images and {texts} texts: say with image_of_text, or with image_ids and text_ids, which "
                "belong together"
            )
        image_ids = torch.arange(images)
        text_ids = image_ids if image_of_text is None else image_of_text
    for name, ids, count in (("image_ids", image_ids, images), ("text_ids", text_ids, texts)):
        name = "image_of_text" if name == "text_ids" and image_of_text is not None else name
        check_keys(name, ids)
        if len(ids) != count or ids.ndim > 2:
            raise ValueError(f"{name} has shape {tuple(ids.shape)}, expected one entry for each of {count} rows")
    if image_of_text is not None and not 0 <= int(image_of_text.min()) <= int(image_of_text.max()) < images:
        raise ValueError(
            f"image_of_text has {int(image_of_text.min())} to {int(image_of_text.max())}, and the images are 0 to "
            f"{images - 1}"
        )
    image_ids, text_ids = _two_dimensional(image_ids), _two_dimensional(text_ids)
    if image_ids.shape[1] != text_ids.shape[1]:
        raise ValueError(
            f"image_ids {tuple(image_ids.shape)} and text_ids {tuple(text_ids.shape)}: as many ids for an image as for "
            "a text"
        )
    return image_ids, text_ids


def _own_rows(rows: int) -> slice:
    """The part of `rows` queries that this rank compares."""
    rank, world_size = collectives.rank(), collectives.world_size()
    return slice(rows * rank // world_size, rows * (rank + 1) // world_size)


def _from_all_ranks(found: tuple[Tensor, Tensor], own: slice, rows: int) -> tuple[Tensor, Tensor]:
    """The counts of all rows, from each rank's counts of its own."""
    everyones = found[0].new_zeros(2, rows)
    everyones[:, own] = torch.stack(found)
    wrong_before, matches = collectives.all_reduce_sum(everyones).cpu()
    return wrong_before, matches


def _wrong_before(
    queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor, tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """For each query: wrong candidates not below its best true match, and how many true matches it has; int64 (N,).

    Both are where the features are.
    """
    with full_float32(queries.device):
        return _compare(queries, candidates, query_ids, candidate_ids, tile)


def _compare(
    queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor, tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    query_ids, candidate_ids = query_ids.to(queries.device), candidate_ids.to(queries.device)

    def tiles(block: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Scores (b, c) of some queries and some candidates, and which of them belong together (b, c)."""
        for start in range(0, len(candidates), tile[1]):
            some = slice(start, start + tile[1])
            scores = queries[block].float() @ candidates[some].float().T
            yield scores, _matches(query_ids[block], candidate_ids[some])

    wrong_before = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    matches = torch.zeros_like(wrong_before)
    for start in range(0, len(queries), tile[0]):
        block = slice(start, start + tile[0])
        best = queries.new_full((len(queries[block]), 1), -torch.inf, dtype=torch.float32)
        for scores, true in tiles(block):
            best = torch.maximum(best, scores.masked_fill(~true, -torch.inf).amax(dim=1, keepdim=True))
            matches[block] += true.sum(dim=1)
        for scores, true in tiles(block):
            wrong_before[block] += (~(scores < best - TIE) & ~true).sum(dim=1)
    return wrong_before, matches


def _matches(query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """bool (b, M): any of the G ids agree."""
    result = torch.zeros(len(query_ids), len(candidate_ids), dtype=torch.bool, device=candidate_ids.device)
    for ours, theirs in zip(query_ids.T, candidate_ids.T, strict=True):
        result |= ours.unsqueeze(1) == theirs.unsqueeze(0)
    return result


def _chance(matches: Tensor, candidates: int, k: int) -> float:
    """Probability that a random order has one of `matches` true candidates among its first k, mean over queries."""
    values, counts = torch.unique(matches, return_counts=True)
    every = comb(candidates, min(k, candidates))
    missed = [comb(candidates - int(m), min(k, candidates)) / every for m in values]
    return 1.0 - sum(share * int(n) for share, n in zip(missed, counts, strict=True)) / len(matches)


def _two_dimensional(ids: Tensor) -> Tensor:
    return ids.unsqueeze(1) if ids.ndim == 1 else ids
