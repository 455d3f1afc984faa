"""The protocol of miners, which choose and weigh the negatives of the loss, one block of whole rows at a time."""

from __future__ import annotations

from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from mmdata.errors import excerpt

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
            A weight that is NaN, infinite or negative is an error, and the loss is NaN. Entries outside `negatives` are
            ignored. A weight w counts as w equal negatives would. Weights may carry gradient to the scores, and one of
            0 too: it adds nothing to a loss, and gets the loss's derivative by it. Where the loss has a softmax that is
            exp(logit) / the sum of the row's exp(logit), and e¹⁰ = 22,026 where it is more.
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


def check_shape(miner: AnyMiner, chosen: Tensor, negatives: Tensor) -> None:
    """Raise a ValueError if a miner's result is not a tensor (b, N)."""
    if not isinstance(cast(object, chosen), Tensor):
        raise ValueError(
            f"miner {name_of_miner(miner)} returned {excerpt(chosen)}, expected a tensor of shape "
            f"{tuple(negatives.shape)}: bool, or weights from 0 on"
        )
    if chosen.shape != negatives.shape:
        raise ValueError(
            f"miner {name_of_miner(miner)} returned shape {tuple(chosen.shape)}, expected {tuple(negatives.shape)}"
        )


def name_of_miner(miner: AnyMiner) -> str:
    """For messages: TopK, my_miners:mine of a run, Chain(FalseNegativeMargin, TopK).

    Not the repr, which would print a teacher's features and so wait for the device at each loss.
    """
    parts = getattr(miner, "miners", None)
    if isinstance(parts, (list, tuple)) and all(callable(part) or isinstance(part, BlockMiner) for part in parts):
        return f"{type(miner).__qualname__}({', '.join(map(name_of_miner, parts))})"
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
