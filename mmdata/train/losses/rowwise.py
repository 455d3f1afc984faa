"""Sums over anchors of a loss of each anchor's similarities to all columns, one block of anchors at a time.

The forward pass also computes each block's gradient, and frees its similarities before the next block. So the loss and
the miner run once for each block, and backward only scales the gradients of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdata.train.losses.tiles import TILE_ELEMENTS
from mmdata.train.ranks.first_order import first_order_only

RowLoss = Callable[..., Tensor]
"""(similarities (b, N), rows as a slice, *scalars) to losses (b,), in operations that autograd knows."""


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
    if not torch.is_grad_enabled():
        losses = [row_loss(anchors[r] @ columns.T, r, *scalars).sum() for r in _blocks(anchors, columns)]
        return torch.stack([anchors.new_zeros(()), *losses]).sum()
    return _RowwiseSum.apply(row_loss, anchors, columns, *scalars)


class _RowwiseSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row_loss: RowLoss, anchors: Tensor, columns: Tensor, *scalars: Tensor) -> Tensor:
        total = anchors.new_zeros(())
        _, of_anchors, of_columns, *of_scalars = ctx.needs_input_grad
        grad_anchors = torch.zeros_like(anchors) if of_anchors else None
        grad_columns = torch.zeros_like(columns) if of_columns else None
        leaves = [scalar.detach().requires_grad_(of_it) for scalar, of_it in zip(scalars, of_scalars, strict=True)]
        for r in _blocks(anchors, columns):
            scores = (anchors[r] @ columns.T).requires_grad_(of_anchors or of_columns)  # (b, N)
            with torch.enable_grad():
                loss = row_loss(scores, r, *leaves).sum()
                inputs = [leaf for leaf in (scores, *leaves) if leaf.requires_grad]
                if loss.requires_grad:
                    loss.backward(inputs=inputs)
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
        return (None, *(None if saved is None else grad * saved for saved in ctx.saved_tensors))


def _blocks(anchors: Tensor, columns: Tensor) -> list[slice]:
    elements = TILE_ELEMENTS.get(anchors.device.type, TILE_ELEMENTS["cuda"])
    size = max(1, elements // max(1, len(columns)))
    return [slice(start, min(start + size, len(anchors))) for start in range(0, len(anchors), size)]
