"""Miners: which negatives enter the loss, and with what weight. It sees whole rows of similarities, by blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Side = Literal["image", "text"]
"""Of an anchor: images are contrasted with texts, texts with images."""


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
            (b, N): bool, True keeps a negative; or float weights >= 0, 0 drops it. Entries outside `negatives`
            are ignored. A weight w counts as w equal negatives would.
        """
        ...


@runtime_checkable
class BlockMiner(Protocol):
    """A miner that needs to know which anchors it sees."""

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for anchors `rows` of the global batch, images or texts."""
        ...


def for_block(miner: Miner | BlockMiner, side: Side, rows: slice) -> Miner:
    """What mines for these anchors: `miner` itself, unless it wants to know which they are."""
    return miner.block(side, rows) if isinstance(miner, BlockMiner) else miner


@dataclass(frozen=True)
class TopK:
    """Keeps each anchor's k most similar negatives; with k >= N it changes nothing.

    Args:
        k: negatives kept a row, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopK keeps at least one negative a row: got k={self.k}")

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Keep the k highest scores of each row; see `Miner`."""
        candidates = scores.detach().masked_fill(~negatives, -torch.inf)  # (b, N)
        chosen = candidates.topk(min(self.k, scores.shape[1]), dim=1).indices  # (b, k)
        return torch.zeros_like(negatives).scatter(1, chosen, True) & negatives  # (b, N)
