"""How hard a batch's negatives are, and which of them a miner keeps; measured over all ranks, without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdata.train.accelerator import widest
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.rows import ChosenPairs
from mmdata.train.losses.tiles import blocks, one_pass
from mmdata.train.miners import AnyMiner
from mmdata.train.ranks import collectives

BLOCK_ELEMENTS = 1 << 22
"""Similarities of a block of anchors; a measurement comes unrehearsed, and takes a few times as many float64."""
NEAR = 0.05
"""A negative above the positive's cosine, or less than this below it, may be a false one."""


def mining_telemetry(batch: GlobalBatch, logit_scale: Tensor, miner: AnyMiner | None = None) -> dict[str, float]:
    """Measure mining on one global batch, both directions together. A collective.

    A miner that draws at random draws again; the state of the generator is restored.

    Returns:
        Numbers of the global batch:
            rows: valid rows.
            in_batch_accuracy: anchors that are more similar to their positive than to any admissible negative / anchors
                with one. Near 1, the batch is told apart.
            kept_share: weight of the kept negatives / admissible negatives.
            known_false_negative_share: pairs that keys rule out / pairs of different valid rows.
            false_negative_share: an estimate: of the kept negatives' weight what lies above the positive's cosine, or
                less than `NEAR` below it.
            admissible_false_negative_share: the same of all admissible negatives, whatever the miner keeps.
            effective_negatives: perplexity (exp of the entropy) of the softmax over an anchor's kept negatives; the
                mean of the anchors that have some. From 1, one negative has all the gradient, to their number.
        Shares are NaN where there is nothing to take a share of.

    Example:
        Cosines [[0.9, 0.7, 0.1], [0.2, 0.8, 0.6], [0.5, 0.3, 0.7]] with TopK(1): half of the negatives are kept, none
        is above its positive, and the effective number is 1.
    """
    device = batch.images.device
    sums = torch.zeros(8, dtype=widest(device), device=device)  # counts pairs of any batch exactly
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), one_pass(device):
        for side in ("image", "text"):
            anchors, columns = batch.sides(side)
            for rows in blocks(anchors, columns, whole_rows=True, elements=BLOCK_ELEMENTS)[0]:
                scores = anchors[rows] @ columns.T  # (b, N)
                sums += _sums(scores, *batch.choose(side, rows, scores, miner), logit_scale)
    sums = collectives.all_reduce_sum(sums)
    kept, admissible, near, admissible_near, perplexity, some, correct, all_anchors = sums.tolist()
    num_rows = int(batch.num_valid)
    different = 2 * num_rows * (num_rows - 1)
    return {
        "rows": num_rows,
        "in_batch_accuracy": _share(correct, all_anchors),
        "kept_share": _share(kept, admissible),
        "known_false_negative_share": _share(different - admissible, different),
        "false_negative_share": _share(near, kept),
        "admissible_false_negative_share": _share(admissible_near, admissible),
        "effective_negatives": _share(perplexity, some),
    }


def _sums(scores: Tensor, negatives: Tensor, chosen: ChosenPairs, scale: Tensor) -> Tensor:
    """What a block of anchors adds to the sums: (8,), float64 where the device has it."""
    precise = widest(scores.device)
    kept = chosen.negatives.to(precise)  # (b, N)
    if chosen.weights is not None:
        kept = chosen.weights.to(precise).where(chosen.negatives, 0.0)
    below = chosen.of_positives(scores)[:, None] - scores
    logits = (scale * scores.to(precise) + kept.log()).where(chosen.negatives, -torch.inf)
    some = chosen.negatives.any(1)
    shares = logits.softmax(1).where(chosen.negatives & some[:, None], 0.0)
    entropy = -torch.xlogy(shares, shares).sum(1)
    nearest = scores.where(negatives, -torch.inf).amax(1)
    own = scores.where(chosen.positives, torch.inf).amin(1)  # of several positives the farthest
    scalars = [
        kept.sum(),
        negatives.sum(),
        kept.where(below < NEAR, 0.0).sum(),
        (negatives & (own[:, None] - scores < NEAR)).sum(),
        entropy.exp().where(some, 0.0).sum(),
        some.sum(),
        (negatives.any(1) & (own > nearest)).sum(),
        negatives.any(1).sum(),
    ]
    return torch.stack([each.to(precise) for each in scalars])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
