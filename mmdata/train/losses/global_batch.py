"""The features of a global batch, which of its pairs are positives and negatives, and sums over its anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from mmdata.train.keys import check_keys, check_mask
from mmdata.train.losses.exclusions import Exclusions
from mmdata.train.losses.extra_negatives import ExtraNegatives
from mmdata.train.losses.miner_weights import MinerFlaws, raise_if_flawed
from mmdata.train.losses.rowwise import rowwise_sum
from mmdata.train.miners import AnyMiner, Side, for_block
from mmdata.train.miners.protocol import check_shape
from mmdata.train.ranks import collectives

MAX_LOG_WEIGHT_GRADIENT = 10.0
"""Log of the largest gradient with respect to a weight of 0. Without it, the gradient of a negative far above all drawn
ones would drown all others in rounding: in float16, and at a scale of 100 also in float32."""

AnchorLoss = Callable[..., Tensor]
"""(scores, pairs, *scalars) to the losses of b anchors, (b,).

Scores are cosines (b, N); pairs a `Pairs`; scalars those that `GlobalBatch.sum_over` was given.
"""


class Pairs(NamedTuple):
    """Which columns are positives and chosen negatives of b anchors.

    Attributes:
        positives: bool (b, N).
        negatives: bool (b, N), those that the miner chose.
        weights: (b, N), of the negatives, above 0 and 1 where there is no negative; None: all are 1. Where a negative
            was weighed 0, weights - 1 is 0 with the gradient of that weight: `weighted_sum` and `weighted_log_sum_exp`
            pass it on.
        partners: int64 (b, 1), the column of each anchor's only positive; None: there may be several.
    """

    positives: Tensor
    negatives: Tensor
    weights: Tensor | None
    partners: Tensor | None

    def of_positives(self, values: Tensor) -> Tensor:
        """The mean (b,) over each anchor's positives of values (b, N)."""
        if self.partners is not None:
            return values.gather(1, self.partners).squeeze(1)
        return values.where(self.positives, 0.0).sum(1) / self.positives.sum(1)


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's view of the global batch: row i of the images pairs with row i of the texts.

    Attributes:
        image_features: (B, D), this rank's; rows that are not valid may hold anything.
        text_features: (B, D), likewise.
        valid: bool (N,), of the global batch.
        same: int64 (N,) each; rows that are equal in any of them are not negatives of each other.
        labels: int64 (N,), rows of equal labels are positives of each other; None: only row i of row i.
        own: this rank's rows, as a slice of the global batch.
        flaws: invalid weights of miners; counted by `sum_over`, raised by `global_mean`.
    """

    image_features: Tensor
    text_features: Tensor
    valid: Tensor
    same: tuple[Tensor, ...]
    labels: Tensor | None
    own: slice
    flaws: list[MinerFlaws] = field(default_factory=list, init=False)

    @classmethod
    def gather(
        cls,
        image_features: Tensor,
        text_features: Tensor,
        valid: Tensor | None = None,
        *,
        same: Sequence[Tensor] = (),
        labels: Tensor | None = None,
    ) -> GlobalBatch:
        """From the rows of all ranks, B of them on each. A collective.

        Raises:
            ValueError: row counts differ, keys that are no integers, or a mask that is not bool.
        """
        images, texts = image_features, text_features
        if images.shape != texts.shape or images.ndim != 2:
            raise ValueError(
                f"image_features {tuple(images.shape)} and text_features {tuple(texts.shape)} "
                "must both be (B, D): row i of one pairs with row i of the other"
            )
        if isinstance(cast(object, same), Tensor):  # its entries would be taken for columns
            raise ValueError(
                f"same is a tensor of shape {tuple(cast(Tensor, same).shape)}, expected a list of int64 tensors "
                f"({len(images)},), such as [batch['image_hash'], batch['caption_hash']]: put one into a list, [same]"
            )
        counts = torch.ones(len(images), dtype=torch.bool, device=images.device) if valid is None else valid
        keys = [("same", key) for key in same] + ([] if labels is None else [("labels", labels)])
        for name, column in (("valid", counts), *keys):
            if column.shape != (len(images),):
                raise ValueError(
                    f"{name} has shape {tuple(column.shape)}, expected ({len(images)},): one entry a feature row"
                )
        check_mask("valid", counts)
        for name, key in keys:
            check_keys(name, key)
        columns = collectives.gather(torch.stack([counts.long(), *(key.long() for _, key in keys)], dim=1))  # (N, 1+…)
        first = collectives.rank() * len(images)
        everywhere = columns[:, 1:].unbind(1)
        return cls(
            image_features=_single(images),
            text_features=_single(texts),
            valid=columns[:, 0].bool(),
            same=tuple(everywhere[: len(same)]),
            labels=None if labels is None else everywhere[-1],
            own=slice(first, first + len(images)),
        )

    def scalar(self, name: str, value: Tensor | float) -> Tensor:
        """A scalar argument of a loss as a tensor beside the features.

        Raises:
            ValueError: a tensor with more than one element.
            TypeError: neither a tensor nor a number.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} must be one number: got a tensor of shape {tuple(value.shape)}")
            return value.reshape(())
        if isinstance(value, bool) or not isinstance(cast(object, value), (int, float)):  # callers may not be checked
            raise TypeError(f"{name} must be a scalar tensor or a number: got {type(value).__name__}")
        return self.image_features.new_full((), value)

    @cached_property
    def images(self) -> Tensor:
        """(B, D), this rank's, with zeros in rows that are not valid: what they hold, even NaN, reaches no gradient."""
        return self.image_features.where(self.valid[self.own, None], 0.0)

    @cached_property
    def texts(self) -> Tensor:
        """(B, D), likewise."""
        return self.text_features.where(self.valid[self.own, None], 0.0)

    @cached_property
    def all_images(self) -> Tensor:
        """(N, D), with gradient. The first access is a collective."""
        return collectives.gather_with_grad(self.images)

    @cached_property
    def all_texts(self) -> Tensor:
        """(N, D), with gradient. The first access is a collective."""
        return collectives.gather_with_grad(self.texts)

    def global_mean(self, local: Tensor) -> Tensor:
        """The sum of `local` over ranks / number of valid rows, with W times the gradient of this rank's part.

        Value and gradient are NaN if a miner gave an invalid weight; see `raise_if_flawed` for the error.
        """
        local = local / self.valid.sum().clamp(min=1)
        # The counts of flaws are reduced with the sum, so that all ranks raise: one that raised alone would leave the
        # others waiting in the next collective.
        counts = [flaws.count for flaws in self.flaws]
        everyones = collectives.all_reduce_sum(torch.stack([local.detach(), *counts]) if counts else local)
        if counts:
            flawed = torch.stack(counts).sum() > 0
            local = local * torch.ones_like(local.detach()).masked_fill(flawed, torch.nan)
        weighted = local * collectives.world_size()
        result = (everyones[0] if counts else everyones) + (weighted - weighted.detach())
        if counts:
            raise_if_flawed([flaws.miner for flaws in self.flaws], everyones[1:])
        return result

    def sum_over(
        self,
        side: Side,
        loss: AnchorLoss,
        scalars: Sequence[Tensor] = (),
        *,
        miner: AnyMiner | None = None,
        extra: ExtraNegatives | None = None,
    ) -> Tensor:
        """The sum of `loss` over this rank's valid anchors of one side, block by block; see `rowwise_sum`.

        Args:
            side: of the anchors.
            loss: of a block of anchors.
            scalars: passed to `loss`, and get a gradient too.
            miner: chooses and weighs negatives.
            extra: further negatives: texts for image anchors, images for text anchors.
        """
        anchors, columns = (self.images, self.all_texts) if side == "image" else (self.texts, self.all_images)
        if extra is not None:
            columns = torch.cat([columns, extra.columns(columns.dtype)])  # (N + M, D)

        flaws = None if miner is None else MinerFlaws(miner, anchors.new_zeros(()))
        self.flaws.extend([] if flaws is None else [flaws])

        numbers = torch.arange(len(self.valid), device=self.valid.device)  # (N,)

        def of_block(scores: Tensor, rows: slice, *leaves: Tensor) -> Tensor:
            positives, negatives = self.masks(rows, extra)
            weights = None
            if flaws is not None:
                chosen = for_block(flaws.miner, side, self._numbers(rows))(scores, positives, negatives)
                check_shape(flaws.miner, chosen, negatives)
                if chosen.dtype != torch.bool:
                    flaws.look_at(chosen.detach(), scores, negatives)
                negatives, weights = _as_chosen(chosen, negatives)
            partners = None if self.labels is not None else numbers[self._numbers(rows), None]
            losses = loss(scores, Pairs(positives, negatives, weights, partners), *leaves)
            return losses.where(self.valid[self._numbers(rows)], 0.0)

        return rowwise_sum(of_block, anchors, columns, scalars)

    def masks(self, rows: slice, extra: ExtraNegatives | None = None) -> tuple[Tensor, Tensor]:
        """Positives and admissible negatives of `rows` of this rank, counted from 0: bool (b, N), or (b, N + M)."""
        rows = self._numbers(rows)
        numbers = torch.arange(len(self.valid), device=self.valid.device)  # (N,)
        positives = numbers[rows, None] == numbers  # (b, N)
        usable = self.valid[rows, None] & self.valid
        if self.labels is not None:
            positives |= (self.labels[rows, None] == self.labels) & usable
        negatives = ~positives & usable
        for key in self.same:
            negatives &= key[rows, None] != key
        if extra is None:
            return positives, negatives
        others = self.valid[rows, None] & extra.admissible([key[rows] for key in self.same])  # (b, M)
        return torch.cat([positives, torch.zeros_like(others)], dim=1), torch.cat([negatives, others], dim=1)

    def exclusions(self) -> Exclusions:
        """Pairs of this rank's images with all texts that are neither partners nor admissible negatives."""
        own = tuple(key[self.own] for key in self.same)
        return Exclusions(self.valid[self.own], self.valid, own, self.same, self.own.start)

    def exclusions_of(self, extra: ExtraNegatives) -> Exclusions:
        """Pairs of this rank's rows with extra negatives that are not admissible; no row has a partner among them."""
        own = tuple(key[self.own] for key in self.same) if extra.same else ()
        extra.check_same(len(self.same))
        return Exclusions(self.valid[self.own], extra.valid, own, tuple(extra.same), len(extra.features))

    def _numbers(self, rows: slice) -> slice:
        return slice(self.own.start + rows.start, self.own.start + rows.stop)


def weighted_sum(losses: Tensor, kept: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of each row's kept losses; the others weigh 0, and their weights get a gradient all the same.

    Args:
        losses: (b, N), finite.
        kept: bool (b, N).
        weights: (b, N), as in `Pairs`.

    Returns:
        (b,).
    """
    if weights is None:
        return losses.where(kept, 0.0).sum(1)
    return (losses * weights.where(kept, weights - 1)).sum(1)


def weighted_log_sum_exp(logits: Tensor, kept: Tensor, weights: Tensor | None) -> Tensor:
    """log(sum of weight · exp(logit)) of each row's kept logits; the others as in `weighted_sum`.

    To first order a weight w near 0 adds w · exp(logit - the log of the sum).

    Args:
        logits: (b, N), finite.
        kept: bool (b, N), one a row at least.
        weights: (b, N), as in `Pairs`.

    Returns:
        (b,).
    """
    if weights is None:
        return logits.where(kept, -torch.inf).logsumexp(1)
    total = (logits + weights.log()).where(kept, -torch.inf).logsumexp(1)
    slopes = (logits - total[:, None]).detach().clamp(max=MAX_LOG_WEIGHT_GRADIENT).exp()
    return total + (slopes * (weights - 1).where(~kept, 0.0)).sum(1)


def _as_chosen(chosen: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor | None]:
    """The negatives kept, bool (b, N), and their weights where the miner gave some."""
    if chosen.dtype == torch.bool:
        return chosen & negatives, None
    kept = (chosen > 0) & negatives
    dropped = (chosen == 0) & negatives
    return kept, chosen.where(kept, 1.0) + chosen.where(dropped, 0.0)


def _single(features: Tensor) -> Tensor:
    """In float32 or float64."""
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features
