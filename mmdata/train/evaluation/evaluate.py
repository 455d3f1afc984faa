"""Metrics over features: retrieval, zero-shot classification, compositional pairs.

As in `retrieval`, a tie counts against the model, and so does NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.train.accelerator import where_float64_is
from mmdata.train.evaluation.embedding import Features, embed
from mmdata.train.evaluation.retrieval import TIE, caption_ids, retrieval
from mmdata.train.keys import check_keys


def evaluate_retrieval(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    source: object | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """`score_retrieval` of a model's features of `batches`; arguments as for `embed`. A collective."""
    return score_retrieval(embed(model, batches, source=source, autocast_dtype=autocast_dtype), share=True)


def score_retrieval(features: Features, *, share: bool = False) -> dict[str, float]:
    """`retrieval` among the images and captions of a corpus, as CLIP_benchmark counts them.

    Every caption is a query and a candidate of its own, and rows with equal image hashes hold captions of one image.
    In one point it differs: a caption that two images have is true of both.

    Args:
        features: of the corpus.
        share: as in `retrieval`.

    Returns:
        rows, images, texts: how many there are; and what `retrieval` returns.

    Raises:
        ValueError: no row, or no texts.

    Source: LAION, CLIP_benchmark, clip_benchmark/metrics/zeroshot_retrieval.py.
    """
    rows, device = len(features.rows), features.image.device
    if not rows:
        raise ValueError(
            "retrieval over 0 rows: no row of the batches is valid; see why they were masked in the ledger"
        )
    if features.text is None:
        raise ValueError("retrieval needs captions, and the batches have no texts: set data.tokenizer")
    image_of_row = torch.arange(rows, device=device)
    images = features.image
    if features.ids is not None:
        distinct, image_of_row = features.ids[:, 0].unique(return_inverse=True)
        first = torch.full_like(distinct, rows).scatter_reduce(
            0, image_of_row, torch.arange(rows, device=device), "amin"
        )
        images = features.image[first]
    texts, image_of_text = features.text, image_of_row
    hashes = None if features.ids is None else features.ids[:, 1]
    if features.captions is not None:
        more = features.captions
        alone = torch.ones(rows, dtype=torch.bool, device=device)  # rows with one caption: the one of the batch
        alone[more.image] = False
        texts = torch.cat([texts[alone], more.features])
        image_of_text = torch.cat([image_of_row[alone], image_of_row[more.image]])
        hashes = None if hashes is None else torch.cat([hashes[alone], more.hashes])
    image_ids, text_ids = caption_ids(len(images), image_of_text, hashes)
    scores = retrieval(images, texts, image_ids=image_ids, text_ids=text_ids, share=share)
    return {"rows": rows, "images": len(images), "texts": len(texts), **scores}


def zero_shot(image_features: Tensor, labels: Tensor, prompt_features: Tensor) -> dict[str, float]:
    """Accuracy of naming each image by the nearest class.

    Args:
        image_features: (N, D), L2-normalised.
        labels: int64 (N,); rows with -1 are left out.
        prompt_features: (C, T, D), L2-normalised: each class in T templates, averaged and normalised again.

    Returns:
        zero_shot_top1, zero_shot_top5, zero_shot_chance (of top 1); shares, 0 to 1.

    Raises:
        ValueError: no row has a label, or a label is not among the classes or no integer; no class or no template.

    Source: Radford et al. 2021, section 3.1 (arXiv:2103.00020).
    """
    check_keys("labels", labels)
    if labels.shape != image_features.shape[:1] or prompt_features.ndim != 3 or 0 in prompt_features.shape:
        raise ValueError(
            "zero-shot classification needs a label for each image, and a prompt for each class at least: got images "
            f"{tuple(image_features.shape)}, labels {tuple(labels.shape)}, prompts {tuple(prompt_features.shape)}"
        )
    image_features, labels, prompt_features = map(where_float64_is, (image_features, labels, prompt_features))
    known = labels >= 0
    if not bool(known.any()):
        raise ValueError("no row has a label: zero-shot classification needs some")
    classes = len(prompt_features)
    if int(labels.max()) >= classes:
        raise ValueError(f"label {int(labels.max())} has no class: {classes} classes were given, 0 to {classes - 1}")
    class_features = torch.nn.functional.normalize(prompt_features.mean(dim=1, dtype=torch.float64), dim=-1)
    scores = image_features[known].double() @ class_features.T  # (N, C)
    own = scores.gather(1, labels[known].unsqueeze(1))
    others = torch.arange(classes, device=labels.device) != labels[known].unsqueeze(1)
    before = (~(scores < own - TIE) & others).sum(dim=1)
    return {
        "zero_shot_top1": (before < 1).double().mean().item(),
        "zero_shot_top5": (before < 5).double().mean().item(),
        "zero_shot_chance": 1.0 / classes,
    }


def compositional(
    image_features: Tensor, text_features: Tensor, types: Sequence[str], *, one_image: bool = False
) -> dict[str, dict[str, float]]:
    """How well two images and two captions that differ in one swap are told apart.

    Args:
        image_features: (2P, D), L2-normalised: rows 2i and 2i + 1 are the images of pair i.
        text_features: (2P, D): row j is the caption of image j.
        types: P names, what is swapped in each pair.
        one_image: both rows of a pair have the same image, and the caption of row 2i + 1 is false (SugarCrepe).

    Returns:
        For each type and for "mean" (over types, each counting the same; pairs: their sum):
        accuracy: share of images that prefer their own caption to the other's (chance 0.5; a text-only model gets 0.5);
        text: share of pairs where both images do (chance 0.25); image: where both captions prefer their own image;
        group: both of these (chance 1/6); pairs: how many. With one image only accuracy, the share of images that
        prefer the true caption, and pairs.

    Raises:
        ValueError: no pair, or row counts that do not fit.

    Source: text, image and group scores of Thrush et al. 2022, equations 1 to 3 (arXiv:2204.03162).
    """
    if not len(image_features) == len(text_features) == 2 * len(types):
        raise ValueError(
            f"{len(types)} pairs need {2 * len(types)} images and captions: "
            f"got {len(image_features)} and {len(text_features)}"
        )
    if not types:
        raise ValueError("compositional scores of 0 pairs: give at least one pair of images and captions")
    image_features, text_features = map(where_float64_is, (image_features, text_features))
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
    if one_image:
        values = {"accuracy": images_right[:, 0].double()}
    result: dict[str, dict[str, float]] = {}
    for kind in sorted(set(types)):
        members = torch.tensor([t == kind for t in types], device=scores.device)
        result[kind] = {name: value[members].mean().item() for name, value in values.items()}
        result[kind]["pairs"] = float(members.sum())
    means = {name: sum(r[name] for r in result.values()) / len(result) for name in values}
    return result | {"mean": means | {"pairs": float(len(types))}}
