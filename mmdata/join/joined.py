"""Columns of tables for the rows of an index: matched by key, missing where a table has no such key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import JoinConfig
from mmdata.errors import ConfigError
from mmdata.join.captions import TableCaptions
from mmdata.join.match import check_missing, match
from mmdata.join.shards import JoinedShards
from mmdata.join.table import Table, compute, first_twice
from mmdata.join.values import Values
from mmdata.nearest import did_you_mean
from mmdata.shards.index import Index

JOINED = "join:"
"""Begins the name of a column of a joined table."""


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
        files = [settings.table] if isinstance(settings.table, str) else settings.table or []
        self._table = Table(files, of=of, key=settings.key)
        self.names = [name for name in self._table.names if name != self._table.key]
        self.of = of
        self.leaves_out = settings.missing == "mask"
        self._starts = index.starts
        keys = self._table.keys()
        if (twice := first_twice(keys)) is not None:
            places = " and ".join(map(self._table.place, twice))
            raise ConfigError(f"{of}: the key '{keys[twice[0]].as_py()}' comes twice: in {places}")
        self.table_rows = match(keys, index)
        check_missing(self.table_rows, settings.missing, keys, index, of=of, where=str(self._table), what="the table")
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

    def texts(self, shard: int, name: str) -> Any:
        """A column of texts for the rows of a shard, an Arrow array; null where a row has none."""
        rows = self.table_rows[self._starts[shard] : self._starts[shard + 1]]
        return self._column(name).take(pa.array(rows, mask=rows < 0))

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            values = self._table.column(name).combine_chunks()
            if pa.types.is_uint64(values.type) and (compute.max(values).as_py() or 0) >= 2**63:
                raise ConfigError(f"{self.of}: column '{name}' has whole numbers above 2^63 - 1: store them as texts")
            self._columns[name] = values.cast(pa.large_string()) if pa.types.is_string(values.type) else values
        return self._columns[name]


class Joined:
    """The tables and the tars that are joined with an index.

    Attributes:
        tables: in the order of the settings.
        shards: folders of tars, by name.
    """

    def __init__(self, settings: Sequence[JoinConfig], index: Index) -> None:
        places = {f"data.join.{n}": one for n, one in enumerate(settings)}
        self.tables = [JoinedTable(one, index, of=of) for of, one in places.items() if one.shards is None]
        self._by_name: dict[str, JoinedTable] = {}
        for table in self.tables:
            for name in table.names:
                if name in self._by_name:
                    before = self._by_name[name]
                    raise ConfigError(f"{table.of}: column '{name}' is in {before}, too; rename one of them")
                self._by_name[name] = table
        self.shards: dict[str, JoinedShards] = {}
        for of, one in places.items():
            if one.shards is not None and one.name is not None:
                if one.name in self.shards:
                    raise ConfigError(f"{of}: the name '{one.name}' is that of {self.shards[one.name].of}, too")
                keys = None if one.key is None else self._texts(one.key, of)
                self.shards[one.name] = JoinedShards(one.shards, one.missing, index, of=of, keys=keys)

    @property
    def parts(self) -> list[JoinedTable | JoinedShards]:
        """Tables and shards."""
        return [*self.tables, *self.shards.values()]

    def _texts(self, name: str, of: str) -> Callable[[int], Any]:
        """Gives a column of texts for the rows of a shard."""
        texts = [one for one in self.names() if self._by_name[one].kind(one) == "text"]
        if name not in texts:
            listed = ", ".join(texts) or "none"
            raise ConfigError(f"{of}: key: no column '{name}' of texts{did_you_mean(name, texts)}; there are {listed}")
        return partial(self._by_name[name].texts, name=name)

    def names(self) -> list[str]:
        """The columns of all tables."""
        return list(self._by_name)

    def table_of(self, name: str) -> JoinedTable:
        """The table that has a column."""
        return self._by_name[name]
