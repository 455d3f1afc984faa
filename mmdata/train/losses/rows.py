"""Sums over anchors of a loss of each anchor's similarities to all columns, one block of anchors at a time.

This is the way of miners and of losses that need whole rows. The forward pass also computes each block's gradient, and
frees its similarities before the next block. So the loss and the miner run once for each block, and backward only
scales the gradients of the features. On a GPU the loss of a block is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdata.train.losses.pairs import Pairs
from mmdata.train.losses.tiles import blocks, one_pass
from mmdata.train.miners import are_flawed
from mmdata.train.ranks.collectives import first_order_only

MAX_LOG_WEIGHT_GRADIENT = 10.0
"""Log of the largest gradient with respect to a weight of 0. Without it, the gradient of a negative far above all drawn
ones would drown all others in rounding: in float16, and at a scale of 100 also in float32."""

RowLoss = Callable[..., Tensor]
"""(similarities (b, N), rows as a slice, *scalars) to losses (b,), in operations that autograd knows."""


class ChosenPairs(NamedTuple):
    """The positives of b anchors, and the negatives that a miner chose.

    Attributes:
        positives: bool (b, N).
        negatives: bool (b, N).
        weights: (b, N), of the negatives, above 0 and 1 where there is no negative; None: all are 1. Where a negative
            was weighed 0, weights - 1 is 0 with the gradient of that weight: `weighted_sum` and `weighted_log_sum_exp`
            pass it on.
    """

    positives: Tensor
    negatives: Tensor
    weights: Tensor | None

    def of_positives(self, values: Tensor) -> Tensor:
        """The mean (b,) over each anchor's positives of values (b, N)."""
        return values.where(self.positives, 0.0).sum(1) / self.positives.sum(1)

    def weighted_sum(self, losses: Tensor, kept: Tensor) -> Tensor:
        """The weighted sum (b,) of each row's kept losses (b, N), which are finite.

        The others weigh 0, and their weights get a gradient all the same.
        """
        if self.weights is None:
            return losses.where(kept, 0.0).sum(1)
        return (losses * self.weights.where(kept, self.weights - 1)).sum(1)

    def weighted_log_sum_exp(self, logits: Tensor) -> Tensor:
        """log(sum of weight · exp(logit)) of each row's positives and chosen negatives, (b,), of finite logits (b, N).

        To first order a weight w near 0 adds w · exp(logit - the log of the sum).
        """
        # Masked after scaling: -inf before it would make the scale's gradient 0 * -inf. Positives always stay.
        kept = self.negatives | self.positives
        if self.weights is None:
            return logits.where(kept, -torch.inf).logsumexp(1)
        total = (logits + self.weights.log()).where(kept, -torch.inf).logsumexp(1)
        slopes = (logits - total[:, None]).detach().clamp(max=MAX_LOG_WEIGHT_GRADIENT).exp()
        return total + (slopes * (self.weights - 1).where(~kept, 0.0)).sum(1)


def masks(scores: Tensor, pairs: Pairs, extra: Pairs | None, num_columns: int) -> tuple[Tensor, Tensor]:
    """Positives and negatives of whole rows, bool (b, N + M): of `num_columns` of the batch, then of M others."""
    inside, outside = scores[:, :num_columns], scores[:, num_columns:]
    positives, negatives = pairs.positives(inside), pairs.negatives(inside)
    if extra is None:
        return positives, negatives
    others = extra.negatives(outside)
    return torch.cat([positives, torch.zeros_like(others)], dim=1), torch.cat([negatives, others], dim=1)


def as_chosen(chosen: Tensor, positives: Tensor, negatives: Tensor) -> ChosenPairs:
    """What a miner returned, (b, N): without pairs that are no negatives, with weights where it gave some.

    A loss is NaN where a weight is NaN, infinite or negative.
    """
    if chosen.dtype == torch.bool:
        return ChosenPairs(positives, chosen & negatives, None)
    weights = chosen.masked_fill(are_flawed(chosen), torch.nan)
    kept = (weights > 0) & negatives
    dropped = negatives & ~kept
    return ChosenPairs(positives, kept, weights.where(kept, 1.0) + weights.where(dropped, 0.0))


def rowwise_sum(row_loss: RowLoss, anchors: Tensor, columns: Tensor, scalars: Sequence[Tensor] = ()) -> Tensor:
    """The sum over anchors of `row_loss`; memory is that of one block of rows.

    Args:
        row_loss: called block by block, once; each anchor's loss may depend on the whole row of its similarities.
        anchors: (B, D).
        columns: (N, D), of the same floating type.
        scalars: passed to `row_loss`, and get a gradient too, such as scale and bias; in the anchors' type if their own
            is narrower.

    Returns:
        Scalar.

    Example:
        The hardest pair of each anchor: rowwise_sum(lambda scores, rows: scores.amax(1), anchors, columns).
    """
    # Gradients of scalars are accumulated over blocks in this type, and autograd casts them back once.
    scalars = [scalar.to(torch.promote_types(scalar.dtype, anchors.dtype)) for scalar in scalars]
    return _RowwiseSum.apply(row_loss, torch.is_grad_enabled(), anchors, columns, *scalars)


class _RowwiseSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, row_loss: RowLoss, with_gradient: bool, anchors: Tensor, columns: Tensor, *scalars: Tensor
    ) -> Tensor:
        total = anchors.new_zeros(())
        of_anchors, of_columns, *of_scalars = (with_gradient and needed for needed in ctx.needs_input_grad[2:])
        grad_anchors = torch.zeros_like(anchors) if of_anchors else None
        grad_columns = torch.zeros_like(columns) if of_columns else None
        leaves = [scalar.detach().requires_grad_(of_it) for scalar, of_it in zip(scalars, of_scalars, strict=True)]
        with one_pass(anchors.device):
            for r in blocks(anchors, columns, whole_rows=True)[0]:
                scores = (anchors[r] @ columns.T).requires_grad_(of_anchors or of_columns)  # (b, N)
                with torch.set_grad_enabled(with_gradient):
                    loss = row_loss(scores, r, *leaves).sum()
                if loss.requires_grad:
                    loss.backward(inputs=[leaf for leaf in (scores, *leaves) if leaf.requires_grad])
                total += loss.detach()
                if scores.grad is not None and grad_anchors is not None:
                    torch.mm(scores.grad, columns, out=grad_anchors[r])
                if scores.grad is not None and grad_columns is not None:
                    grad_columns.addmm_(scores.grad.T, anchors[r])
        grads = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        ctx.save_for_backward(grad_anchors, grad_columns, *grads)
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if saved is None else grad * saved for saved in ctx.saved_tensors))
