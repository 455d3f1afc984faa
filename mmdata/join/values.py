"""The values of a table's column for rows of an index, as batches take them."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.join.stored import Arrays, Keep, make_anew
from mmdata.join.table import compute

Array = NDArray[Any]

CHUNK = 2**14
"""Rows that are fingerprinted at a time."""


class Values:
    """Numbers, vectors of one length, or texts.

    A row without a value has NaN in a column of floats (also in each place of a vector), and "" in one of texts. Whole
    numbers and bool have no such word, so all rows must have one; padding is 0 or False then, as `valid` says.

    Args:
        column: an Arrow array (n,).
        table_rows: int64 (num_rows,), the row of the column for each row of the index, -1 where there is none.
        has_all: no row is loaded that the table does not have.
        name: of the column, for messages.
        of: name of the setting, for messages.
        keep: keeps the fingerprint.

    Attributes:
        fingerprint: equal for equal values of the index's rows, in whatever order the table has them; made when it is
            first asked for.

    Raises:
        ConfigError: values of another type, vectors of different lengths, or whole numbers that rows lack.
    """

    def __init__(
        self,
        column: Any,
        table_rows: NDArray[np.int64],
        *,
        has_all: bool,
        name: str,
        of: str,
        keep: Keep = make_anew,
    ) -> None:
        self._keep = keep
        self._of = f"{of}: column '{name}'"
        self._rows = table_rows
        self._texts: Any = None
        self._numbers: Array = np.empty(0)
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            self._texts = column.fill_null("")
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            self._numbers = self._vectors(column)
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind):
            self._numbers = self._scalars(column, has_all=has_all)
        else:
            raise ConfigError(f"{self._of}: values of type {kind}; known are numbers, vectors of them, and texts")

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
        return self._keep("values", self._make_fingerprint)["fingerprint"].tobytes().decode()

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

    def _scalars(self, column: Any, *, has_all: bool) -> Array:
        if pa.types.is_floating(column.type):
            return column.fill_null(np.nan).to_numpy(zero_copy_only=False)
        missing = (0 if has_all else int((self._rows < 0).sum())) + column.null_count
        if missing:
            raise ConfigError(
                f"{self._of}: {column.type} and {missing:,} rows without a value, for which whole numbers and "
                "bool have no word: leave those rows out (join's missing: mask), or store floats, which have NaN"
            )
        if pa.types.is_boolean(column.type):
            return column.to_numpy(zero_copy_only=False)
        return column.to_numpy().astype(np.int64)

    def _vectors(self, column: Any) -> Array:
        lengths = compute.list_value_length(column).drop_null()
        if len(set(found := lengths.unique().to_pylist())) != 1:
            shown = " and ".join(str(length) for length in sorted(found)[:2])
            raise ConfigError(f"{self._of}: vectors of different lengths, such as {shown}; a batch needs one length")
        numbers = column.drop_null().flatten()
        if not pa.types.is_floating(numbers.type) or numbers.null_count:
            raise ConfigError(f"{self._of}: vectors of {numbers.type}; known are vectors of floats without null")
        vectors = np.full((len(column), found[0]), np.nan, numbers.type.to_pandas_dtype())
        vectors[column.is_valid().to_numpy(zero_copy_only=False)] = numbers.to_numpy().reshape(-1, found[0])
        return vectors
