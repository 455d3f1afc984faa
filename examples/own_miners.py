"""train.miner: {name: user, target: "own_miners:Ratio", arguments: {share: 0.1}}    # with PYTHONPATH=examples

Three miners that are not in the library: see docs/mine.md for what a miner gets and returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdata.train.miners import gumbel_like, top_k_mask


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
        return top_k_mask(scores, negatives, negatives.shape[1], counts)


@dataclass(frozen=True)
class Reweighted:
    """Weighs each anchor's negatives by exp(beta · cosine), 1 on average: InfoNCE in which harder negatives count more.

    Args:
        beta: at least 0, which weighs all the same: the paper's, times logit_scale.

    Source: Robinson et al. 2021, equation 4 (arXiv:2010.04592), without correction for false negatives.
    """

    beta: float

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise ValueError(f"Reweighted's beta is 0 or more: got beta={self.beta}")

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Weigh; see `Miner`."""
        count = negatives.sum(1, keepdim=True)  # (b, 1)
        left_out = ~negatives & (count > 0)  # a softmax over nothing would be NaN
        return count * (self.beta * scores).masked_fill(left_out, -torch.inf).softmax(1)


@dataclass(frozen=True)
class DistanceWeighted:
    """Draws k negatives of each anchor without replacement, evenly over distances rather than over negatives.

    Of points that are spread evenly over the sphere nearly all lie at a distance of √2. A negative's chance is the
    inverse of the density at its distance d: q(d) ∝ d^(D-2) · (1 - d²/4)^((D-3)/2).

    Args:
        dimension: D, at least 3: that of the features, or less where they fill less of their space. The default is the
            paper's. At 512 the chances differ so much that nearly always the nearest beyond `cutoff` are drawn.
        k: negatives drawn a row, at least 1 (the paper draws one for each positive).
        cutoff: distances below count as this one, which bounds the chance of the nearest.
        farthest: negatives at this distance or further are never drawn; rows that have only such keep none.

    Example:
        dimension 4, negatives at d = 0.5 and d = 1: q is 0.242 and 0.866, so the first is drawn 3.6 times as often.

    Source: Wu et al. 2017, section 3 (arXiv:1706.07567).
    """

    dimension: int = 128
    k: int = 1
    cutoff: float = 0.5
    farthest: float = 1.4

    def __post_init__(self) -> None:
        if self.k < 1 or self.dimension < 3 or not 0 < self.cutoff < self.farthest <= 2:
            raise ValueError(
                f"DistanceWeighted needs k >= 1, dimension >= 3 and 0 < cutoff < farthest <= 2: got k={self.k}, "
                f"dimension={self.dimension}, cutoff={self.cutoff}, farthest={self.farthest}"
            )

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Draw; see `Miner`."""
        distances = (2 - 2 * scores.detach()).clamp(min=0).sqrt().clamp(min=self.cutoff)  # (b, N)
        near = negatives & (distances < self.farthest)
        density = (self.dimension - 2) * distances.log()
        density += (self.dimension - 3) / 2 * (1 - distances.square() / 4).log()
        return top_k_mask(gumbel_like(density) - density, near, self.k)
