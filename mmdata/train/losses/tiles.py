"""Log-sum-exps of similarities over both dimensions, tile by tile: never more than one tile is in memory.

Backward computes each tile again. That is four matrix products in all; the usual two cross entropies over two matrices
of logits take six. What happens to a tile is two functions of tensors, one for each pass. On a GPU they are
compiled, so that masks and exponentials need not be written to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mmdata.train.compiler import compiles, up_to_graphs
from mmdata.train.losses.exclusions import Exclusions, TileExclusions
from mmdata.train.ranks.first_order import first_order_only

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Similarities of a tile, by device type: 1 MiB and 64 MiB of float32. The peak is a few times as much."""
BACKEND = "inductor"
"""Of torch.compile; tests replace it."""
MAX_GRAPHS = 64
"""Of a function of a tile. They differ in what is excluded, in which sums are asked for, and in sizes of 1."""
ALL = Exclusions()

Function = TypeVar("Function", bound=Callable[..., Any])


def log_sum_exps(
    rows: Tensor, columns: Tensor, exclusions: Exclusions = ALL, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exps of the similarities scale * rows @ columns.T along both dimensions, and those of partners.

    Args:
        rows: (B, D). What is in rows and columns that are not valid, even NaN, reaches neither sums nor gradients.
        columns: (N, D), of the same floating type.
        exclusions: which pairs do not enter the sums, and which column is a row's partner.
        scale: scalar of any floating type, multiplied in tile by tile: scaled rows would be a copy of them all;
            None: 1.

    Returns:
        (B,) over the columns and (N,) over the rows: -inf, with gradient 0, where all pairs are excluded. (B,)
        similarities of partners, 0 where there is none or one of both is not valid. They are the numbers that entered
        the sums, so the difference of both is exact.

    Example:
        rows [[1., 0.]], columns [[0., 1.], [ln 3, 0.]], nothing excluded: [ln 4], [0., ln 3], [0.].
    """
    return _LogSumExps.apply(rows, columns, _typed(scale, rows), exclusions, True)


def log_sum_exp(rows: Tensor, columns: Tensor, exclusions: Exclusions = ALL, *, scale: Tensor | None = None) -> Tensor:
    """As `log_sum_exps`, over the columns only: (B,)."""
    return _LogSumExps.apply(rows, columns, _typed(scale, rows), exclusions, False)[0]


def tile_size(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile: all columns if there are few, else four columns for each row."""
    elements = TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"])
    tile_columns = max(1, min(columns, 2 * int(elements**0.5)))
    return max(1, min(rows, elements // tile_columns)), tile_columns


def _typed(scale: Tensor | None, rows: Tensor) -> Tensor:
    # In the rows' type: its gradient is accumulated over tiles in that type, and autograd casts it back once.
    return rows.new_ones(()) if scale is None else scale.to(rows.dtype)


class _LogSumExps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, scale: Tensor, exclusions: Exclusions, both: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        over_columns = rows.new_full((len(rows),), -torch.inf)
        over_rows = rows.new_full((len(columns),), -torch.inf) if both else None
        partners = rows.new_zeros(len(rows))
        tile_rows, tile_columns = tile_size(len(rows), len(columns), rows.device)
        one_tile = tile_rows >= len(rows) and tile_columns >= len(columns)
        sums, kept = _for_device(_sums, rows.device), None
        for c in _slices(len(columns), tile_columns):
            scaled = scale * exclusions.columns(columns, c)  # (c, D)
            for r in _slices(len(rows), tile_rows):
                tile = exclusions.rows(rows, r) @ scaled.T
                lines, diagonal = exclusions.partners(tile, r, c)
                partners[lines] = diagonal
                of_rows, of_columns = sums(tile, _excluded(exclusions, tile, r, c), both=both)
                over_columns[r] = torch.logaddexp(over_columns[r], of_rows)
                if over_rows is not None and of_columns is not None:
                    over_rows[c] = torch.logaddexp(over_rows[c], of_columns)
                kept = tile if one_tile else None  # small enough to keep it for backward
        ctx.exclusions = exclusions
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, columns, scale, over_columns, over_rows, kept)
        return over_columns, over_rows, partners

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, grad_over_columns: Tensor | None, grad_over_rows: Tensor | None, grad_partners: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, columns, scale, over_columns, over_rows, kept = ctx.saved_tensors
        exclusions: Exclusions = ctx.exclusions
        of_rows, of_columns, of_scale = ctx.needs_input_grad[:3]
        grad_rows = torch.zeros_like(rows) if of_rows else None
        grad_columns = torch.zeros_like(columns) if of_columns else None
        grad_scale = torch.zeros_like(scale) if of_scale else None
        tile_rows, tile_columns = tile_size(len(rows), len(columns), rows.device)
        gradient = _for_device(_gradient, rows.device)
        with torch.autocast(rows.device.type, enabled=False):  # also where backward is called inside of one
            for c in _slices(len(columns), tile_columns):
                block = exclusions.columns(columns, c)  # (c, D)
                scaled = scale * block
                # With respect to the scaled columns, so far.
                grad_block = None if grad_columns is None else grad_columns[c]
                if grad_block is None and of_scale:
                    grad_block = torch.zeros_like(block)
                for r in _slices(len(rows), tile_rows):
                    few = exclusions.rows(rows, r)  # (b, D)
                    tile = few @ scaled.T if kept is None else kept
                    grad = gradient(
                        tile,
                        _excluded(exclusions, tile, r, c, kept=kept is not None),
                        _part(over_columns, grad_over_columns, r),
                        _part(over_rows, grad_over_rows, c),
                    )  # (b, c)
                    if grad_partners is not None:
                        lines, diagonal = exclusions.partners(grad, r, c)
                        diagonal += grad_partners[lines]
                    if grad_rows is not None:
                        grad_rows[r].addmm_(grad, scaled)
                    if grad_block is not None:
                        grad_block.addmm_(grad.T, few)
                if grad_scale is not None and grad_block is not None:
                    grad_scale += (grad_block * block).sum()
                if grad_columns is not None:
                    grad_columns[c] *= scale
        return grad_rows, grad_columns, grad_scale, None, None


Part = tuple[Tensor, Tensor]
"""Log-sum-exps of a tile's rows or columns over all tiles, and their gradient."""


def _sums(tile: Tensor, excluded: TileExclusions | None, *, both: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exps of a tile's rows and, if `both`, of its columns."""
    tile = tile if excluded is None else excluded.masked(tile)
    return tile.logsumexp(1), tile.logsumexp(0) if both else None


def _gradient(tile: Tensor, excluded: TileExclusions | None, rows: Part | None, columns: Part | None) -> Tensor:
    """The gradient of a tile's similarities."""
    tile = tile if excluded is None else excluded.masked(tile)
    grad = None
    if rows is not None:
        grad = (tile - rows[0][:, None]).exp_().mul_(rows[1][:, None])
    if columns is not None:
        of_columns = (tile - columns[0]).exp_().mul_(columns[1])
        grad = of_columns if grad is None else grad.add_(of_columns)
    return torch.zeros_like(tile) if grad is None else grad


def _part(sums: Tensor, grad: Tensor | None, part: slice) -> Part | None:
    if grad is None:
        return None
    # The log of an empty sum is -inf, and exp(-inf - -inf) is NaN; with any finite number in its place it is 0.
    return sums[part].masked_fill(sums[part] == -torch.inf, 0.0), grad[part]


def _excluded(
    exclusions: Exclusions, tile: Tensor, rows: slice, columns: slice, *, kept: bool = False
) -> TileExclusions | None:
    """What the functions of a tile have to leave out: nothing on a CPU, where a tile is masked in place, once."""
    if tile.device.type != "cpu":
        return exclusions.of_tile(rows, columns, tile.device)
    if not kept:
        exclusions.mask_(tile, rows, columns)
    return None


def _for_device(function: Function, device: torch.device) -> Function:
    """A function of a tile as it is run on a device: compiled on a GPU, where torch.compile works."""
    return _compiled(function) if device.type == "cuda" and compiles(device) else function


@cache
def _compiled(function: Function) -> Function:
    """The function with graphs of its own for each number of keys and the like, for tiles of any size."""
    compiled: Any = torch.compile(function, backend=BACKEND, dynamic=True)

    @wraps(function)
    def with_its_graphs(*args: Any, **kwargs: Any) -> Any:
        with up_to_graphs(MAX_GRAPHS):
            return compiled(*args, **kwargs)

    return cast(Function, with_its_graphs)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
