"""Miners that draw negatives at random.

They draw from the default generator of the scores' device, whose state is in checkpoints: a resumed run draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmdata.train.miners.protocol import check_at_least_one, top_k_mask

SOFTNESS = 0.5
"""Temperature of the relaxed weights, in units of the perturbed scores: lower is nearer to 0 and 1, and steeper."""
BISECTIONS = 20
"""Halvings of the interval for the shift c, before two Newton steps; each gives one binary digit."""


@dataclass(frozen=True)
class GumbelTopK:
    """Draws k negatives of each anchor without replacement, each draw with probability softmax(score / temperature).

    The k highest of score / temperature + Gumbel noise are such a draw. Three ways to treat what was drawn:
    "none" keeps the k and has no gradient of its own; "relaxed" weighs each negative by
    sigmoid((perturbed + c) / SOFTNESS), with c such that the weights of a row add up to k; "straight_through" keeps the
    k with weight 1, so that the loss is that of "none", and takes the gradient of the relaxed weights, those of
    negatives that were not drawn included (how steep that may be: `Miner`).

    Args:
        k: negatives drawn a row, at least 1; rows with no more than k keep them all.
        temperature: in units of cosine: near 0 the hardest k, large any k alike. 1 / logit_scale draws as the softmax
            of the loss weighs.
        gradient: "none", "straight_through" or "relaxed".

    Example:
        k = 2 of scores 0.2, 0.1, 0.0 at temperature 0.1: the odds of a first draw are e² : e : 1, and the two first
        are the ones chosen with probability 0.665·0.731 + 0.245·0.881 = 0.702.

    Source: Kool et al. 2019 (arXiv:1903.06059) for the draw; Amos et al. 2019 (arXiv:1906.08707), equation 4, for the
    weights; Bengio et al. 2013 (arXiv:1308.3432) and Jang et al. 2017 (arXiv:1611.01144) for straight-through.
    """

    k: int
    temperature: float = 0.05
    gradient: Literal["none", "straight_through", "relaxed"] = "none"

    def __post_init__(self) -> None:
        check_at_least_one(self, self.k)
        if not self.temperature > 0:
            raise ValueError(f"GumbelTopK's temperature is above 0: got temperature={self.temperature}")
        if self.gradient not in ("none", "straight_through", "relaxed"):
            raise ValueError(
                f"GumbelTopK's gradient is 'none', 'straight_through' or 'relaxed': got gradient={self.gradient!r}"
            )

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Draw, and weigh; see `Miner`."""
        perturbed = scores / self.temperature + gumbel_like(scores)  # (b, N)
        if self.gradient == "none":
            return top_k_mask(perturbed, negatives, self.k)
        weights = relaxed_top_k(perturbed / SOFTNESS, negatives, self.k)
        if self.gradient == "relaxed":
            return weights
        return top_k_mask(perturbed, negatives, self.k).to(weights.dtype) + (weights - weights.detach())


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
        check_at_least_one(self, self.k)
        if self.dimension < 3 or not 0 < self.cutoff < self.farthest <= 2:
            raise ValueError(
                "DistanceWeighted needs dimension >= 3 and 0 < cutoff < farthest <= 2: "
                f"got dimension={self.dimension}, cutoff={self.cutoff}, farthest={self.farthest}"
            )

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Draw; see `Miner`."""
        distances = (2 - 2 * scores.detach()).clamp(min=0).sqrt().clamp(min=self.cutoff)  # (b, N)
        near = negatives & (distances < self.farthest)
        density = (self.dimension - 2) * distances.log()
        density += (self.dimension - 3) / 2 * (1 - distances.square() / 4).log()
        return top_k_mask(gumbel_like(density) - density, near, self.k)


def gumbel_like(values: Tensor) -> Tensor:
    """Independent draws from the Gumbel distribution, of the shape and type of `values`: -log of exponential draws."""
    smallest = torch.finfo(values.dtype).tiny
    return torch.empty_like(values).exponential_().clamp_(min=smallest).log_().neg_()


def relaxed_top_k(values: Tensor, among: Tensor, k: int) -> Tensor:
    """Weights sigmoid(value + c) of the entries of `among`, each row's c such that its weights add up to k.

    Args:
        values: (b, N), with gradient.
        among: bool (b, N); other entries weigh 0.
        k: at least 1; entries of rows with no more than k of them weigh 1.

    Returns:
        (b, N), 0 to 1, with the exact gradient, c's part included.

    Example:
        Values [[3., 3., 3., -20.]] with k = 2: c = -2.31, weights [[2/3, 2/3, 2/3, 0.]] to nine digits.

    Source: Amos et al. 2019 (arXiv:1906.08707).
    """
    count = among.sum(1, keepdim=True)  # (b, 1)
    some = count > k
    with torch.no_grad():
        # At the lower end of this interval every weight is at most k / count, at the upper end at least: c is between.
        middle = (k / count.clamp(min=k + 1).to(values.dtype)).logit()
        low = (middle - values.masked_fill(~among, -torch.inf).amax(1, keepdim=True)).where(some, 0.0)
        high = (middle - values.masked_fill(~among, torch.inf).amin(1, keepdim=True)).where(some, 0.0)
        shift = (low + high) / 2
        for _ in range(BISECTIONS):
            too_much = _sigmoids(values, among, shift).sum(1, keepdim=True) > k
            low, high = low.where(too_much, shift), high.where(~too_much, shift)
            shift = (low + high) / 2
        for _ in range(2):
            shift = _newton(values, among, shift, k)
    # A further Newton step changes no value, but its gradient is that of c as a function of the values.
    weights = _sigmoids(values, among, _newton(values, among, shift, k))
    return weights.where(some, 1.0).where(among, 0.0)


def _sigmoids(values: Tensor, among: Tensor, shift: Tensor) -> Tensor:
    return (values + shift).sigmoid().where(among, 0.0)


def _newton(values: Tensor, among: Tensor, shift: Tensor, k: int) -> Tensor:
    weights = _sigmoids(values, among, shift)
    slope = (weights * (1 - weights)).detach().sum(1, keepdim=True)
    return shift - (weights.sum(1, keepdim=True) - k) / slope.clamp(min=torch.finfo(values.dtype).tiny)
