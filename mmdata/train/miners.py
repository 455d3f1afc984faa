"""Miners: which of the batch's negatives enter the loss, and with what weight.

A miner is any function (scores, positives, negatives) -> kept or weights, see `Miner`. Whatever it returns, the losses
drop every pair that is no negative. Features of a teacher are those of the global batch; with several ranks `gather`
collects them first. Random draws come from the default generator of the scores' device, whose state is in checkpoints:
a resumed run draws the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.errors import excerpt
from mmdata.train.accelerator import widest

logger = logging.getLogger("mmdata")

SOFTNESS = 0.5
"""Temperature of the relaxed weights, in units of the perturbed scores: lower is nearer to 0 and 1, and steeper."""
BISECTIONS = 20
"""Halvings of the interval for the shift c, before two Newton steps; each gives one binary digit."""
Side = Literal["image", "text"]
"""Side of an anchor: images are contrasted with texts, texts with images."""


class Miner(Protocol):
    """Chooses negatives for a block of b anchors among the N rows of the global batch.

    The losses call it once for images as anchors (columns are texts) and once for texts (columns are images).
    A function with this signature, or a class with `__call__`, is a miner:

        def harder_than_half(scores, positives, negatives):
            return negatives & (scores > 0.5)
    """

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Weigh the negatives.

        Args:
            scores: (b, N) cosine similarities in [-1, 1], before logit_scale; they carry gradient.
            positives: bool (b, N), the anchor's own partner.
            negatives: bool (b, N), the admissible negatives: valid rows that are not known to be false negatives.

        Returns:
            (b, N): bool, True keeps a negative; or finite float weights >= 0, 0 drops it.
            A weight that is NaN, infinite or negative is an error; on a GPU, which nobody waits for, the loss is NaN.
            Entries outside `negatives` are ignored. A weight w counts as w equal negatives would. Weights may carry
            gradient to the scores, and one of 0 too: it adds nothing to a loss, and gets the loss's derivative by it.
            Where the loss has a softmax that is exp(logit) / the sum of the row's exp(logit), and e¹⁰ = 22,026 where it
            is more.
        """
        ...


@runtime_checkable
class BlockMiner(Protocol):
    """A miner that needs to know which anchors it sees."""

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for anchors `rows` of the global batch, images or texts."""
        ...


AnyMiner = Miner | BlockMiner


def for_block(miner: AnyMiner, side: Side, rows: slice) -> Miner:
    """The miner for these anchors: `miner` itself, unless it is a `BlockMiner`."""
    return miner.block(side, rows) if isinstance(miner, BlockMiner) else miner


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
        counts = (self.amount * negatives.sum(1).to(widest(negatives.device))).round().long()
        return negatives & ~top_k_mask(scores, negatives, max(1, round(self.amount * negatives.shape[1])), counts)


@dataclass(frozen=True)
class FalseNegativeMargin:
    """Leaves out negatives that are as similar as the positive, or nearly: they may describe the anchor too.

    Args:
        margin: of cosines, -2 to 2: a negative stays if it is more than this below the positive (with several, below
            their mean). 0 leaves out what is above the positive; below 0, what is so far above it.

    Example:
        Positive 0.7, negatives 0.8, 0.68, 0.5: FalseNegativeMargin(0.05) keeps 0.5, (-0.05) keeps 0.68 and 0.5.
    """

    margin: float

    def __post_init__(self) -> None:
        _check_margin(self, self.margin)

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep what is far enough below the positive; see `Miner`."""
        return negatives & (scores.detach() < positive_scores(scores, positives) - self.margin)


@dataclass(frozen=True)
class TeacherMask:
    """Leaves out the negatives that another model, such as a moving average of this one, takes for false ones.

    Negatives from outside the batch (`ExtraNegatives`) stay, since the teacher has not seen them. Negatives with a NaN
    cosine stay too, as after an overflow in the teacher's forward: a comparison with NaN would leave out whole rows.

    Args:
        images: (N, D), the teacher's features of the global batch, L2-normalised, of any precision.
        texts: (N, D).
        margin: as in `FalseNegativeMargin`, of the teacher's cosines.
    """

    images: Tensor
    texts: Tensor
    margin: float = 0.0

    def __post_init__(self) -> None:
        _check_margin(self, self.margin)
        if self.images.shape != self.texts.shape:
            raise ValueError(
                f"TeacherMask's images {tuple(self.images.shape)} and texts {tuple(self.texts.shape)} must both "
                "be (N, D)"
            )

    @classmethod
    def gather(cls, images: Tensor, texts: Tensor, margin: float = 0.0) -> TeacherMask:
        """From each rank's features (B, D) of its own rows, B equal on all ranks. A collective."""
        from mmdata.train.ranks import collectives  # which stands above this file

        return cls(collectives.gather(images.detach()), collectives.gather(texts.detach()), margin)

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""
        anchors, columns = (self.images, self.texts) if side == "image" else (self.texts, self.images)

        def allowed(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            # -inf, below any margin: the teacher has not seen the M negatives from outside the batch.
            teachers = torch.full_like(scores, -torch.inf)  # (b, N + M)
            teachers[:, : len(columns)] = anchors[rows] @ columns.T
            return FalseNegativeMargin(self.margin)(teachers, positives, negatives) | (negatives & teachers.isnan())

        return allowed


@dataclass(frozen=True)
class SameGroup:
    """Keeps the k most similar negatives of the anchor's own group, for batches of groups (`data.groups`).

    Rows size·i … size·i + size-1 are one group.

    Args:
        size: rows of a group, at least 2; it divides the rows of each rank.
        k: at least 1; all of the group where they are fewer.
    """

    size: int
    k: int

    def __post_init__(self) -> None:
        check_at_least_one(self, self.k)
        if self.size < 2:
            raise ValueError(f"SameGroup needs groups of at least 2 rows: got size={self.size}")

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""

        def nearest(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            # Negatives from outside the batch lie behind it, in groups of no anchor.
            groups = torch.arange(scores.shape[1], device=scores.device) // self.size
            return top_k_mask(scores, negatives & (groups[rows, None] == groups), self.k)

        return nearest


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
class Chain:
    """One miner after another: each chooses among the negatives that those before it kept. Only the last may weigh.

    Args:
        miners: at least one; those that leave out false negatives come first.

    Example:
        Chain([FalseNegativeMargin(0.05), DropHardest(1), TopK(64)]).
    """

    miners: Sequence[AnyMiner]

    def __post_init__(self) -> None:
        if not self.miners:
            raise ValueError("Chain of no miners: give at least one; All() keeps every negative")

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""

        def one_after_another(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            for miner in self.miners[:-1]:
                kept = mine(miner, side, rows, scores, positives, negatives)
                if kept.dtype != torch.bool:
                    raise ValueError(
                        f"miner {name_of_miner(miner)} gave weights, and the miners after it in the Chain would drop "
                        "them: return bool, or put it last"
                    )
                negatives = negatives & kept
            chosen = mine(self.miners[-1], side, rows, scores, positives, negatives)
            # The last miner may have kept a negative that an earlier one left out.
            return chosen & negatives if chosen.dtype == torch.bool else chosen.where(negatives, 0.0)

        return one_after_another


def _check_margin(miner: object, margin: float) -> None:
    if not -2 <= margin <= 2:
        raise ValueError(f"{type(miner).__name__}'s margin is a difference of cosines, -2 to 2: got margin={margin}")


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


def mine(miner: AnyMiner, side: Side, rows: slice, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """What a miner returns for the anchors `rows` of the global batch, (b, N).

    One of several ranks that raised would leave the others waiting in a collective: it logs a wrong weight, and the
    loss is NaN on all of them.

    Raises:
        ValueError: no tensor (b, N), or, on a CPU, a negative's weight that is NaN, infinite or below 0.
    """
    chosen = for_block(miner, side, rows)(scores, positives, negatives)
    if not isinstance(cast(object, chosen), Tensor):
        raise ValueError(
            f"miner {name_of_miner(miner)} returned {excerpt(chosen)}, expected a tensor of shape "
            f"{tuple(negatives.shape)}: bool, or weights from 0 on"
        )
    if chosen.shape != negatives.shape:
        raise ValueError(
            f"miner {name_of_miner(miner)} returned shape {tuple(chosen.shape)}, expected {tuple(negatives.shape)}"
        )
    if chosen.dtype != torch.bool and chosen.device.type == "cpu":
        flawed = int((negatives & are_flawed(chosen)).sum())
        if flawed and bool(scores.isfinite().all()):  # else the features are at fault
            said = (
                f"miner {name_of_miner(miner)} gave {flawed} negatives a weight that is NaN, infinite or below 0: a "
                "weight is a finite number from 0 on, and 0 drops a negative"
            )
            if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
                raise ValueError(said)
            logger.error("%s; the loss is NaN on all ranks", said)
    return chosen


def name_of_miner(miner: AnyMiner) -> str:
    """For messages: TopK, or my_miners:mine of a run. Not the repr, which would print a teacher's features."""
    return str(getattr(miner, "__qualname__", type(miner).__qualname__))


def are_flawed(weights: Tensor) -> Tensor:
    """Which weights (b, N) of a miner are NaN, infinite or negative: bool (b, N)."""
    return ~((weights >= 0) & (weights < torch.inf))  # a comparison with NaN is False


def top_k_mask(values: Tensor, among: Tensor, k: int, counts: Tensor | None = None) -> Tensor:
    """The k highest values of each row, or all of them where there are fewer.

    Args:
        values: (b, N); no gradient flows from here.
        among: bool (b, N), the entries to choose from.
        k: at least 1; more than N is all.
        counts: int64 (b,), a lower k for each row.

    Returns:
        bool (b, N).

    Example:
        values [[3., 9., 5., 4.]] among [[True, False, True, True]] with k = 2: [[False, False, True, True]].
    """
    candidates = values.detach().masked_fill(~among, -torch.inf)
    order = candidates.topk(min(k, values.shape[1]), dim=1).indices  # (b, k)
    chosen = torch.ones_like(order, dtype=torch.bool)
    if counts is not None:
        chosen = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    return torch.zeros_like(among).scatter(1, order, chosen) & among


def positive_scores(scores: Tensor, positives: Tensor) -> Tensor:
    """The mean similarity of each row's positives, with which negatives are compared.

    Args:
        scores: (b, N).
        positives: bool (b, N).

    Returns:
        (b, 1), without gradient; +inf in rows without a positive, which no negative comes near.
    """
    count = positives.sum(1, keepdim=True)
    mean = scores.detach().where(positives, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return mean.where(count > 0, torch.inf)


def check_at_least_one(miner: object, k: int) -> None:
    """Raise a ValueError if a miner would keep no negatives."""
    if k < 1:
        raise ValueError(f"{type(miner).__name__} keeps at least one negative a row: got k={k}")
