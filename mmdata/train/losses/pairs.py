"""Which pairs of rows and columns are negatives: tensors with one entry a row or column, no matrix of pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """The pairs of b rows (anchors) and c columns; those of a block of them are `Pairs` too.

    A pair is a negative unless its row or column is not valid, the two are equal in a key, or they are partners. A key
    is -1 nowhere by meaning: all numbers compare.

    Attributes:
        row_keys: int64 (b,) each.
        column_keys: int64 (c,) each, in the order of `row_keys`.
        valid_rows: bool (b,); None: all are valid.
        valid_columns: bool (c,), likewise.
        partner: the column that is the partner of row 0; that of row i is partner + i. None: no row has one here.
        labelled: the last key is a label: rows and columns that are equal in it are positives.
    """

    row_keys: tuple[Tensor, ...] = ()
    column_keys: tuple[Tensor, ...] = ()
    valid_rows: Tensor | None = None
    valid_columns: Tensor | None = None
    partner: int | None = None
    labelled: bool = False

    def block(self, rows: slice, columns: slice) -> Pairs:
        """The pairs of a part of the rows with a part of the columns."""
        partner = None
        if self.partner is not None:
            first = self.partner + rows.start - columns.start
            partner = first if rows.start - rows.stop < first < columns.stop - columns.start else None
        return Pairs(
            tuple(key[rows] for key in self.row_keys),
            tuple(key[columns] for key in self.column_keys),
            None if self.valid_rows is None else self.valid_rows[rows],
            None if self.valid_columns is None else self.valid_columns[columns],
            partner,
            self.labelled,
        )

    def masked(self, values: Tensor, fill: float) -> Tensor:
        """Values (b, c) with `fill` in place of those that are of no negatives."""
        for key, other in zip(self.row_keys, self.column_keys, strict=True):
            values = values.masked_fill(key[:, None] == other, fill)
        if self.valid_rows is not None:
            values = values.masked_fill(~self.valid_rows[:, None], fill)
        if self.valid_columns is not None:
            values = values.masked_fill(~self.valid_columns, fill)
        if self.partner is not None:
            values = values.masked_fill(self._partners(values), fill)
        return values

    def negatives(self, values: Tensor) -> Tensor:
        """Which of values (b, c) are of negatives: bool (b, c)."""
        return self.masked(torch.ones_like(values, dtype=torch.bool), False)

    def positives(self, values: Tensor) -> Tensor:
        """Which of values (b, c) are of positives: bool (b, c). A row that is not valid keeps its partner."""
        if not self.labelled:
            return self._partners(values)
        equal = self.row_keys[-1][:, None] == self.column_keys[-1]
        if self.valid_rows is not None:
            equal = equal & self.valid_rows[:, None]
        if self.valid_columns is not None:
            equal = equal & self.valid_columns
        return equal | self._partners(values)

    def _partners(self, values: Tensor) -> Tensor:
        numbers = torch.arange(max(values.shape), device=values.device)
        first = values.shape[1] if self.partner is None else self.partner
        return numbers[: values.shape[0], None] + first == numbers[: values.shape[1]]
