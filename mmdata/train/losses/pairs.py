"""Which pairs of rows and columns are negatives, and negatives from outside the batch: captions written to be hard, or
features of earlier batches. Tensors have one entry a row or column; there is no matrix of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train.keys import check_keys
from mmdata.train.ranks import collectives


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
            tuple(map(itemgetter(rows), self.row_keys)),
            tuple(map(itemgetter(columns), self.column_keys)),
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


@dataclass(frozen=True)
class ExtraNegatives:
    """Images or texts that belong to no row of the batch.

    Attributes:
        features: (M, D), L2-normalised. With several ranks, each rank contrasts its own; `gather` gives each rank all.
        same: int64 (M,) each, in the order of the loss's `same`: not negatives of rows with an equal key. Empty:
            negatives of all rows.
        valid: bool (M,), False leaves a row out; None: all are valid.

    Raises:
        ValueError: counts differ, keys that are no integers, or a mask that is not bool.
    """

    features: Tensor
    same: Sequence[Tensor] = ()
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        check_columns(len(self.features), self.valid, self.same, of=" of the extra negatives")

    def gather(self) -> ExtraNegatives:
        """Those of all ranks, with gradient; M is equal on all of them. A collective."""
        valid = None if self.valid is None else collectives.gather(self.valid.long()).bool()
        same = [collectives.gather(key) for key in self.same]
        return ExtraNegatives(collectives.gather_with_grad(self.features), same, valid)

    def joined(self, others: ExtraNegatives) -> ExtraNegatives:
        """These and then the others; both have the same columns in `same`."""
        valid = [
            torch.ones_like(x.features[:, 0], dtype=torch.bool) if x.valid is None else x.valid for x in (self, others)
        ]
        same = [torch.cat(both) for both in zip(self.same, others.same, strict=True)]
        dtype = torch.promote_types(self.features.dtype, others.features.dtype)
        features = torch.cat([self.features.to(dtype), others.features.to(dtype)])
        return ExtraNegatives(features, same, torch.cat(valid))

    def first(self, width: int) -> ExtraNegatives:
        """Of the first `width` numbers of the features, normalised again."""
        return self if self.features.shape[1] == width else replace(self, features=first_features(self.features, width))

    def columns(self, dtype: torch.dtype) -> Tensor:
        """The features (M, D), with zeros in rows that are not valid: their content reaches no gradient."""
        features = self.features.to(dtype)
        return features if self.valid is None else features.where(self.valid[:, None], 0.0)


def first_features(features: Tensor, width: int) -> Tensor:
    """The first `width` numbers of features (…, D), L2-normalised, at least float32 (Matryoshka, arXiv:2205.13147).

    Raises:
        ValueError: there are fewer.
    """
    if width > features.shape[-1]:
        raise ValueError(f"matryoshka: the first {width} of features that have {features.shape[-1]} numbers; lower it")
    precise = torch.promote_types(features.dtype, torch.float32)
    return F.normalize(features[..., :width].to(precise), dim=-1)


def check_columns(
    rows: int, valid: Tensor | None, same: Sequence[Tensor], labels: Tensor | None = None, *, of: str = ""
) -> None:
    """Raise a ValueError where a column has not one entry a row, or one of another type.

    Args:
        rows: their number.
        valid: a mask.
        same: keys.
        labels: further keys.
        of: what has the rows, for the message.
    """
    for name, column in (*(("same", key) for key in same), ("labels", labels), ("valid", valid)):
        if column is None:
            continue
        if column.shape != (rows,):
            raise ValueError(f"{name}{of} has shape {tuple(column.shape)}, expected ({rows},): one entry a feature row")
        if name != "valid":
            check_keys(f"{name}{of}", column)
        elif column.dtype != torch.bool:
            raise ValueError(
                f"valid{of} has dtype {str(column.dtype).removeprefix('torch.')}, expected bool: True where a row "
                "counts; give valid.bool()"
            )
