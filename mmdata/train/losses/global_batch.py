"""One rank's rows of a global batch, the pairs that they form with all ranks' rows, and sums over its anchors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mmdata.train.losses.pairs import ExtraNegatives, Pairs, check_columns
from mmdata.train.losses.rows import ChosenPairs, RowLoss, as_chosen, masks, rowwise_sum
from mmdata.train.losses.tiles import on_device
from mmdata.train.miners import AnyMiner, Side, mine
from mmdata.train.ranks import collectives


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's view of the global batch: row i of the images pairs with row i of the texts.

    Attributes:
        images: (B, D), this rank's, at least float32. Rows that are not valid are zeros: what they hold, even NaN,
            reaches no gradient.
        texts: (B, D), likewise.
        pairs: of this rank's rows with the N rows of all ranks, images with texts or texts with images.
        num_valid: of the N rows.
        own: this rank's rows, as a slice of the N.
    """

    images: Tensor
    texts: Tensor
    pairs: Pairs
    num_valid: Tensor | int
    own: slice

    @classmethod
    def gather(
        cls,
        images: Tensor,
        texts: Tensor,
        valid: Tensor | None = None,
        *,
        same: Sequence[Tensor] = (),
        labels: Tensor | None = None,
    ) -> GlobalBatch:
        """From the rows of all ranks, B of them on each. A collective.

        Args:
            images: (B, D), of any floating type.
            texts: (B, D).
            valid: bool (B,); None: all are valid.
            same: int64 (B,) each; rows that are equal in any of them are not negatives of each other.
            labels: int64 (B,), rows of equal labels are positives of each other; None: only row i of row i.

        Raises:
            ValueError: row counts differ, keys that are no integers, or a mask that is not bool.
        """
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
        check_columns(len(images), valid, same, labels)
        if valid is None and collectives.world_size() > 1:  # others may have rows that are not
            valid = torch.ones(len(images), dtype=torch.bool, device=images.device)
        keys = list(map(Tensor.long, (*same, *([] if labels is None else [labels]))))
        first = collectives.rank() * len(images)
        everyones = keys if valid is None else [*keys, valid.long()]
        if collectives.world_size() > 1:
            gathered = collectives.gather(torch.stack(everyones, dim=1))  # (N, K)
            everyones = list(gathered.T.contiguous())
        valid_columns = None if valid is None else everyones.pop().bool()
        num_valid = len(images) if valid_columns is None else valid_columns.sum()
        if valid_columns is not None and valid_columns.device.type == "cpu" and bool(valid_columns.all()):
            valid = valid_columns = None  # masks would be for nothing; on a GPU the host would have to wait to know it
        precise = torch.promote_types(torch.promote_types(images.dtype, texts.dtype), torch.float32)
        images, texts = images.to(precise), texts.to(precise)
        if valid is not None:
            images, texts = images.where(valid[:, None], 0.0), texts.where(valid[:, None], 0.0)
        return cls(
            images,
            texts,
            Pairs(tuple(keys), tuple(everyones), valid, valid_columns, partner=first, labelled=labels is not None),
            num_valid,
            slice(first, first + len(images)),
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
        return self.images.new_full((), value)

    def sides(self, side: Side) -> tuple[Tensor, Tensor]:
        """This rank's anchors of one side (B, D), and the other side's rows of all ranks (N, D). A collective."""
        anchors, others = (self.images, self.texts) if side == "image" else (self.texts, self.images)
        return anchors, collectives.gather_with_grad(others)

    def choose(
        self, side: Side, rows: slice, scores: Tensor, miner: AnyMiner | None, outside: Pairs | None = None
    ) -> tuple[Tensor, ChosenPairs]:
        """The admissible negatives of `rows` of this rank's anchors, bool (b, N + M), and what a miner makes of them.

        Args:
            side: of the anchors.
            rows: of the B.
            scores: (b, N + M), their cosines with the N rows of all ranks, and with M others.
            miner: None keeps all.
            outside: pairs of the B rows with the M others.
        """
        num_columns = len(self.images) * collectives.world_size()
        pairs = self.pairs.block(rows, slice(0, num_columns))
        others = None if outside is None else outside.block(rows, slice(0, scores.shape[1] - num_columns))
        positives, negatives = on_device(masks, scores.device)(scores.detach(), pairs, others, num_columns)
        chosen = negatives
        if miner is not None:
            numbers = slice(self.own.start + rows.start, self.own.start + rows.stop)
            chosen = mine(miner, side, numbers, scores, positives, negatives)
        return negatives, as_chosen(chosen, positives, negatives)

    def pairs_with(self, extra: ExtraNegatives) -> Pairs:
        """Pairs of this rank's rows with negatives from outside the batch."""
        pairs = self.pairs
        if extra.same and len(extra.same) != len(pairs.row_keys):
            raise ValueError(
                f"extra negatives have {len(extra.same)} columns in `same`, the loss has {len(pairs.row_keys)}: "
                "give the same ones in the same order, or none"
            )
        keys = pairs.row_keys if extra.same else ()
        return Pairs(keys, tuple(extra.same), pairs.valid_rows, extra.valid)

    def sum_over(
        self,
        side: Side,
        loss: RowLoss,
        scalars: Sequence[Tensor] = (),
        *,
        miner: AnyMiner | None = None,
        extra: ExtraNegatives | None = None,
        **settings: Any,
    ) -> Tensor:
        """The sum over this rank's valid anchors of one side of a loss of whole rows, block by block.

        Args:
            side: of the anchors.
            loss: (cosines (b, N), `ChosenPairs`, *scalars, **settings) to the losses of b anchors, (b,).
            scalars: passed to `loss`, and get a gradient too.
            miner: chooses and weighs negatives.
            extra: further negatives: texts for image anchors, images for text anchors.
            settings: passed to `loss`.
        """
        anchors, columns = self.sides(side)
        outside = None
        if extra is not None:
            outside, columns = self.pairs_with(extra), torch.cat([columns, extra.columns(columns.dtype)])  # (N + M, D)

        def of_block(scores: Tensor, rows: slice, *leaves: Tensor) -> Tensor:
            _, chosen = self.choose(side, rows, scores, miner, outside)
            losses = on_device(loss, scores.device)(scores, chosen, *leaves, **settings)
            valid = self.pairs.valid_rows
            return losses if valid is None else losses.where(valid[rows], 0.0)

        return rowwise_sum(of_block, anchors, columns, scalars)

    def sum_over_both(self, loss: RowLoss, scalars: Sequence[Tensor] = (), **given: Any) -> Tensor:
        """`sum_over` of both sides together."""
        return self.sum_over("image", loss, scalars, **given) + self.sum_over("text", loss, scalars, **given)

    def global_mean(self, local: Tensor) -> Tensor:
        """The sum of `local` over ranks / number of valid rows, with W times the gradient of this rank's part."""
        local = local / (self.num_valid.clamp(min=1) if isinstance(self.num_valid, Tensor) else max(1, self.num_valid))
        # Where the loss is not finite, as with a miner's weight of NaN, its gradient is NaN too.
        weighted = local * (collectives.world_size() + 0.0 * local.detach())
        return collectives.all_reduce_sum(local) + (weighted - weighted.detach())
