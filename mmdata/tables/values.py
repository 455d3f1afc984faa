"""The values of a table's column for rows of an index, as batches take them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.tables.dates import date_kind, iso_texts
from mmdata.tables.stored import Arrays, Keep, make_anew
from mmdata.tables.table import compute, in_condition

Array = NDArray[Any]

_KNOWN = "numbers, vectors of floats, texts and dates"

CHUNK = 2**14
"""Rows that are fingerprinted at a time."""


class Values:
    """Numbers, vectors of one length, or texts; dates are texts, see `iso_texts`.

    A row without a value has NaN in a column of floats (also in each place of a vector), and "" in one of texts. Whole
    numbers and bool have no such word, so all rows that are loaded must have one (`check`); padding is 0 or False.

    Args:
        column: an Arrow array (n,).
        table_rows: int64 (num_rows,), the row of the column for each row of the index, -1 where there is none.
        name: of the column, for messages.
        of: name of the setting, for messages.
        keep: keeps the fingerprint.

    Attributes:
        fingerprint: equal for equal values of the index's rows, in whatever order the table has them; made when it is
            first asked for.

    Raises:
        ConfigError: values of another type, or vectors of different lengths.
    """

    def __init__(
        self,
        column: Any,
        table_rows: NDArray[np.int64],
        *,
        name: str,
        of: str,
        keep: Keep = make_anew,
    ) -> None:
        self._keep = keep
        self._of, self._name = f"{of}: column '{name}'", name
        self._rows = table_rows
        self._texts: Any = None
        self._numbers: Array = np.empty(0)
        self._lacks: Array | None = None  # which rows of the table have no value, where there is no word for that
        self._kept_as = "values"
        if date_kind(column.type):
            column, self._kept_as = iso_texts(column), "dates"
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
        if missing := sum(int(self._lacks[self._rows[some]].sum()) for some in rows):
            raise ConfigError(
                f"{self._of}: {self._numbers.dtype} and {missing:,} rows without a value, for which whole numbers and "
                "bool have no word: leave those rows out (missing: mask in data.join those that the table does not "
                f"have, data.select='{in_condition(self._name)} is not None' all), or store floats, which have NaN"
            )

    def take(self, rows: NDArray[np.int64]) -> Array | list[str]:
        """Values of n rows of the index, -1 for padding: numbers (n,) or (n, D), or n texts."""
        found = np.where(rows < 0, -1, self._rows[rows])
        if self._texts is not None:
            return self._texts.take(pa.array(found, mask=found < 0)).fill_null("").to_pylist()
        result = self._numbers[found]
        result[found < 0] = np.nan if result.dtype.kind == "f" else 0
        return result

    @cached_property
    def fingerprint(self) -> str:
        """See the class."""
        return self._keep(self._kept_as, self._make_fingerprint)["fingerprint"].tobytes().decode()

    def _make_fingerprint(self) -> Arrays:
        digest = xxhash.xxh3_64()
        for begin in range(0, len(self._rows), CHUNK):
            values = self.take(np.arange(begin, min(begin + CHUNK, len(self._rows))))
            if isinstance(values, list):
                digest.update(json.dumps(values).encode())
            else:
                digest.update(f"{values.dtype} {values.shape}".encode())
                digest.update(np.ascontiguousarray(values).data)
        return {"fingerprint": np.frombuffer(digest.hexdigest().encode(), np.uint8)}

    def _scalars(self, column: Any) -> Array:
        if pa.types.is_floating(column.type):
            return column.fill_null(np.nan).to_numpy(zero_copy_only=False)
        self._lacks = np.append(column.is_null().to_numpy(zero_copy_only=False), True)  # the last is row -1
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
