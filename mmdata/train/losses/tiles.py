"""Log-sum-exps of similarities over both their dimensions, tile by tile: no more than one tile is ever in memory.

Backward makes each tile again. That is four products of matrices in all, where the usual two cross entropies over two
matrices of logits take six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmdata.train.losses.first_order import first_order_only

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Similarities in memory at once, of each device type: 1 MiB and 64 MiB of float32; a few times as much is needed."""

Exclude = Callable[[Tensor, slice, slice], None]
"""Sets entries of a tile (b, c) to -inf in place, given its rows and columns."""


def log_sum_exps(
    rows: Tensor, columns: Tensor, exclude: Exclude, first: int = 0, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exps of the similarities scale * rows @ columns.T along both dimensions, and those of partners.

    Args:
        rows: (B, D).
        columns: (N, D), of the same floating type.
        exclude: takes pairs out of the sums.
        first: row i's partner is column first + i.
        scale: scalar of any floating type, multiplied in tile by tile: scaled rows would be a copy of them all;
            None: 1.

    Returns:
        (B,) over the columns and (N,) over the rows: -inf, with gradient 0, where all pairs are excluded. (B,)
        similarities of partners, 0 where there is no such column: the very numbers that are in the sums, so that a
        difference of both is exact.

    Example:
        rows [[1., 0.]], columns [[0., 1.], [ln 3, 0.]], nothing excluded: [ln 4], [0., ln 3], [0.].
    """
    # In the rows' type, so that its gradient adds up over tiles in that, and autograd casts it back once.
    scale = rows.new_ones(()) if scale is None else scale.to(rows.dtype)
    return _LogSumExps.apply(rows, columns, scale, exclude, first)  # type: ignore[no-any-return]


def tile_size(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile: all columns where a good number of rows fits beside them, else four to one."""
    elements = TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"])
    wide = min(columns, max(1, 2 * int(elements**0.5)))
    return max(1, min(rows, elements // max(1, wide))), max(1, wide)


class _LogSumExps(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: Tensor, columns: Tensor, scale: Tensor, exclude: Exclude, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        over_columns = rows.new_full((len(rows),), -torch.inf)
        over_rows = rows.new_full((len(columns),), -torch.inf)
        partners = rows.new_zeros(len(rows))
        high, wide = tile_size(len(rows), len(columns), rows.device)
        one_tile = high >= len(rows) and wide >= len(columns)
        kept = None
        for r in _slices(len(rows), high):
            scaled = scale * rows[r]  # (b, D)
            for c in _slices(len(columns), wide):
                tile = scaled @ columns[c].T
                lines, diagonal = _partners(tile, r, c, first)
                partners[lines] = diagonal
                exclude(tile, r, c)
                over_columns[r] = torch.logaddexp(over_columns[r], tile.logsumexp(1))
                over_rows[c] = torch.logaddexp(over_rows[c], tile.logsumexp(0))
                kept = tile if one_tile else None  # small enough: backward need not make it again
        ctx.exclude, ctx.first = exclude, first
        ctx.save_for_backward(rows, columns, scale, over_columns, over_rows, kept)
        return over_columns, over_rows, partners

    @staticmethod
    @first_order_only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_over_columns: Tensor, grad_over_rows: Tensor, grad_partners: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, columns, scale, over_columns, over_rows, kept = ctx.saved_tensors
        # where nothing is in a sum its log is -inf: any finite number in its place keeps exp(-inf - …) at 0
        over_columns, over_rows = (x.masked_fill(x == -torch.inf, 0.0) for x in (over_columns, over_rows))
        grad_rows, grad_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        grad_scale = torch.zeros_like(scale)
        high, wide = tile_size(len(rows), len(columns), rows.device)
        with torch.autocast(rows.device.type, enabled=False):  # also where backward is called inside of one
            for r in _slices(len(rows), high):
                scaled = scale * rows[r]  # (b, D)
                for c in _slices(len(columns), wide):
                    tile = kept
                    if tile is None:
                        tile = scaled @ columns[c].T
                        ctx.exclude(tile, r, c)
                    grad = (tile - over_columns[r, None]).exp_().mul_(grad_over_columns[r, None])  # (b, c)
                    grad += (tile - over_rows[c]).exp_().mul_(grad_over_rows[c])
                    lines, diagonal = _partners(grad, r, c, ctx.first)
                    diagonal += grad_partners[lines]
                    grad_rows[r].addmm_(grad, columns[c])
                    grad_columns[c].addmm_(grad.T, scaled)
                grad_scale += (grad_rows[r] * rows[r]).sum()  # until here grad_rows is by scaled rows
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
