"""Triton kernels of a tile's negatives in bfloat16: their sums and their gradient, without storing their similarities.

A program computes one block of the tile as a product of features, with float32 sums, and reduces it where it lies. The
forward pass writes one number for each row and each column of a block. The backward pass computes the block again and
writes its gradient in bfloat16, for two products of cuBLAS. `tiles` has the same functions in operations of torch:
they are the reference, and what runs where these kernels do not.
"""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton compiles the functions that are marked for it; types of Python say nothing about their arguments.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmdata.train.losses.pairs import Pairs

BLOCK_ROWS, BLOCK_COLUMNS, STAGES = 128, 128, 3
"""Measured on an H200 at 32,768 x 512: of six forms this one is the fastest, or within 2 % of it."""
FEATURE_BYTES = 128
"""Of one step of a product: 64 features in bfloat16."""
WARPS, MASKED_WARPS = 4, 8
"""Of a block: comparing keys takes registers."""
GROUP = 8
"""Blocks of rows that run side by side, so that they find the columns' features in the cache."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

Part = tuple[Tensor, Tensor]
"""Finite sums of a tile's rows or columns over all tiles, and their gradient."""


def log_sum_exps(rows: Tensor, columns: Tensor, pairs: Pairs, both: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exps of rows @ columns.T over negatives, float32; -inf where there is none.

    Args:
        rows: (b, D), bfloat16; float32 is multiplied in TF32.
        columns: (c, D), of the same type.
        pairs: says which pairs are negatives.
        both: whether those over the rows are wanted.

    Returns:
        (b,) over the columns, and (c,) over the rows.
    """
    row_blocks, column_blocks = _blocks(rows, columns)
    over_columns = rows.new_empty((column_blocks, len(rows)), dtype=torch.float32)
    over_rows = rows.new_empty((row_blocks, len(columns)), dtype=torch.float32) if both else over_columns
    _launch(_log_sum_exps, rows, columns, pairs, over_columns, over_rows, BOTH=both)
    return over_columns.logsumexp(0), over_rows.logsumexp(0) if both else None


def log_sum_exps_gradient(
    rows: Tensor, columns: Tensor, pairs: Pairs, of_rows: Part | None, of_columns: Part | None
) -> Tensor:
    """The gradient of the similarities (b, c) in the type of the features, from the log-sum-exps of all tiles."""
    gradient = rows.new_empty((len(rows), len(columns)))
    given = *(of_rows or _no_part(rows)), *(of_columns or _no_part(columns))
    _launch(_log_sum_exps_gradient, rows, columns, pairs, *(_plain(each) for each in given), gradient)
    return gradient


def softplus_sums(rows: Tensor, columns: Tensor, pairs: Pairs, bias: Tensor) -> Tensor:
    """(b,): sums of log(1 + exp(similarity + bias)) over the negatives of each row, float32."""
    sums = rows.new_empty((_blocks(rows, columns)[1], len(rows)), dtype=torch.float32)
    _launch(_softplus_sums, rows, columns, pairs, _plain(bias), sums)
    return sums.sum(0)


def softplus_gradient(rows: Tensor, columns: Tensor, pairs: Pairs, bias: Tensor, grad_of_rows: Tensor) -> Tensor:
    """The gradient of the similarities (b, c) in the type of the features, from that (b,) of the rows' sums."""
    gradient = rows.new_empty((len(rows), len(columns)))
    _launch(_softplus_gradient, rows, columns, pairs, _plain(bias), _plain(grad_of_rows), gradient)
    return gradient


def _no_part(features: Tensor) -> Part:
    """Adds 0 to each gradient: exp(similarity - inf) is 0, where exp(similarity - 0) might be infinite."""
    zeros = features.new_zeros(len(features), dtype=torch.float32)
    return torch.full_like(zeros, torch.inf), zeros


def _plain(values: Tensor) -> Tensor:
    """As the kernels read them: a gradient may be one number that is repeated."""
    return values.float().contiguous()


def _blocks(rows: Tensor, columns: Tensor) -> tuple[int, int]:
    return triton.cdiv(len(rows), BLOCK_ROWS), triton.cdiv(len(columns), BLOCK_COLUMNS)


def _launch(kernel: Any, rows: Tensor, columns: Tensor, pairs: Pairs, *tensors: Tensor, **constants: bool) -> None:
    """Run one program for each block; the kernel's own tensors stand behind those of all kernels."""
    rows, columns = rows.contiguous(), columns.contiguous()
    down, across = _blocks(rows, columns)
    valid = [rows if each is None else each.byte() for each in (pairs.valid_rows, pairs.valid_columns)]
    keys = [torch.stack(each) if each else rows for each in (pairs.row_keys, pairs.column_keys)]  # rows: not read
    masked = pairs.row_keys or pairs.valid_rows is not None or pairs.valid_columns is not None
    with torch.cuda.device_of(rows):  # Triton takes the current GPU
        kernel[(down * across,)](
            *(rows, columns, *valid, *keys, *tensors),
            *(len(rows), len(columns), rows.shape[1], len(columns) if pairs.partner is None else pairs.partner),
            VALID_ROWS=pairs.valid_rows is not None,
            VALID_COLUMNS=pairs.valid_columns is not None,
            NUM_KEYS=len(pairs.row_keys),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            BLOCK_FEATURES=FEATURE_BYTES // rows.element_size(),
            GROUP=GROUP,
            num_warps=MASKED_WARPS if masked else WARPS,
            num_stages=STAGES,
            **constants,
        )


# Names of a kernel's arguments: rows (num_rows, width) and columns (num_columns, width), contiguous; valid_rows and
# valid_columns, uint8; row_keys (NUM_KEYS, num_rows) and column_keys, int64; row i's partner is column first + i.


@triton.jit
def _similarities(
    rows, columns, valid_rows, valid_columns, row_keys, column_keys, num_rows, num_columns, width, first,
    VALID_ROWS: tl.constexpr, VALID_COLUMNS: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Similarities and negatives of a block, numbers of its rows and of its columns, and those of the blocks."""
    number = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_columns, BLOCK_COLUMNS)
    group = number // (GROUP * column_blocks)
    height = min(row_blocks - group * GROUP, GROUP)
    inside = number % (GROUP * column_blocks)
    row_block, column_block = group * GROUP + inside % height, inside // height
    r = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # What lies beyond the end is read from the first rows, and is no negative.
    row_features = rows + (r % num_rows).to(tl.int64)[:, None] * width
    column_features = columns + (c % num_columns).to(tl.int64)[None, :] * width
    f = tl.arange(0, BLOCK_FEATURES)
    block = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, width, BLOCK_FEATURES):
        rest = start + f < width
        ours = tl.load(row_features + (start + f)[None, :], mask=rest[None, :], other=0.0)
        theirs = tl.load(column_features + (start + f)[:, None], mask=rest[:, None], other=0.0)
        block = tl.dot(ours, theirs, block)
    keep_rows, keep_columns = r < num_rows, c < num_columns
    if VALID_ROWS:
        keep_rows = keep_rows & (tl.load(valid_rows + r, mask=keep_rows, other=0) != 0)
    if VALID_COLUMNS:
        keep_columns = keep_columns & (tl.load(valid_columns + c, mask=keep_columns, other=0) != 0)
    negative = keep_rows[:, None] & keep_columns[None, :] & ((r + first)[:, None] != c[None, :])
    for key in tl.static_range(NUM_KEYS):
        ours = tl.load(row_keys + key * num_rows + r, mask=r < num_rows, other=0)
        theirs = tl.load(column_keys + key * num_columns + c, mask=c < num_columns, other=0)
        negative = negative & (ours[:, None] != theirs[None, :])
    return block, negative, r, c, row_block, column_block


@triton.jit
def _store_gradient(gradient, values, negative, r, c, num_rows, num_columns):
    inside = (r < num_rows)[:, None] & (c < num_columns)[None, :]
    place = gradient + r.to(tl.int64)[:, None] * num_columns + c[None, :]
    tl.store(place, tl.where(negative, values, 0.0).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _log_sum_exp(block, AXIS: tl.constexpr):
    """Of a block of logarithms to the base 2."""
    largest = tl.max(block, AXIS)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # -inf minus -inf would be NaN
    return (largest + tl.log2(tl.sum(tl.exp2(block - tl.expand_dims(largest, AXIS)), AXIS))) * LN_2


@triton.jit
def _log_sum_exps(
    rows, columns, valid_rows, valid_columns, row_keys, column_keys, over_columns, over_rows,
    num_rows, num_columns, width, first, BOTH: tl.constexpr,
    VALID_ROWS: tl.constexpr, VALID_COLUMNS: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, negative, r, c, row_block, column_block = _similarities(
        rows, columns, valid_rows, valid_columns, row_keys, column_keys, num_rows, num_columns, width, first,
        VALID_ROWS, VALID_COLUMNS, NUM_KEYS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES, GROUP,
    )  # fmt: skip
    block = tl.where(negative, block * LOG2_E, float("-inf"))
    tl.store(over_columns + column_block.to(tl.int64) * num_rows + r, _log_sum_exp(block, 1), mask=r < num_rows)
    if BOTH:
        tl.store(over_rows + row_block.to(tl.int64) * num_columns + c, _log_sum_exp(block, 0), mask=c < num_columns)


@triton.jit
def _log_sum_exps_gradient(
    rows, columns, valid_rows, valid_columns, row_keys, column_keys,
    over_columns, grad_over_columns, over_rows, grad_over_rows, gradient,
    num_rows, num_columns, width, first,
    VALID_ROWS: tl.constexpr, VALID_COLUMNS: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, negative, r, c, _, _ = _similarities(
        rows, columns, valid_rows, valid_columns, row_keys, column_keys, num_rows, num_columns, width, first,
        VALID_ROWS, VALID_COLUMNS, NUM_KEYS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES, GROUP,
    )  # fmt: skip
    block = block * LOG2_E
    of_rows = tl.load(over_columns + r, mask=r < num_rows, other=0.0) * LOG2_E
    of_columns = tl.load(over_rows + c, mask=c < num_columns, other=0.0) * LOG2_E
    grad_rows = tl.load(grad_over_columns + r, mask=r < num_rows, other=0.0)
    grad_columns = tl.load(grad_over_rows + c, mask=c < num_columns, other=0.0)
    values = tl.exp2(block - of_rows[:, None]) * grad_rows[:, None]
    values += tl.exp2(block - of_columns[None, :]) * grad_columns[None, :]
    _store_gradient(gradient, values, negative, r, c, num_rows, num_columns)


@triton.jit
def _softplus_sums(
    rows, columns, valid_rows, valid_columns, row_keys, column_keys, bias, sums,
    num_rows, num_columns, width, first,
    VALID_ROWS: tl.constexpr, VALID_COLUMNS: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, negative, r, _, _, column_block = _similarities(
        rows, columns, valid_rows, valid_columns, row_keys, column_keys, num_rows, num_columns, width, first,
        VALID_ROWS, VALID_COLUMNS, NUM_KEYS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES, GROUP,
    )  # fmt: skip
    logits = block + tl.load(bias)
    small = tl.exp2(-tl.abs(logits) * LOG2_E)
    # 1 + small would lose a small number, whose log(1 + small) is nearly itself.
    rest = tl.where(small < 1e-4, small * (1.0 - 0.5 * small), tl.log2(1.0 + small) * LN_2)
    values = tl.where(negative, tl.maximum(logits, 0.0) + rest, 0.0)
    tl.store(sums + column_block.to(tl.int64) * num_rows + r, tl.sum(values, 1), mask=r < num_rows)


@triton.jit
def _softplus_gradient(
    rows, columns, valid_rows, valid_columns, row_keys, column_keys, bias, grad_of_rows, gradient,
    num_rows, num_columns, width, first,
    VALID_ROWS: tl.constexpr, VALID_COLUMNS: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, negative, r, c, _, _ = _similarities(
        rows, columns, valid_rows, valid_columns, row_keys, column_keys, num_rows, num_columns, width, first,
        VALID_ROWS, VALID_COLUMNS, NUM_KEYS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES, GROUP,
    )  # fmt: skip
    grads = tl.load(grad_of_rows + r, mask=r < num_rows, other=0.0)
    values = tl.sigmoid(block + tl.load(bias)) * grads[:, None]
    _store_gradient(gradient, values, negative, r, c, num_rows, num_columns)
