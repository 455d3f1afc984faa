"""Sums over negatives of similarities, tile by tile: never more than one tile is in memory.

Backward computes each tile again. That is four matrix products in all; the usual two cross entropies over two matrices
of logits take six. What happens to a tile is two functions, one for each pass. On a GPU all but their product is
compiled, so that masks and exponentials need not be written to memory. Partners are in no tile: their similarities are
as exact as the features, also where products are in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.config.train import LossPrecision
from mmdata.train.compiler import compiles, up_to_graphs
from mmdata.train.losses.pairs import Pairs
from mmdata.train.precision import numerics
from mmdata.train.ranks.collectives import first_order_only

TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Similarities of a tile, by device type: 1 MiB and 256 MiB of float32. The peak is a few times as much."""
SUMMED_ELEMENTS = 1 << 28
"""Of a tile whose sums a kernel computes without storing the tile: larger tiles are fewer launches."""
MEASURED_CAPABILITY = (9, 0)
"""Of the GPUs on which the kernels were measured: H100 and H200."""
BACKEND = "inductor"
"""Of torch.compile; tests replace it."""
MAX_GRAPHS = 64
"""Of a function of a tile. They differ in what is excluded, in which sums are asked for, and in sizes of 1."""

Part = tuple[Tensor, Tensor]
"""Sums of a tile's rows or columns over all tiles, and their gradient."""


def log_sum_exps(
    rows: Tensor,
    columns: Tensor,
    pairs: Pairs = Pairs(),  # noqa: B008 (a tuple)
    *,
    scale: Tensor | None = None,
    both: bool = True,
    precision: LossPrecision = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exps of the similarities scale * rows @ columns.T of negatives, along both dimensions.

    Args:
        rows: (B, D), finite.
        columns: (N, D), of the same floating type.
        pairs: says which pairs are negatives.
        scale: scalar of any floating type, multiplied in block by block: scaled columns would be a copy of them all;
            None: 1.
        both: whether sums over the rows are wanted.
        precision: of products. bf16: features are rounded to bfloat16, and so is a tile's gradient; sums are float32.
            tf32 and fp32: as torch computes float32 in these modes. auto: as torch's settings say.

    Returns:
        (B,) over the columns and (N,) over the rows: -inf, with gradient 0, where there is no negative.

    Example:
        rows [[1., 0.]], columns [[0., 1.], [ln 3, 0.]], no partners: [ln 4], [0., ln 3].
    """
    # The scale is of the rows' type, in which its gradient is accumulated; autograd casts it back once.
    typed = rows.new_ones(()) if scale is None else scale.to(rows.dtype)
    return _Tiled.apply(rows, columns, typed, None, pairs, both, precision)


def softplus_sums(
    rows: Tensor, columns: Tensor, pairs: Pairs, *, scale: Tensor, bias: Tensor, precision: LossPrecision = "auto"
) -> Tensor:
    """(B,): the sum of log(1 + exp(scale * similarity + bias)) over each row's negatives; else as `log_sum_exps`."""
    scale, bias = scale.to(rows.dtype), bias.to(rows.dtype)
    return _Tiled.apply(rows, columns, scale, bias, pairs, False, precision)[0]


def blocks(
    rows: Tensor, columns: Tensor, *, whole_rows: bool = False, elements: int | None = None
) -> list[list[slice]]:
    """Parts of the rows and of the columns, which make tiles: all columns if there are few, else four for each row."""
    elements = elements or TILE_ELEMENTS.get(rows.device.type, TILE_ELEMENTS["cuda"])
    num_columns = max(1, len(columns) if whole_rows else min(len(columns), 2 * int(elements**0.5)))
    num_rows = max(1, elements // num_columns)
    return [
        [slice(start, min(start + size, length)) for start in range(0, length, size)]
        for length, size in ((len(rows), num_rows), (len(columns), num_columns))
    ]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        pairs: Pairs,
        both: bool,
        precision: LossPrecision,
    ) -> tuple[Tensor, Tensor | None]:
        join, empty = (torch.logaddexp, -torch.inf) if bias is None else (torch.add, 0.0)
        over_columns = rows.new_full((len(rows),), empty)
        over_rows = rows.new_full((len(columns),), empty) if both else None
        few = rows.bfloat16() if precision == "bf16" else rows
        by_rows, by_columns = blocks(rows, columns, elements=SUMMED_ELEMENTS if has_kernels(few) else None)
        with one_pass(rows.device, precision):
            for c in by_columns:
                scaled = (scale * columns[c]).to(few.dtype)  # (c, D)
                for r in by_rows:
                    of_rows, of_columns = sums_of_tile(few[r], scaled, pairs.block(r, c), bias, both)
                    over_columns[r] = join(over_columns[r], of_rows)
                    if over_rows is not None and of_columns is not None:
                        over_rows[c] = join(over_rows[c], of_columns)
        ctx.pairs, ctx.precision = pairs, precision
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, columns, scale, bias, over_columns, over_rows)
        return over_columns, over_rows

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, grad_over_columns: Tensor | None, grad_over_rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_over_columns is None and grad_over_rows is None:
            return (None,) * 7
        rows, columns, scale, bias, over_columns, over_rows = ctx.saved_tensors
        grads = [
            torch.zeros_like(x) if needed else None
            for x, needed in zip((rows, columns, scale, bias), ctx.needs_input_grad, strict=False)
        ]
        grad_rows, grad_columns, grad_scale, grad_bias = grads
        # The log of an empty sum is -inf, and exp(-inf - -inf) is NaN; with any finite number in its place it is 0.
        over_columns = over_columns.masked_fill(over_columns == -torch.inf, 0.0)
        over_rows = None if over_rows is None else over_rows.masked_fill(over_rows == -torch.inf, 0.0)
        few = rows.bfloat16() if ctx.precision == "bf16" else rows
        by_rows, by_columns = blocks(rows, columns)
        with one_pass(rows.device, ctx.precision):
            for c in by_columns:
                block = columns[c]  # (c, D)
                scaled = (scale * block).to(few.dtype)
                of_columns = None if over_rows is None or grad_over_rows is None else (over_rows[c], grad_over_rows[c])
                grad_block = torch.zeros_like(block)  # with respect to the scaled columns
                for r in by_rows:
                    of_rows = None if grad_over_columns is None else (over_columns[r], grad_over_columns[r])
                    grad = gradient_of_tile(few[r], scaled, ctx.pairs.block(r, c), bias, of_rows, of_columns)  # (b, c)
                    if grad_rows is not None:
                        add_product(grad_rows[r], grad, scaled)
                    if grad_columns is not None or grad_scale is not None:
                        add_product(grad_block, grad.T, few[r])
                    if grad_bias is not None:
                        grad_bias += grad.sum(dtype=grad_bias.dtype)
                    del grad  # the next one takes its memory
                if grad_scale is not None:
                    grad_scale += (grad_block * block).sum()
                if grad_columns is not None:
                    grad_columns[c] = grad_block * scale
        return (*grads, None, None, None)


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ columns, of bfloat16 in float32."""
    if rows.dtype != torch.bfloat16:
        return rows @ columns
    if rows.device.type == "cuda":
        return torch.mm(rows, columns, out_dtype=torch.float32)
    return rows.float() @ columns.float()


def add_product(total: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Add rows @ columns to `total`, in its type."""
    if rows.dtype == total.dtype:
        total.addmm_(rows, columns)
    else:
        total += product(rows, columns)


def sums_of_tile(
    rows: Tensor, scaled: Tensor, pairs: Pairs, bias: Tensor | None, both: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums over a tile's negatives, over the columns (b,) and, if `both`, over the rows (c,).

    Args:
        rows: (b, D).
        scaled: columns times scale, (c, D).
        pairs: says which pairs are negatives.
        bias: None: log-sum-exps; else sums of softplus, over the columns only.
        both: whether sums over the rows are wanted.
    """
    assert bias is None or not both, "no caller needs them"
    if has_kernels(rows):
        if bias is None:
            return _kernels().log_sum_exps(rows, scaled, pairs, both)
        return _kernels().softplus_sums(rows, scaled, pairs, bias), None
    tile = product(rows, scaled.T)
    if bias is None:
        return on_device(_log_sum_exps, rows.device)(tile, pairs, both)
    return on_device(_softplus_sums, rows.device)(tile, pairs, bias), None


def gradient_of_tile(
    rows: Tensor,
    scaled: Tensor,
    pairs: Pairs,
    bias: Tensor | None,
    of_rows: Part | None,
    of_columns: Part | None,
) -> Tensor:
    """The gradient of a tile's similarities (b, c), in the rows' type, from the sums of all tiles."""
    if bias is None:
        if has_kernels(rows):
            return _kernels().log_sum_exps_gradient(rows, scaled, pairs, of_rows, of_columns)
        tile = product(rows, scaled.T)
        return on_device(_log_sum_exps_gradient, rows.device)(tile, pairs, of_rows, of_columns, rows.dtype)
    assert of_rows is not None, "the only sums"
    if has_kernels(rows):
        return _kernels().softplus_gradient(rows, scaled, pairs, bias, of_rows[1])
    tile = product(rows, scaled.T)
    return on_device(_softplus_gradient, rows.device)(tile, pairs, bias, of_rows[1], rows.dtype)


def _log_sum_exps(tile: Tensor, pairs: Pairs, both: bool) -> tuple[Tensor, Tensor | None]:
    tile = pairs.masked(tile, -torch.inf)
    return tile.logsumexp(1), tile.logsumexp(0) if both else None


def _log_sum_exps_gradient(
    tile: Tensor, pairs: Pairs, of_rows: Part | None, of_columns: Part | None, dtype: torch.dtype
) -> Tensor:
    tile = pairs.masked(tile, -torch.inf)
    grad = None
    if of_rows is not None:
        grad = (tile - of_rows[0][:, None]).exp_().mul_(of_rows[1][:, None])
    if of_columns is not None:
        by_column = (tile - of_columns[0]).exp_().mul_(of_columns[1])
        grad = by_column if grad is None else grad.add_(by_column)
    return (torch.zeros_like(tile) if grad is None else grad).to(dtype)


def _softplus_sums(tile: Tensor, pairs: Pairs, bias: Tensor) -> Tensor:
    # -logsigmoid(-x) is exact at both ends; softplus loses a term below e^-20 when it adds 1.
    return pairs.masked(-F.logsigmoid(-(tile + bias)), 0.0).sum(1)


def _softplus_gradient(tile: Tensor, pairs: Pairs, bias: Tensor, of_rows: Tensor, dtype: torch.dtype) -> Tensor:
    return pairs.masked((tile + bias).sigmoid() * of_rows[:, None], 0.0).to(dtype)


@contextmanager
def one_pass(device: torch.device, precision: LossPrecision = "auto") -> Generator[None]:
    """What holds for all tiles of a pass: no autocast, the precision of products, enough graphs for `on_device`."""
    with ExitStack() as held:
        held.enter_context(torch.autocast(device.type, enabled=False))  # also where backward is called inside of one
        if precision in ("tf32", "fp32"):
            held.enter_context(numerics(precision, device))
        if device.type == "cuda":
            held.enter_context(up_to_graphs(MAX_GRAPHS))
        yield


def has_kernels(features: Tensor) -> bool:
    """Whether Triton's kernels compute tiles of such features: bfloat16, on GPUs on which they were faster."""
    return features.dtype == torch.bfloat16 and features.device.type == "cuda" and _faster_with_kernels(features.device)


@cache
def _faster_with_kernels(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == MEASURED_CAPABILITY and compiles(device)


def _kernels() -> Any:
    return import_module("mmdata.train.losses.kernels")  # Triton is on Linux only


def on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of a tile as it is run on a device: compiled on a GPU, where torch.compile works."""
    return _compiled(function) if device.type == "cuda" and compiles(device) else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with graphs of its own for each number of keys and the like, for tiles of any size."""
    return torch.compile(function, backend=BACKEND, dynamic=True)
