"""The values of a table's column for rows of an index, as batches take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.tables.arrow_values import compute, date_kind, iso_texts
from mmdata.tables.table import in_condition

Array = NDArray[Any]

_KNOWN = "numbers, vectors of floats, texts and dates"


class ColumnValues:
    """Numbers, vectors of one length, or texts; dates are texts, see `iso_texts`.

    A row without a value has NaN in a column of floats (also in each place of a vector), and "" in one of texts. Whole
    numbers and bool have no such word, so all rows that are loaded must have one (`check`); padding is 0 or False.

    Args:
        column: an Arrow array (rows of the index,).
        fingerprint: equal for equal values.
        name: of the column, for messages.
        of: name of the setting, for messages.

    Attributes:
        fingerprint: as given.

    Raises:
        ConfigError: values of another type, or vectors of different lengths.
    """

    def __init__(self, column: Any, fingerprint: str, *, name: str, of: str) -> None:
        self.fingerprint = fingerprint
        self._of, self._name = f"{of}: column '{name}'", name
        self._texts: Any = None
        self._numbers: Array = np.empty(0)
        self._lacks: Array | None = None  # which rows have no value, where there is no word for that
        if date_kind(column.type):
            column = iso_texts(column)
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            self._texts = column.fill_null("")
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            self._numbers = self._vectors(column)
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind):
            self._numbers = self._scalars(column)
        else:
            raise ConfigError(f"{self._of}: values of type {kind}; known are {_KNOWN}")

    def check(self, rows: Iterable[NDArray[np.int64]]) -> None:
        """Check that rows of the index, some at a time, have a value, or that there is a word for none.

        Raises:
            ConfigError: whole numbers or bool, and a row without.
        """
        if self._lacks is None:
            return
        if missing := sum(int(self._lacks[some].sum()) for some in rows):
            raise ConfigError(
                f"{self._of}: {self._numbers.dtype} and {missing:,} rows without a value, for which whole numbers and "
                "bool have no word: leave those rows out (missing: mask in data.join those that the table does not "
                f"have, data.select='{in_condition(self._name)} is not None' all), or store floats, which have NaN"
            )

    def take(self, rows: NDArray[np.int64]) -> Array | list[str]:
        """Values of n rows of the index, -1 for padding: numbers (n,) or (n, D), or n texts."""
        if self._texts is not None:
            return self._texts.take(pa.array(rows, mask=rows < 0)).fill_null("").to_pylist()
        result = self._numbers[rows]
        result[rows < 0] = np.nan if result.dtype.kind == "f" else 0
        return result

    def _scalars(self, column: Any) -> Array:
        if pa.types.is_floating(column.type):
            return column.fill_null(np.nan).to_numpy(zero_copy_only=False)
        self._lacks = column.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_boolean(column.type):
            return column.fill_null(False).to_numpy(zero_copy_only=False)
        return column.fill_null(0).to_numpy().astype(np.int64)

    def _vectors(self, column: Any) -> Array:
        if not pa.types.is_floating(column.type.value_type):
            raise ConfigError(
                f"{self._of}: lists of {column.type.value_type}; known are {_KNOWN}: store the lists as texts "
                "(JSON), or numbers as floats"
            )
        lengths = compute.list_value_length(column).drop_null()
        if len(set(found := lengths.unique().to_pylist())) != 1:
            shown = " and ".join(str(length) for length in sorted(found)[:2])
            raise ConfigError(f"{self._of}: vectors of different lengths, such as {shown}; a batch needs one length")
        numbers = column.drop_null().flatten()
        if numbers.null_count:
            raise ConfigError(f"{self._of}: {numbers.null_count:,} places of its vectors are null; store NaN there")
        vectors = np.full((len(column), found[0]), np.nan, numbers.type.to_pandas_dtype())
        vectors[column.is_valid().to_numpy(zero_copy_only=False)] = numbers.to_numpy().reshape(-1, found[0])
        return vectors
