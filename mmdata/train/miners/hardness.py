"""Miners that choose by rank or by distance from the positive; nothing here is random."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmdata.train.miners.protocol import check_at_least_one, positive_scores, top_counts_mask, top_k_mask


@dataclass(frozen=True)
class All:
    """Keeps every negative: the baseline for other miners."""

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep `negatives`; see `Miner`."""
        return negatives


@dataclass(frozen=True)
class TopK:
    """Keeps each anchor's k most similar negatives; TopK(1) keeps the hardest.

    Args:
        k: negatives kept a row, at least 1. With as many negatives as that, or fewer, it changes nothing: a k above
            the batch is no error, since a batch's size may vary.

    Example:
        Scores [0.9, 0.8, 0.1, 0.5] where the first is the positive: TopK(2) keeps 0.8 and 0.5.

    Source: k = 1: Faghri et al. 2018 (arXiv:1707.05612); Hermans et al. 2017, "batch hard" (arXiv:1703.07737).
    """

    k: int

    def __post_init__(self) -> None:
        check_at_least_one(self, self.k)

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep the k highest scores of each row; see `Miner`."""
        return top_k_mask(scores, negatives, self.k)


@dataclass(frozen=True)
class Ratio:
    """Keeps the hardest share of each anchor's negatives.

    Args:
        share: above 0, up to 1. The number is rounded to the nearest, and is at least 1.

    Example:
        Ratio(0.25) keeps 16 of 63 negatives, and 1 of 2.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"Ratio keeps a share above 0, up to 1: got share={self.share}")

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep the highest scores of each row; see `Miner`."""
        counts = (self.share * negatives.sum(1).double()).round().long().clamp(min=1)
        return top_counts_mask(scores, negatives, counts, max(1, round(self.share * negatives.shape[1])))


@dataclass(frozen=True)
class SemiHard:
    """Keeps negatives that are less similar than the positive, by no more than a margin.

    An anchor with none keeps none, and loses 0: it is solved (all are further below), or its positive lies below all of
    them. In the first updates many are of the second kind, so begin without it (`train.mining_after_steps`).

    Args:
        margin: largest difference of cosines, above 0. With several positives, from their mean.

    Example:
        Positive 0.7, negatives 0.8, 0.7, 0.6, 0.3: SemiHard(0.2) keeps 0.6.

    Source: Schroff et al. 2015, FaceNet, equation 4 (arXiv:1503.03832).
    """

    margin: float = 0.2

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise ValueError(f"SemiHard's margin is a difference of cosines above 0: got margin={self.margin}")

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep the window below the positive; see `Miner`."""
        below = positive_scores(scores, positives) - scores.detach()  # (b, N)
        return negatives & (below > 0) & (below <= self.margin)


@dataclass(frozen=True)
class DropHardest:
    """Leaves out each anchor's most similar negatives, the ones most likely to be false: a first part of a `Chain`.

    Args:
        amount: from 1 on so many of them, below 1 that share of them (to the nearest number; of few, none).

    Example:
        Negatives 0.9, 0.6, 0.4, 0.2: DropHardest(1) keeps 0.6, 0.4, 0.2; DropHardest(0.5) keeps 0.4, 0.2.
    """

    amount: float

    def __post_init__(self) -> None:
        if not 0 < self.amount < 1 and (self.amount < 1 or self.amount % 1):
            raise ValueError(f"DropHardest leaves out a whole number, or a share below 1: got amount={self.amount}")

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep all but the highest scores of each row; see `Miner`."""
        if self.amount >= 1:
            return negatives & ~top_k_mask(scores, negatives, int(self.amount))
        counts = (self.amount * negatives.sum(1).double()).round().long()
        return negatives & ~top_counts_mask(scores, negatives, counts, max(1, round(self.amount * negatives.shape[1])))
