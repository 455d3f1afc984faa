"""Miners that use more than a block's similarities (labels, groups, a teacher), and a chain of miners.

Their labels and features are those of the global batch; with several ranks `gather` collects them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdata.train.keys import check_keys
from mmdata.train.miners.protocol import (
    AnyMiner,
    Miner,
    Side,
    are_flawed,
    check_at_least_one,
    check_shape,
    for_block,
    positive_scores,
    top_k_mask,
)
from mmdata.train.ranks import collectives


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
class SameLabel:
    """Keeps the k most similar negatives among those of the anchor's own label: classes, or groups of near rows.

    Args:
        labels: int64 (N,) of the global batch; rows below 0 have none, and keep no negatives.
        k: at least 1; all of the label where they are fewer.

    Example:
        Labels [4, 4, 4, 9, -1]: row 0 keeps row 1 or row 2 with k = 1; rows 3 and 4 keep none.
    """

    labels: Tensor
    k: int

    def __post_init__(self) -> None:
        check_at_least_one(self, self.k)
        check_keys("labels", self.labels)

    @classmethod
    def gather(cls, labels: Tensor, k: int) -> SameLabel:
        """From each rank's labels (B,) of its own rows, B equal on all ranks. A collective."""
        return cls(collectives.gather(labels), k)

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""

        def nearest(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            own = self.labels[rows, None]  # (b, 1)
            alike = torch.zeros_like(negatives)  # (b, N + M); the M negatives from outside the batch have no label
            alike[:, : len(self.labels)] = (own == self.labels) & (own >= 0)
            return top_k_mask(scores, negatives & alike, self.k)

        return nearest


@dataclass(frozen=True)
class SameGroup:
    """As `SameLabel`, for batches of groups (`data.groups`): rows size·i … size·i + size-1 are one group.

    Args:
        size: rows of a group, at least 2; it divides the rows of each rank.
        k: at least 1.
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
            groups = torch.arange(scores.shape[1], device=scores.device) // self.size
            return SameLabel(groups, self.k).block(side, rows)(scores, positives, negatives)

        return nearest


@dataclass(frozen=True)
class Chain:
    """One miner after another: each chooses among the negatives that those before it kept. Weights are the last one's.

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
        parts = [for_block(miner, side, rows) for miner in self.miners]

        def one_after_another(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            flawed: Tensor | None = None
            for miner, part in zip(self.miners, parts[:-1], strict=False):
                chosen = part(scores, positives, negatives)
                check_shape(miner, chosen, negatives)
                if chosen.dtype != torch.bool:
                    new = negatives & are_flawed(chosen)
                    flawed = new if flawed is None else flawed | new
                negatives = negatives & (chosen > 0)
            chosen = parts[-1](scores, positives, negatives)
            check_shape(self.miners[-1], chosen, negatives)
            # The last miner may have kept a negative that an earlier one left out.
            chosen = chosen & negatives if chosen.dtype == torch.bool else chosen.where(negatives, 0.0)
            if flawed is None:
                return chosen
            return chosen.to(scores.dtype).masked_fill(flawed, torch.nan)  # which the loss reports as a flawed weight

        return one_after_another


def _check_margin(miner: object, margin: float) -> None:
    if not -2 <= margin <= 2:
        raise ValueError(f"{type(miner).__name__}'s margin is a difference of cosines, -2 to 2: got margin={margin}")
