"""Log-sum-exps of similarities over both dimensions, tile by tile: never more than one tile is in memory.

Backward computes each tile again. That is four matrix products in all; the usual two cross entropies over two matrices
of logits take six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmdata.train.losses.first_order import first_order_only

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Similarities of a tile, by device type: 1 MiB and 64 MiB of float32. The peak is a few times as much."""

Mask = Callable[[Tensor, slice, slice], None]
"""Sets entries of a tile (b, c) to -inf in place, given its rows and columns."""


def log_sum_exps(
    rows: Tensor, columns: Tensor, mask: Mask, first: int = 0, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exps of the similarities scale * rows @ columns.T along both dimensions, and those of partners.

    Args:
        rows: (B, D).
        columns: (N, D), of the same floating type.
        mask: takes pairs out of the sums.
        first: row i's partner is column first + i.
        scale: scalar of any floating type, multiplied in tile by tile: scaled rows would be a copy of them all;
            None: 1.

    Returns:
        (B,) over the columns and (N,) over the rows: -inf, with gradient 0, where all pairs are masked. (B,)
        similarities of partners, 0 where there is no such column. They are the numbers that entered the sums, so the
        difference of both is exact.

    Example:
        rows [[1., 0.]], columns [[0., 1.], [ln 3, 0.]], nothing masked: [ln 4], [0., ln 3], [0.].
    """
    # In the rows' type: its gradient is accumulated over tiles in that type, and autograd casts it back once.
    scale = rows.new_ones(()) if scale is None else scale.to(rows.dtype)
    return _LogSumExps.apply(rows, columns, scale, mask, first)


def tile_size(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile: all columns if there are few, else four columns for each row."""
    elements = TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"])
    tile_columns = max(1, min(columns, 2 * int(elements**0.5)))
    return max(1, min(rows, elements // tile_columns)), tile_columns


class _LogSumExps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, scale: Tensor, mask: Mask, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        over_columns = rows.new_full((len(rows),), -torch.inf)
        over_rows = rows.new_full((len(columns),), -torch.inf)
        partners = rows.new_zeros(len(rows))
        tile_rows, tile_columns = tile_size(len(rows), len(columns), rows.device)
        one_tile = tile_rows >= len(rows) and tile_columns >= len(columns)
        kept = None
        for r in _slices(len(rows), tile_rows):
            scaled = scale * rows[r]  # (b, D)
            for c in _slices(len(columns), tile_columns):
                tile = scaled @ columns[c].T
                lines, diagonal = _partners(tile, r, c, first)
                partners[lines] = diagonal
                mask(tile, r, c)
                over_columns[r] = torch.logaddexp(over_columns[r], tile.logsumexp(1))
                over_rows[c] = torch.logaddexp(over_rows[c], tile.logsumexp(0))
                kept = tile if one_tile else None  # small enough to keep it for backward
        ctx.mask, ctx.first = mask, first
        ctx.save_for_backward(rows, columns, scale, over_columns, over_rows, kept)
        return over_columns, over_rows, partners

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, grad_over_columns: Tensor, grad_over_rows: Tensor, grad_partners: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, columns, scale, over_columns, over_rows, kept = ctx.saved_tensors
        # The log of an empty sum is -inf, and exp(-inf - -inf) is NaN; with any finite number in its place it is 0.
        over_columns, over_rows = (x.masked_fill(x == -torch.inf, 0.0) for x in (over_columns, over_rows))
        grad_rows, grad_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        grad_scale = torch.zeros_like(scale)
        tile_rows, tile_columns = tile_size(len(rows), len(columns), rows.device)
        with torch.autocast(rows.device.type, enabled=False):  # also where backward is called inside of one
            for r in _slices(len(rows), tile_rows):
                scaled = scale * rows[r]  # (b, D)
                for c in _slices(len(columns), tile_columns):
                    tile = kept
                    if tile is None:
                        tile = scaled @ columns[c].T
                        ctx.mask(tile, r, c)
                    grad = (tile - over_columns[r, None]).exp_().mul_(grad_over_columns[r, None])  # (b, c)
                    grad += (tile - over_rows[c]).exp_().mul_(grad_over_rows[c])
                    lines, diagonal = _partners(grad, r, c, ctx.first)
                    diagonal += grad_partners[lines]
                    grad_rows[r].addmm_(grad, columns[c])
                    grad_columns[c].addmm_(grad.T, scaled)
                grad_scale += (grad_rows[r] * rows[r]).sum()  # so far grad_rows is with respect to the scaled rows
                grad_rows[r] *= scale
        return grad_rows, grad_columns, grad_scale, None, None


def _partners(tile: Tensor, rows: slice, columns: slice, first: int) -> tuple[slice, Tensor]:
    """The rows whose partners' columns are in a tile, and a view of the tile's entries for them."""
    start = max(rows.start, columns.start - first)
    stop = max(start, min(rows.stop, columns.stop - first))
    inside = tile[start - rows.start : stop - rows.start, start + first - columns.start : stop + first - columns.start]
    return slice(start, stop), inside.diagonal()


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
