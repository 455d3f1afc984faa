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
from mmdata.train.precision import numerics
from mmdata.train.ranks import collectives

RECALL_AT = (1, 5, 10)
TIE = 1e-6
"""Cosines nearer than this count as equal, so that rounding in a tower or a matrix product decides nothing."""


def retrieval(
    image_features: Tensor,
    text_features: Tensor,
    *,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    share: bool = False,
    tile: tuple[int, int] = (1024, 65_536),
) -> dict[str, float]:
    """Share of queries whose best true match is among the first 1, 5, 10, both ways.

    Args:
        image_features: (N, D), L2-normalised.
        text_features: (M, D), L2-normalised.
        image_ids: integers (N,) or (N, G). Default: text row i is of image row i.
        text_ids: integers (M,) or (M, G). Image i and text j belong together where any of the G ids agree, so that
            equal images or equal captions are no mistakes. An image may have several captions: every text is a query
            for its image, and an image finds any of its texts.
        share: every rank has all features, and compares its part of the queries. A collective.
        tile: queries compared at a time, with as many candidates; scores are made twice, not kept: 256 MB at a time.

    Returns:
        image_to_text_r1, …_r5, …_r10, text_to_image_…; chance_r1, …: the expectation of a random order (the larger
        of the two directions). Shares, 0 to 1.

    Raises:
        ValueError: no image or no text; row counts differ and nothing says what belongs together; ids of one side only,
            of other shapes, or no integers; a row without match.

    Example:
        3 images, 3 texts, the right text of images 0 and 1 comes first, that of image 2 second:
        image_to_text_r1 = 2/3, image_to_text_r5 = 1, chance_r1 = 1/3.
    """
    sizes = (len(image_features), len(text_features))
    if 0 in sizes:
        raise ValueError(f"retrieval needs an image and a text at least: got {sizes[0]} images and {sizes[1]} texts")
    if (image_ids is None) != (text_ids is None):
        raise ValueError("image_ids and text_ids belong together: got one of them")
    if image_ids is None or text_ids is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{sizes[0]} images and {sizes[1]} texts: say with image_ids and text_ids which belong together"
            )
        image_ids = text_ids = torch.arange(sizes[0])
    device = image_features.device
    image_ids, text_ids = (
        _checked(name, ids, count).to(device)
        for name, ids, count in (("image_ids", image_ids, sizes[0]), ("text_ids", text_ids, sizes[1]))
    )
    if image_ids.shape[1] != text_ids.shape[1]:
        raise ValueError(
            f"image_ids {tuple(image_ids.shape)} and text_ids {tuple(text_ids.shape)}: as many ids for an image as for "
            "a text"
        )
    result: dict[str, float] = {}
    chance = dict.fromkeys(RECALL_AT, 0.0)
    images, texts = (image_features, image_ids), (text_features, text_ids)
    for name, queries, candidates in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        with numerics("fp32", device):  # TF32 has ten bits, and would make ties of near scores
            wrong_before, matches = _compare(queries, candidates, tile, share=share).cpu()
        if bool((matches == 0).any()):
            raise ValueError(f"row {int((matches == 0).nonzero()[0])} has no match: its ids occur on its side only")
        for k in RECALL_AT:
            result[f"{name}_r{k}"] = (wrong_before < k).double().mean().item()
            chance[k] = max(chance[k], _chance(matches, len(candidates[0]), k))
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


def _checked(name: str, ids: Tensor, count: int) -> Tensor:
    """Ids of `count` rows, (count, G)."""
    check_keys(name, ids)
    if len(ids) != count or ids.ndim > 2:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}, expected one entry for each of {count} rows")
    return ids.unsqueeze(1) if ids.ndim == 1 else ids


def _compare(
    queries: tuple[Tensor, Tensor], candidates: tuple[Tensor, Tensor], tile: tuple[int, int], *, share: bool
) -> Tensor:
    """For each query: wrong candidates not below its best true match, and how many true matches it has; int64 (2, N).

    Args:
        queries: features and ids.
        candidates: likewise.
        tile: how many of both at a time.
        share: compare a part of the queries, and get the others' from the other ranks.
    """
    features, ids = queries
    rank, ranks = (collectives.rank(), collectives.world_size()) if share else (0, 1)
    stop = len(features) * (rank + 1) // ranks
    found = torch.zeros(2, len(features), dtype=torch.long, device=features.device)
    for start in range(len(features) * rank // ranks, stop, tile[0]):
        block = slice(start, min(start + tile[0], stop))

        def tiles(block: slice = block) -> Iterator[tuple[Tensor, Tensor]]:
            """Scores (b, c) of some queries and some candidates, and which of them belong together (b, c)."""
            for some, some_ids in zip(*(values.split(tile[1]) for values in candidates), strict=True):
                yield features[block].float() @ some.float().T, _matches(ids[block], some_ids)

        best = features.new_full((block.stop - block.start, 1), -torch.inf, dtype=torch.float32)
        for scores, true in tiles():
            best = torch.maximum(best, scores.masked_fill(~true, -torch.inf).amax(dim=1, keepdim=True))
            found[1, block] += true.sum(dim=1)
        for scores, true in tiles():
            found[0, block] += (~(scores < best - TIE) & ~true).sum(dim=1)
    return collectives.all_reduce_sum(found) if share else found


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
