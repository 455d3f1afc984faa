"""Metrics over features: retrieval, zero-shot classification, compositional pairs.

A tie counts against the model, and so does NaN: a model that says the same of everything scores 0, never 100.
No full similarity matrix is kept: memory is that of the features and of one tile, some queries against some candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor, nn

from mmdata.batch import Batch, to_device
from mmdata.train import distributed

RECALL_AT = (1, 5, 10)
TIE = 1e-6  # cosines nearer than this are equal: rounding in the towers or in a matrix product decides nothing


@dataclass(frozen=True)
class Features:
    """What a model makes of a corpus: one row for each valid row of the batches, in their order.

    Attributes:
        image: float32 (N, D), L2-normalised.
        text: float32 (N, D), likewise.
        rows: int64 (N,), row numbers in the index.
        labels: int64 (N,), -1 where a row has none; None where the corpus has none.
        ids: int64 (N, 2), image and caption hashes; None without `data.hashes`.
    """

    image: Tensor
    text: Tensor
    rows: Tensor
    labels: Tensor | None
    ids: Tensor | None


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def embed(model: nn.Module, batches: Iterable[Batch], *, autocast_dtype: torch.dtype | None = None) -> Features:
    """Features of all valid rows of `batches`; with several ranks, of all ranks' rows, on each of them.

    A million rows of 512 features are 4 GB, images and texts together; twice that while they are put together.

    Args:
        model: as `DualEncoder`, in eval mode; its device is where the batches go and the features stay.
        batches: this rank's, read once, to the end; as many on all ranks.
        autocast_dtype: of the towers; None: as they are.

    Raises:
        ValueError: no batch.
    """
    device = next(model.parameters()).device
    columns: dict[str, list[Tensor]] = {"image": [], "text": [], "rows": [], "labels": [], "ids": []}
    for on_cpu in batches:
        batch = to_device(on_cpu, device)
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            image, text = model(batch)[:2]
        values = {"image": image.float(), "text": text.float(), "rows": batch["rows"]}
        if "labels" in batch:
            values["labels"] = batch["labels"]
        if "image_hash" in batch and "caption_hash" in batch:
            values["ids"] = torch.stack([batch["image_hash"], batch["caption_hash"]], dim=1)
        valid = distributed.gather(batch["valid"].long()).bool()  # (W*B,)
        for name, value in values.items():
            columns[name].append(distributed.gather(value)[valid])
    if not columns["rows"]:
        raise ValueError("no batches to evaluate on: the corpus is empty")
    return Features(
        image=torch.cat(columns["image"]),
        text=torch.cat(columns["text"]),
        rows=torch.cat(columns["rows"]),
        labels=torch.cat(columns["labels"]) if columns["labels"] else None,
        ids=torch.cat(columns["ids"]) if columns["ids"] else None,
    )


def evaluate_retrieval(
    model: nn.Module, batches: Iterable[Batch], *, autocast_dtype: torch.dtype | None = None
) -> dict[str, float]:
    """`retrieval` over `batches`, and how many rows that were; arguments as for `embed`.

    Where the batches have hashes, equal images and equal captions belong together.
    """
    features = embed(model, batches, autocast_dtype=autocast_dtype)
    scores = retrieval(features.image, features.text, image_ids=features.ids, text_ids=features.ids, share=True)
    return {"rows": len(features.rows), **scores}


def retrieval(
    image_features: Tensor,
    text_features: Tensor,
    *,
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
        image_ids: (N,) or (N, G); None: row i pairs with text row i.
        text_ids: (M,) or (M, G). Image i and text j belong together where any of the G ids agree, so an image may
            have several captions, and equal images or equal captions are no mistakes.
        share: all ranks have the same features, and each compares its part of the queries. A collective.
        block_rows: queries compared at a time.
        block_candidates: with as many candidates; scores are made twice, not kept: 256 MB of them at a time.

    Returns:
        image_to_text_r1, …_r5, …_r10, text_to_image_…; chance_r1, …: the expectation of a random order (the larger
        of the two directions). Shares, 0 to 1.

    Raises:
        ValueError: row counts differ and no ids say what belongs together; ids of one side only; a row without match.

    Example:
        3 images, 3 texts, the right text of images 0 and 1 comes first, that of image 2 second:
        image_to_text_r1 = 2/3, image_to_text_r5 = 1, chance_r1 = 1/3.
    """
    if (image_ids is None) != (text_ids is None):
        raise ValueError("image_ids and text_ids belong together: got one of them")
    if image_ids is None or text_ids is None:
        if len(image_features) != len(text_features):
            raise ValueError(
                f"{len(image_features)} images and {len(text_features)} texts: say with image_ids and text_ids "
                "which belong together"
            )
        image_ids = text_ids = torch.arange(len(image_features), device=image_features.device)
    image_ids, text_ids = _two_dimensional(image_ids), _two_dimensional(text_ids)
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


def zero_shot(image_features: Tensor, labels: Tensor, prompt_features: Tensor) -> dict[str, float]:
    """Accuracy of naming each image by the nearest class.

    Args:
        image_features: (N, D), L2-normalised.
        labels: int64 (N,); rows with -1 are left out.
        prompt_features: (C, T, D), L2-normalised: each class in T templates, averaged and normalised again.

    Returns:
        zero_shot_top1, zero_shot_top5, zero_shot_chance (of top 1); shares, 0 to 1.

    Raises:
        ValueError: no row has a label, or a label is not among the classes.

    Source: Radford et al. 2021, section 3.1 (arXiv:2103.00020).
    """
    known = labels >= 0
    if not bool(known.any()):
        raise ValueError("no row has a label: zero-shot classification needs some")
    classes = len(prompt_features)
    if int(labels.max()) >= classes:
        raise ValueError(f"label {int(labels.max())} has no class: {classes} classes were given, 0 to {classes - 1}")
    class_features = torch.nn.functional.normalize(prompt_features.double().mean(dim=1), dim=-1)
    scores = image_features[known].double() @ class_features.T  # (N, C)
    own = scores.gather(1, labels[known].unsqueeze(1))
    others = torch.arange(classes, device=labels.device) != labels[known].unsqueeze(1)
    before = (~(scores < own - TIE) & others).sum(dim=1)
    return {
        "zero_shot_top1": (before < 1).double().mean().item(),
        "zero_shot_top5": (before < 5).double().mean().item(),
        "zero_shot_chance": 1.0 / classes,
    }


def compositional(image_features: Tensor, text_features: Tensor, types: Sequence[str]) -> dict[str, dict[str, float]]:
    """How well two images and two captions that differ in one swap are told apart.

    Args:
        image_features: (2P, D), L2-normalised: rows 2i and 2i + 1 are the images of pair i.
        text_features: (2P, D): row j is the caption of image j.
        types: P names, what is swapped in each pair.

    Returns:
        For each type and for "mean" (over types, each counting the same; pairs: their sum):
        accuracy: share of images that prefer their own caption to the other's (chance 0.5; a text-only model gets 0.5);
        text: share of pairs where both images do (chance 0.25); image: where both captions prefer their own image;
        group: both of these (chance 1/6); pairs: how many.

    Raises:
        ValueError: row counts that do not fit.

    Source: text, image and group scores of Thrush et al. 2022, equations 1 to 3 (arXiv:2204.03162).
    """
    if not len(image_features) == len(text_features) == 2 * len(types):
        raise ValueError(
            f"{len(types)} pairs need {2 * len(types)} images and captions: "
            f"got {len(image_features)} and {len(text_features)}"
        )
    images = image_features.double().reshape(len(types), 2, -1)
    texts = text_features.double().reshape(len(types), 2, -1)
    scores = images @ texts.transpose(1, 2)  # (P, image, caption)
    own = scores.diagonal(dim1=1, dim2=2)  # (P, 2)
    images_right = own > scores.flip(2).diagonal(dim1=1, dim2=2) + TIE  # image j: own caption over the other
    captions_right = own > scores.flip(1).diagonal(dim1=1, dim2=2) + TIE  # caption j: own image over the other
    text, image = images_right.all(dim=1), captions_right.all(dim=1)
    values = {
        "accuracy": images_right.double().mean(dim=1),
        "text": text.double(),
        "image": image.double(),
        "group": (text & image).double(),
    }
    result: dict[str, dict[str, float]] = {}
    for kind in sorted(set(types)):
        members = torch.tensor([t == kind for t in types], device=scores.device)
        result[kind] = {name: value[members].mean().item() for name, value in values.items()}
        result[kind]["pairs"] = float(members.sum())
    if result:
        means = {name: sum(r[name] for r in result.values()) / len(result) for name in values}
        result["mean"] = means | {"pairs": float(len(types))}
    return result


def _own_rows(rows: int) -> slice:
    """The rows out of so many that this rank compares."""
    rank, world_size = distributed.rank(), distributed.world_size()
    return slice(rows * rank // world_size, rows * (rank + 1) // world_size)


def _from_all_ranks(found: tuple[Tensor, Tensor], own: slice, rows: int) -> tuple[Tensor, Tensor]:
    """The numbers of all rows, from those of each rank's own."""
    everyones = found[0].new_zeros(2, rows)
    everyones[:, own] = torch.stack(found)
    wrong_before, matches = distributed.all_reduce_sum(everyones).cpu()
    return wrong_before, matches


def _wrong_before(
    queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor, tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """For each query: wrong candidates not below its best true match, and how many true matches it has; int64 (N,).

    Both are where the features are.
    """
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
