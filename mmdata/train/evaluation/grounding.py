"""Phrase grounding: to which box of its image a phrase belongs. A tie counts against the model, as in `retrieval`."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdata.train.evaluation.retrieval import TIE


def ground_phrases(regions: Tensor, phrases: Tensor, valid: Tensor, hashes: Tensor) -> Tensor:
    """Of each image: how many phrases found their box, how many would by chance, and how many there are.

    A phrase finds the most similar box of its image. That is right if it is the phrase's own, or one with an equal
    phrase. Phrases that cannot fail, such as that of an only box, are left out.

    Args:
        regions: (B, M, D), L2-normalised.
        phrases: (B, M, D), likewise, of the same boxes.
        valid: bool (B, M), which of them are boxes.
        hashes: int64 (B, M), equal for equal phrases; 0: the box has none, and is a candidate only.

    Returns:
        float32 (B, 3), sums over the phrases of each image: right ones, chances, phrases.
    """
    scores = phrases.float() @ regions.float().transpose(1, 2)  # (B, phrase, box)
    right = (hashes[:, :, None] == hashes[:, None]) & valid[:, None]
    wrong = ~right & valid[:, None]
    asked = valid & (hashes != 0) & wrong.any(2)
    best, other = (scores.masked_fill(~boxes, -2.0).amax(2) for boxes in (right, wrong))
    chance = right.sum(2) / valid.sum(1, keepdim=True).clamp(min=1)
    found = (best > other + TIE).float()  # not where either is NaN
    return (torch.stack([found, chance, torch.ones_like(chance)], dim=2) * asked[..., None]).sum(1)


def grounding_scores(counts: Tensor) -> dict[str, float]:
    """grounding_accuracy and grounding_chance, shares of the phrases; and phrases, their number. Empty without any.

    Args:
        counts: (N, 3), of `ground_phrases`.
    """
    right, chance, phrases = counts.double().sum(0).tolist()
    if not phrases:
        return {}
    return {"grounding_accuracy": right / phrases, "grounding_chance": chance / phrases, "phrases": int(phrases)}
