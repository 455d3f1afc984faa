"""Triton kernels of a tile of similarities in bfloat16: its sums, and its gradient, without storing its similarities.

A program computes one block of the tile as a product of features, with float32 sums, and reduces it where it lies. The
forward pass writes one number for each row and column of a block; the backward pass computes the block again and
writes its gradient in bfloat16, for two products of cuBLAS. `tiles` has the same functions in operations of torch:
they are the reference, and what runs where these kernels do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_COLUMNS, STAGES = 128, 128, 3
"""Measured on an H200 at 32,768 x 512: of six forms this one is the fastest, or as fast within 2 %."""
FEATURE_BYTES = 128
"""Of one step of a product: 64 features in bfloat16."""
WARPS, MASKED_WARPS = 4, 8
"""Of a block: comparing keys takes registers."""
GROUP = 8
"""Blocks of rows that run side by side, so that they find the columns' features in the cache."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _place(num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Numbers of this program's block of rows and block of columns."""
    number = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_columns, BLOCK_COLUMNS)
    group = number // (GROUP * column_blocks)
    size = min(row_blocks - group * GROUP, GROUP)
    inside = number % (GROUP * column_blocks)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _similarities(
    rows, columns, num_rows, num_columns, width, row_block, column_block,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """The block's products (BLOCK_ROWS, BLOCK_COLUMNS), float32, and the numbers of its rows and columns."""
    r = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # What lies beyond the end is read from the first rows, and left out of all sums.
    row_features = rows + (r % num_rows).to(tl.int64)[:, None] * width
    column_features = columns + (c % num_columns).to(tl.int64)[None, :] * width
    f = tl.arange(0, BLOCK_FEATURES)
    block = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, width, BLOCK_FEATURES):
        inside = start + f < width
        ours = tl.load(row_features + (start + f)[None, :], mask=inside[None, :], other=0.0)
        theirs = tl.load(column_features + (start + f)[:, None], mask=inside[:, None], other=0.0)
        block = tl.dot(ours, theirs, block)
    return block, r, c


@triton.jit
def _kept(
    r, c, num_rows, num_columns, valid_rows, valid_columns, row_keys, column_keys, first,
    HAS_VALID: tl.constexpr, NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """Which pairs of a block count: bool (BLOCK_ROWS, BLOCK_COLUMNS)."""
    keep_rows, keep_columns = r < num_rows, c < num_columns
    if HAS_VALID:
        keep_rows = keep_rows & (tl.load(valid_rows + r, mask=keep_rows, other=0) != 0)
        keep_columns = keep_columns & (tl.load(valid_columns + c, mask=keep_columns, other=0) != 0)
    keep = keep_rows[:, None] & keep_columns[None, :]
    if NUM_KEYS > 0:
        other = c[None, :] != (r + first)[:, None]  # the partner, which no key excludes
        for key in tl.static_range(NUM_KEYS):
            ours = tl.load(row_keys + key * num_rows + r, mask=r < num_rows, other=0)
            theirs = tl.load(column_keys + key * num_columns + c, mask=c < num_columns, other=0)
            keep = keep & ((ours[:, None] != theirs[None, :]) | ~other)
    return keep


@triton.jit
def _sums_kernel(
    rows, columns, scale, valid_rows, valid_columns, row_keys, column_keys, over_columns, over_rows,
    num_rows, num_columns, width, first,
    HAS_VALID: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = _place(num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    block, r, c = _similarities(
        rows, columns, num_rows, num_columns, width, row_block, column_block, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES
    )
    keep = _kept(
        r, c, num_rows, num_columns, valid_rows, valid_columns, row_keys, column_keys, first, HAS_VALID, NUM_KEYS
    )
    block = tl.where(keep, block * (tl.load(scale) * LOG2_E), float("-inf"))  # in bits
    largest = tl.max(block, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # -inf minus -inf would be NaN
    sums = (largest + tl.log2(tl.sum(tl.exp2(block - largest[:, None]), 1))) * LN_2
    tl.store(over_columns + column_block.to(tl.int64) * num_rows + r, sums, mask=r < num_rows)
    largest = tl.max(block, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    sums = (largest + tl.log2(tl.sum(tl.exp2(block - largest[None, :]), 0))) * LN_2
    tl.store(over_rows + row_block.to(tl.int64) * num_columns + c, sums, mask=c < num_columns)


@triton.jit
def _gradient_kernel(
    rows, columns, scale, valid_rows, valid_columns, row_keys, column_keys,
    over_columns, grad_over_columns, over_rows, grad_over_rows, grad_partners, gradient,
    num_rows, num_columns, width, first,
    HAS_VALID: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = _place(num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    block, r, c = _similarities(
        rows, columns, num_rows, num_columns, width, row_block, column_block, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES
    )
    keep = _kept(
        r, c, num_rows, num_columns, valid_rows, valid_columns, row_keys, column_keys, first, HAS_VALID, NUM_KEYS
    )
    block = block * (tl.load(scale) * LOG2_E)
    of_rows = tl.load(over_columns + r, mask=r < num_rows, other=0.0) * LOG2_E
    of_columns = tl.load(over_rows + c, mask=c < num_columns, other=0.0) * LOG2_E
    grad_rows = tl.load(grad_over_columns + r, mask=r < num_rows, other=0.0)
    grad_columns = tl.load(grad_over_rows + c, mask=c < num_columns, other=0.0)
    grad = tl.exp2(block - of_rows[:, None]) * grad_rows[:, None]
    grad += tl.exp2(block - of_columns[None, :]) * grad_columns[None, :]
    grad = tl.where(keep, grad, 0.0)
    # In float32: where a partner has nearly all of a sum, both parts nearly cancel.
    of_partners = tl.load(grad_partners + r, mask=r < num_rows, other=0.0)
    grad += tl.where((r + first)[:, None] == c[None, :], of_partners[:, None], 0.0)
    inside = (r < num_rows)[:, None] & (c < num_columns)[None, :]
    place = gradient + r.to(tl.int64)[:, None] * num_columns + c[None, :]
    tl.store(place, grad.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact at both ends."""
    small = tl.exp2(-tl.abs(x) * LOG2_E)
    # log(1 + s) of a small s is s: 1 + s would lose it.
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small * (1.0 - 0.5 * small), tl.log2(1.0 + small) * LN_2)


@triton.jit
def _sigmoid_kernel(
    rows, columns, scale, valid_rows, valid_columns, row_keys, column_keys, bias, grad, sums, gradient,
    num_rows, num_columns, width, first,
    BACKWARD: tl.constexpr, HAS_VALID: tl.constexpr, NUM_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = _place(num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    block, r, c = _similarities(
        rows, columns, num_rows, num_columns, width, row_block, column_block, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_FEATURES
    )
    keep = _kept(
        r, c, num_rows, num_columns, valid_rows, valid_columns, row_keys, column_keys, first, HAS_VALID, NUM_KEYS
    )
    sign = tl.where((r + first)[:, None] == c[None, :], -1.0, 1.0)  # of the logit in softplus: partners are positives
    logits = sign * (block * tl.load(scale) + tl.load(bias))
    if BACKWARD:
        values = tl.where(keep, tl.load(grad) * sign * tl.sigmoid(logits), 0.0)
        inside = (r < num_rows)[:, None] & (c < num_columns)[None, :]
        place = gradient + r.to(tl.int64)[:, None] * num_columns + c[None, :]
        tl.store(place, values.to(gradient.dtype.element_ty), mask=inside)
    else:
        values = tl.where(keep, _softplus(logits), 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(values, 1), 0))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A tile of similarities that the kernels compute.

    Attributes:
        rows: (b, D), contiguous, bfloat16; float32 is multiplied in TF32.
        columns: (c, D), likewise.
        scale: scalar float32, multiplied in after the products.
        first: row i's partner is column first + i, if there is such a column; no key excludes it.
        valid: bool (b,) and bool (c,), the rows and columns that count; None: all do.
        keys: int64 (b,) and int64 (c,) each; pairs with equal keys do not count.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor
    first: int = 0
    valid: tuple[Tensor, Tensor] | None = None
    keys: tuple[tuple[Tensor, Tensor], ...] = ()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps over the columns (b,) and over the rows (c,), float32; -inf where no pair counts."""
        row_blocks, column_blocks = self._blocks()
        over_columns = self.rows.new_empty((column_blocks, len(self.rows)), dtype=torch.float32)
        over_rows = self.rows.new_empty((row_blocks, len(self.columns)), dtype=torch.float32)
        self._launch(_sums_kernel, over_columns, over_rows)
        return over_columns.logsumexp(0), over_rows.logsumexp(0)

    def gradient(
        self,
        over_columns: Tensor,
        grad_over_columns: Tensor,
        over_rows: Tensor,
        grad_over_rows: Tensor,
        partners: Tensor,
    ) -> Tensor:
        """The gradient of the similarities times scale, (b, c), in the type of the features.

        Args:
            over_columns: (b,), finite log-sum-exps of the rows over all tiles.
            grad_over_columns: (b,), their gradient.
            over_rows: (c,), of the columns, likewise.
            grad_over_rows: (c,).
            partners: (b,), gradient of the partners' similarities.
        """
        gradient = self.rows.new_empty((len(self.rows), len(self.columns)))
        given = (over_columns, grad_over_columns, over_rows, grad_over_rows, partners)
        self._launch(_gradient_kernel, *given, gradient)
        return gradient

    def sigmoid_sum(self, bias: Tensor) -> Tensor:
        """The sum of the sigmoid loss over the pairs that count, a scalar."""
        sums = self.scale.new_empty(math.prod(self._blocks()))
        self._launch(_sigmoid_kernel, bias, bias, sums, self.rows, BACKWARD=False)
        return sums.sum()

    def sigmoid_gradient(self, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """`grad` times the gradient of `sigmoid_sum`: of the logits (b, c), in the type of the
        features, and of the bias, a scalar."""
        gradient = self.rows.new_empty((len(self.rows), len(self.columns)))
        sums = self.scale.new_empty(math.prod(self._blocks()))
        self._launch(_sigmoid_kernel, bias, grad, sums, gradient, BACKWARD=True)
        return gradient, sums.sum()

    def _blocks(self) -> tuple[int, int]:
        return triton.cdiv(len(self.rows), BLOCK_ROWS), triton.cdiv(len(self.columns), BLOCK_COLUMNS)

    def _launch(self, kernel: Any, *tensors: Tensor, **constants: bool) -> None:
        """Run one program for each block; the kernel's own tensors stand behind those of the tile."""
        masked = self.valid is not None or len(self.keys) > 0
        unread = self.rows  # in place of what a kernel does not read
        valid = (unread, unread) if self.valid is None else [one.view(torch.uint8) for one in self.valid]
        keys = [torch.stack(one) for one in zip(*self.keys, strict=True)] or (unread, unread)
        kernel[(math.prod(self._blocks()),)](
            *(self.rows, self.columns, self.scale, *valid, *keys, *tensors),
            *(len(self.rows), len(self.columns), self.rows.shape[1], self.first),
            HAS_VALID=self.valid is not None,
            NUM_KEYS=len(self.keys),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            BLOCK_FEATURES=FEATURE_BYTES // self.rows.element_size(),
            GROUP=GROUP,
            num_warps=MASKED_WARPS if masked else WARPS,
            num_stages=STAGES,
            **constants,
        )
