"""How hard a batch's negatives are, and which of them a miner keeps; measured over all ranks, without gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.rows import Chosen, as_chosen, row_blocks
from mmdata.train.losses.tiles import one_pass
from mmdata.train.miners import AnyMiner
from mmdata.train.ranks import collectives

BINS = 20
"""Bins of each histogram, from -1 to 1 in steps of 0.1; values outside count in the first or the last bin."""
SCALARS = 8
"""Sums beside the histograms."""
NEAR = 0.05
"""A negative above the positive's cosine, or less than this below it, may be a false one."""


def mining_telemetry(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    miner: AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> dict[str, float | list[float]]:
    """Measure mining on one global batch, both directions together. A collective.

    A miner that draws at random draws again; the state of the generator is restored.

    Args:
        image_features: (B, D), as in `losses.clip_loss`.
        text_features: (B, D).
        logit_scale: scalar multiplier, already exponentiated.
        miner: None keeps all negatives.
        valid: bool (B,), likewise.
        same: int64 (B,) each, likewise.

    Returns:
        Numbers of the global batch:
            rows: valid rows.
            in_batch_accuracy: anchors that are more similar to their positive than to any admissible negative / anchors
                with one. Near 1, the batch is told apart.
            kept_share: weight of the kept negatives / admissible negatives.
            known_false_negative_share: pairs that `same` rules out / pairs of different valid rows.
            false_negative_share: an estimate: of the kept negatives' weight what lies above the positive's cosine, or
                less than `NEAR` below it.
            admissible_false_negative_share: the same of all admissible negatives, whatever the miner keeps.
            effective_negatives: perplexity (exp of the entropy) of the softmax over an anchor's kept negatives; the
                mean of the anchors that have some. From 1, one negative has all the gradient, to their number.
            hardness: histogram of the kept negatives' cosines, as shares that add up to 1.
            below_positive: histogram of the positive's cosine minus theirs, likewise.
            mining_s: seconds in the miner, of the slowest rank.
        Shares are NaN where there is nothing to take a share of.

    Raises:
        ValueError: row counts differ.

    Example:
        Cosines [[0.9, 0.7, 0.1], [0.2, 0.8, 0.6], [0.5, 0.3, 0.7]] with TopK(1): half of the negatives are kept, none
        is above its positive, and the effective number is 1.
    """
    device, seconds = image_features.device, 0.0
    sums = torch.zeros(SCALARS + 2 * BINS, dtype=torch.float64, device=device)  # counts pairs of any batch exactly
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), one_pass(device):
        batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
        scale = batch.scalar("logit_scale", logit_scale)
        for side in ("image", "text"):
            anchors, columns = batch.sides(side)
            for rows in row_blocks(anchors, columns):
                scores = anchors[rows] @ columns.T  # (b, N)
                pairs = batch.pairs.block(rows, slice(0, len(columns)))
                positives, negatives = pairs.positives(scores), pairs.negatives(scores)
                start, chosen = _now(device), negatives
                if miner is not None:
                    chosen = batch.choose(miner, side, rows, scores, positives, negatives)
                    seconds += _now(device) - start
                sums += _sums(scores, negatives, as_chosen(chosen, positives, negatives), scale)
        slowest = float(collectives.gather(sums.new_tensor([seconds])).max())
    return _shares(collectives.all_reduce_sum(sums).tolist(), int(batch.num_valid)) | {"mining_s": slowest}


def _sums(scores: Tensor, negatives: Tensor, chosen: Chosen, scale: Tensor) -> Tensor:
    """What a block of anchors adds to the sums: (SCALARS + 2 · BINS,), float64."""
    kept = chosen.negatives.double()  # (b, N)
    if chosen.weights is not None:
        kept = chosen.weights.double().where(chosen.negatives, 0.0)
    below = chosen.of_positives(scores)[:, None] - scores
    logits = (scale * scores.double() + kept.log()).where(chosen.negatives, -torch.inf)
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
    histograms = kept.new_zeros(2, BINS)
    for histogram, values in zip(histograms, (scores, below), strict=True):
        bins = ((values + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
        histogram.scatter_add_(0, bins.flatten(), kept.flatten())
    return torch.cat([torch.stack(scalars).double(), histograms.flatten()])


def _shares(sums: list[float], rows: int) -> dict[str, float | list[float]]:
    kept, admissible, near, admissible_near, perplexity, some, correct, anchors = sums[:SCALARS]
    different = 2 * rows * (rows - 1)
    return {
        "rows": rows,
        "in_batch_accuracy": _share(correct, anchors),
        "kept_share": _share(kept, admissible),
        "known_false_negative_share": _share(different - admissible, different),
        "false_negative_share": _share(near, kept),
        "admissible_false_negative_share": _share(admissible_near, admissible),
        "effective_negatives": _share(perplexity, some),
        "hardness": [_share(each, kept) for each in sums[SCALARS : SCALARS + BINS]],
        "below_positive": [_share(each, kept) for each in sums[SCALARS + BINS :]],
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
