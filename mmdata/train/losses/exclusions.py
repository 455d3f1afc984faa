"""Which pairs of rows and columns do not enter a loss: tensors with one entry a row or column, no matrix of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class TileExclusions(NamedTuple):
    """The exclusions of one tile, for code that may be compiled.

    Attributes:
        valid_rows: bool (b,), or None: all are valid.
        valid_columns: bool (c,), or None.
        row_keys: int64 (b,) each.
        column_keys: int64 (c,) each.
        partners: int64 (b,), the number of each row's partner among all columns.
        numbers: int64 (c,), the number of each column.
    """

    valid_rows: Tensor | None
    valid_columns: Tensor | None
    row_keys: tuple[Tensor, ...]
    column_keys: tuple[Tensor, ...]
    partners: Tensor
    numbers: Tensor

    def masked(self, tile: Tensor) -> Tensor:
        """The tile with -inf in place of the pairs that are excluded."""
        if self.valid_rows is not None:
            tile = tile.masked_fill(~self.valid_rows[:, None], -torch.inf)
        if self.valid_columns is not None:
            tile = tile.masked_fill(~self.valid_columns, -torch.inf)
        for of_rows, of_columns in zip(self.row_keys, self.column_keys, strict=True):
            equal = (of_rows[:, None] == of_columns) & (self.partners[:, None] != self.numbers)
            tile = tile.masked_fill(equal, -torch.inf)
        return tile


@dataclass(frozen=True)
class Exclusions:
    """Pairs that do not enter a loss: those with a row or column that is not valid, and those with equal keys.

    Attributes:
        valid_rows: bool (B,); None: all are valid.
        valid_columns: bool (N,), likewise.
        row_keys: int64 (B,) each.
        column_keys: int64 (N,) each, in the order of `row_keys`.
        first: row i's partner is column first + i, which no key excludes. A row for which there is no such column has
            no partner.
    """

    valid_rows: Tensor | None = None
    valid_columns: Tensor | None = None
    row_keys: tuple[Tensor, ...] = ()
    column_keys: tuple[Tensor, ...] = ()
    first: int = 0

    def rows(self, rows: Tensor, part: slice) -> Tensor:
        """A part of the rows (b, D), with zeros where they are not valid: in a gradient, 0 times NaN would be NaN."""
        return _cleaned(rows[part], self._valid[0], part)

    def columns(self, columns: Tensor, part: slice) -> Tensor:
        """A part of the columns (c, D), likewise."""
        return _cleaned(columns[part], self._valid[1], part)

    def partners(self, tile: Tensor, rows: slice, columns: slice) -> tuple[slice, Tensor]:
        """The rows whose partners' columns are in a tile, and a view of the tile's entries for them."""
        start = max(rows.start, columns.start - self.first)
        stop = max(start, min(rows.stop, columns.stop - self.first))
        lines = slice(start - rows.start, stop - rows.start)
        inside = tile[lines, start + self.first - columns.start : stop + self.first - columns.start]
        return slice(start, stop), inside.diagonal()

    def of_tile(self, rows: slice, columns: slice, device: torch.device) -> TileExclusions:
        """Those of a part of the rows with a part of the columns; copies, whose places in memory need no graph."""
        valid_rows, valid_columns = self._valid
        return TileExclusions(
            None if valid_rows is None else valid_rows[rows].clone(),
            None if valid_columns is None else valid_columns[columns].clone(),
            tuple(key[rows].clone() for key in self.row_keys),
            tuple(key[columns].clone() for key in self.column_keys),
            torch.arange(self.first + rows.start, self.first + rows.stop, device=device),
            torch.arange(columns.start, columns.stop, device=device),
        )

    def mask_(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Set the excluded pairs of a tile to -inf in place, on a CPU.

        Few rows share a key, and only their lines of the tile are compared. On a GPU the host would have to wait for
        the device to learn which rows these are; there a kernel compares all (`TileExclusions.masked`).
        """
        if not (self.row_keys or any(valid is not None for valid in self._valid)):
            return
        found = self.of_tile(rows, columns, tile.device)
        if found.valid_rows is not None:
            tile.masked_fill_(~found.valid_rows[:, None], -torch.inf)
        if found.valid_columns is not None:
            tile.masked_fill_(~found.valid_columns, -torch.inf)
        for shared, of_rows, of_columns in zip(self._shared, found.row_keys, found.column_keys, strict=True):
            lines = shared[rows].nonzero().squeeze(1)
            equal = of_rows[lines, None] == of_columns  # (l, c)
            equal &= found.partners[lines, None] != found.numbers
            tile[lines] = tile[lines].masked_fill_(equal, -torch.inf)

    @cached_property
    def _valid(self) -> tuple[Tensor | None, Tensor | None]:
        """Which rows and columns are valid; on a CPU None where all are."""
        return _unless_all(self.valid_rows), _unless_all(self.valid_columns)

    @cached_property
    def _shared(self) -> list[Tensor]:
        """bool (B,) for each key: rows with a column of the same key, other than their partner's."""
        return [self._has_equal(*keys) for keys in zip(self.row_keys, self.column_keys, strict=True)]

    def _has_equal(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        ordered, of_rows = of_columns.sort().values, of_rows.contiguous()
        counts = torch.searchsorted(ordered, of_rows, right=True) - torch.searchsorted(ordered, of_rows)  # (B,)
        start, stop = (min(max(0, number - self.first), len(of_rows)) for number in (0, len(of_columns)))
        own = torch.zeros_like(counts)
        own[start:stop] = of_columns[self.first + start : self.first + stop] == of_rows[start:stop]
        return counts > own


def _unless_all(valid: Tensor | None) -> Tensor | None:
    return None if valid is not None and valid.device.type == "cpu" and bool(valid.all()) else valid


def _cleaned(features: Tensor, valid: Tensor | None, part: slice) -> Tensor:
    return features if valid is None else features.where(valid[part, None], 0.0)
