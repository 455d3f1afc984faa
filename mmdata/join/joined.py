"""Columns of tables for the rows of an index: matched by key, missing where a table has no such key."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import JoinConfig
from mmdata.errors import ConfigError
from mmdata.join.captions import TableCaptions
from mmdata.join.table import Table, compute, first_twice
from mmdata.join.values import Values
from mmdata.shards.index import Index

logger = logging.getLogger("mmdata")

JOINED = "join:"
"""Begins the name of a column of a joined table."""

MATCH_ROWS = 2**24
"""Rows of the index that are matched at a time: for each time, Arrow hashes all keys of the table."""

Ints = NDArray[np.int64]


class JoinedTable:
    """A table, and its row for each row of an index.

    Args:
        settings: of the table.
        index: whose rows get the columns.
        of: name of the setting, for messages.

    Attributes:
        of: as given.
        names: of the columns that come to a sample: all but the keys.
        leaves_out: whether rows that the table does not have are not loaded.
        table_rows: int64 (len(index),), -1 where the table has no row with the key.

    Raises:
        ConfigError: a key comes twice, no row of the index has one of the keys, or rows without one are an error.
        DataError: a file is damaged.
    """

    def __init__(self, settings: JoinConfig, index: Index, *, of: str) -> None:
        files = [settings.table] if isinstance(settings.table, str) else settings.table
        self._table = Table(files, of=of, key=settings.key)
        self.names = [name for name in self._table.names if name != self._table.key]
        self.of = of
        self.leaves_out = settings.missing == "mask"
        self._starts = index.starts
        keys = self._table.keys()
        if (twice := first_twice(keys)) is not None:
            places = " and ".join(map(self._table.place, twice))
            raise ConfigError(f"{of}: the key '{keys[twice[0]].as_py()}' comes twice: in {places}")
        self.table_rows = _match(keys, index)
        self._check_missing(settings.missing, keys, index)
        self._columns: dict[str, Any] = {}

    def __str__(self) -> str:
        return str(self._table)

    def has_rows(self, shard: int) -> NDArray[np.bool_]:
        """Whether the table has each row of a shard."""
        return self.table_rows[self._starts[shard] : self._starts[shard + 1]] >= 0

    def kind(self, name: str) -> Literal["number", "text"] | None:
        """What a condition may do with a column; None: nothing, such as with lists."""
        kind = self._table.types[name]
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return "number"
        return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None

    def of_shard(self, shard: int, name: str) -> NDArray[Any]:
        """A column for the rows of a shard: numbers, of which NaN is missing, or an object array, of which None is."""
        rows = self.table_rows[self._starts[shard] : self._starts[shard + 1]]
        values = self._column(name).take(pa.array(rows, mask=rows < 0))
        if self.kind(name) == "text":
            return np.array(values.to_pylist(), object)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if values.null_count:  # whole numbers above 2^53 are rounded then
            values = values.cast(pa.float64(), safe=False).fill_null(np.nan)
        return values.to_numpy()

    def values(self, name: str, *, of: str) -> Values:
        """A column as batches take it; `of`: name of the setting, for messages."""
        return Values(self._column(name), self.table_rows, has_all=self.leaves_out, name=name, of=of)

    def captions(self, name: str, *, of: str) -> TableCaptions:
        """A column as captions; `of`: name of the setting, for messages."""
        return TableCaptions(self._table.column(name), self.table_rows, place=self._table.place, of=of)

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            values = self._table.column(name).combine_chunks()
            if pa.types.is_uint64(values.type) and (compute.max(values).as_py() or 0) >= 2**63:
                raise ConfigError(f"{self.of}: column '{name}' has whole numbers above 2^63 - 1: store them as texts")
            self._columns[name] = values.cast(pa.large_string()) if pa.types.is_string(values.type) else values
        return self._columns[name]

    def _check_missing(self, policy: str, keys: Any, index: Index) -> None:
        missing = int((self.table_rows < 0).sum())
        if not missing:
            return
        first = index.keys(np.flatnonzero(self.table_rows < 0)[:1])[0]
        what = f"{self.of}: {missing:,} of {len(index):,} rows have no row in {self._table}"
        if missing == len(index):
            like = next((key for key in keys.to_pylist() if key is not None), "none")
            raise ConfigError(f"{what}: keys are like '{first}', and those of the table like '{like}'")
        if policy == "error":
            raise ConfigError(f"{what}, such as '{first}'; leave them out (missing: mask) or keep them (missing: keep)")
        logger.warning("%s", what)


class Joined:
    """The tables that are joined with an index."""

    def __init__(self, settings: Sequence[JoinConfig], index: Index) -> None:
        self.tables = [JoinedTable(one, index, of=f"data.join.{n}") for n, one in enumerate(settings)]
        self._by_name: dict[str, JoinedTable] = {}
        for table in self.tables:
            for name in table.names:
                if name in self._by_name:
                    before = self._by_name[name]
                    raise ConfigError(f"{table.of}: column '{name}' is in {before}, too; rename one of them")
                self._by_name[name] = table

    def names(self) -> list[str]:
        """The columns of all tables."""
        return list(self._by_name)

    def table_of(self, name: str) -> JoinedTable:
        """The table that has a column."""
        return self._by_name[name]


def _match(keys: Any, index: Index) -> Ints:
    """The row of the table for each row of an index, -1 where it has none."""
    found = np.full(len(index), -1, np.int64)
    known = keys.combine_chunks()
    shards = np.arange(index.num_shards)
    index.fetch_columns(shards)
    begin = 0
    while begin < index.num_shards:
        end = int(np.searchsorted(index.starts, index.starts[begin] + MATCH_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), index.num_shards)
        own = pa.chunked_array([index.shard(shard).keys.cast(pa.large_string()) for shard in range(begin, end)])
        rows = compute.index_in(own, value_set=known, skip_nulls=True)
        found[index.starts[begin] : index.starts[end]] = rows.fill_null(-1).to_numpy()
        begin = end
    return found
