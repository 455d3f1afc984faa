"""How hard a batch's negatives are, and which of them a miner keeps; measured over all ranks, without gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdata.train.losses.global_batch import GlobalBatch, Pairs
from mmdata.train.miners import AnyMiner, Miner, Side, for_block
from mmdata.train.ranks import collectives

BINS = 20
"""Bins of each histogram, from -1 to 1 in steps of 0.1; values outside count in the first or the last bin."""
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
    device = image_features.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
        sums = _Sums(batch, batch.scalar("logit_scale", logit_scale))
        for side in ("image", "text"):
            batch.sum_over(side, sums.add, miner=_Watched(miner, sums))
    return sums.read()


@dataclass
class _Sums:
    """Sums over this rank's blocks, in float64: it counts the pairs of any batch exactly."""

    batch: GlobalBatch
    logit_scale: Tensor
    scalars: Tensor = field(init=False)
    histograms: Tensor = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        device = self.batch.image_features.device
        self.scalars = torch.zeros(8, dtype=torch.float64, device=device)
        self.histograms = torch.zeros(2, BINS, dtype=torch.float64, device=device)

    def add(self, scores: Tensor, pairs: Pairs) -> Tensor:
        """Add a block; has the signature of an `AnchorLoss`, and returns losses of 0."""
        _, negatives, weights, _ = pairs
        kept = negatives.double() if weights is None else weights.double().where(negatives, 0.0)  # (b, N)
        below = pairs.of_positives(scores)[:, None] - scores
        logits = (self.logit_scale * scores.double() + kept.log()).where(negatives, -torch.inf)
        some = negatives.any(1)
        shares = logits.softmax(1).where(negatives & some[:, None], 0.0)
        entropy = -torch.xlogy(shares, shares).sum(1)
        near = kept.where(below < NEAR, 0.0).sum()
        zero = near.new_zeros(())
        self.scalars[:5] += torch.stack([kept.sum(), zero, near, entropy.exp().where(some, 0.0).sum(), some.sum()])
        for histogram, values in zip(self.histograms, (scores, below), strict=True):
            bins = ((values + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
            histogram.scatter_add_(0, bins.flatten(), kept.flatten())
        return scores.new_zeros(len(scores))

    def read(self) -> dict[str, float | list[float]]:
        """Sums over all ranks. A collective."""
        world = collectives.all_reduce_sum(torch.cat([self.scalars, self.histograms.flatten()])).tolist()
        kept, admissible, near, perplexity, some, correct, anchors, admissible_near = world[:8]
        rows = int(self.batch.valid.sum())
        different = 2 * rows * (rows - 1)
        seconds = collectives.gather(self.scalars.new_tensor([self.seconds])).max()
        return {
            "rows": rows,
            "in_batch_accuracy": _share(correct, anchors),
            "kept_share": _share(kept, admissible),
            "known_false_negative_share": _share(different - admissible, different),
            "false_negative_share": _share(near, kept),
            "admissible_false_negative_share": _share(admissible_near, admissible),
            "effective_negatives": _share(perplexity, some),
            "hardness": [_share(each, kept) for each in world[8 : 8 + BINS]],
            "below_positive": [_share(each, kept) for each in world[8 + BINS :]],
            "mining_s": float(seconds),
        }


@dataclass(frozen=True)
class _Watched:
    """Times a miner, and counts the negatives that it can choose from."""

    miner: AnyMiner | None
    sums: _Sums

    def block(self, side: Side, rows: slice) -> Miner:
        def watched(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            self.sums.scalars[1] += negatives.sum()
            nearest = scores.where(negatives, -torch.inf).amax(1)
            own = scores.where(positives, torch.inf).amin(1)  # of several positives the farthest
            some = negatives.any(1)
            near = (negatives & (own[:, None] - scores < NEAR)).sum()
            self.sums.scalars[5:] += torch.stack([(some & (own > nearest)).sum(), some.sum(), near])
            if self.miner is None:
                return negatives
            start = _now(scores.device)
            chosen = for_block(self.miner, side, rows)(scores, positives, negatives)
            self.sums.seconds += _now(scores.device) - start
            return chosen

        return watched


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
