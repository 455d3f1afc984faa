"""The tables and the tars that are joined with an index, and their columns, aligned to its rows.

`mmdata join` matches them by key and writes the columns that the settings name into side files of the index. All others
read these, and no table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.corpus import JoinConfig, sources
from mmdata.errors import ConfigError
from mmdata.index.index import Index
from mmdata.index.side import SideFile, SideFiles, digest_of, side_name
from mmdata.nearest import meant
from mmdata.tables.arrow_values import compute, kind_of
from mmdata.tables.captions import TableCaptions, cleaned
from mmdata.tables.match import OtherKeys, check_missing, first_twice, match, warn_of_shared_keys
from mmdata.tables.shards import JoinedShards, RowKeys
from mmdata.tables.table import KeyedTable, files_in_words, find_files, take_rows
from mmdata.tables.values import ColumnValues

JOINED = "join:"
"""Begins the name of a column of a joined table."""
VERSION = 1
"""Of the side files; raise it when their content changes, or when captions are cleaned in another way."""
_TYPES = b"types"

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TablePart(NamedTuple):
    """Paths and patterns of files; and the shards whose rows they are for, pairs of the first and one past the last."""

    words: list[str]
    shards: list[tuple[int, int]]


class JoinedTable:
    """A table, and its columns for the rows of an index.

    Args:
        settings: of the table.
        index: whose rows get the columns.
        sides: the side files of the index.
        of: name of the setting, for messages.
        datasets: what `data.shards` calls the datasets of the index, in its order.

    Attributes:
        of: as given.
        types: Arrow's, of the columns that come to a sample, by name: all but the keys.
        leaves_out: whether rows that the table does not have are not loaded.
        num_found: how many rows of the index the table has.
        path: of the file that says which.

    Raises:
        ConfigError: the table is not joined; a key comes twice, no row of the index has one of the keys, rows without
            one are an error, or there is no such dataset.
        DataError: a file is damaged.
    """

    def __init__(
        self, settings: JoinConfig, index: Index, sides: SideFiles, *, of: str, datasets: Sequence[str] = ()
    ) -> None:
        self.of, self.leaves_out = of, settings.missing == "mask"
        self._key, self._index, self._sides = settings.key, index, sides
        self._parts = list(_parts_of(settings.table, index, datasets, of=of))
        self._words = [word for part in self._parts for word in part.words]
        self._files = find_files(self._words, of=of)
        statuses = [(path.name, path.stat()) for path in self._files]
        files = [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]  # there may be 100,000
        self._made_of = {"version": VERSION, "key": self._key, "files": digest_of(files)}
        others = [source.folder.identity for source in index.sources[1:]]
        named = list(settings.table) if isinstance(settings.table, dict) else []
        paths = [[*map(os.path.abspath, part.words)] for part in self._parts]
        self._name = side_name(self._words[0], paths, named, self._key, others)
        found = self._side("rows", self._which_rows)
        self.path = found.path
        self.types: dict[str, Any] = _types_of(found)
        has_row = found.array("has_row").to_numpy(zero_copy_only=False)
        self.num_found = int(np.count_nonzero(has_row))
        is_for = self._rows_of_parts()
        self._has_row: Bools = has_row | ~is_for
        check_missing(~self._has_row, int(is_for.sum()), settings.missing, index, of=of, where=str(self))
        self._columns: dict[str, SideFile] = {}

    def __str__(self) -> str:
        return files_in_words(self._files)

    def has_rows(self, shard: int) -> Bools:
        """Whether the table has each row of a shard; all of them where it is for other datasets."""
        return self._has_row[slice(*self._index.starts[shard : shard + 2].tolist())]

    def of_shard(self, shard: int, name: str) -> Any:
        """A column for the rows of a shard, an Arrow array; null where a row has no value."""
        begin, end = self._index.starts[shard : shard + 2].tolist()
        return self.column(name).array(name).slice(begin, end - begin)

    def row_keys(self, name: str) -> RowKeys:
        """A column of texts as the keys of rows in joined tars."""
        return RowKeys(partial(self.of_shard, name=name), self._name, self.column(name).fingerprint)

    def values(self, name: str, *, of: str) -> ColumnValues:
        """A column as batches take it; `of`: name of the setting, for messages."""
        found = self.column(name)
        return ColumnValues(found.array(name), found.fingerprint, name=name, of=of)

    def captions(self, name: str, *, of: str) -> TableCaptions:
        """A column as captions; `of`: name of the setting, for messages."""

        def make() -> Any:
            table, rows = self._matched
            return cleaned(take_rows(table.column(name), rows), place=lambda row: table.place(int(rows[row])), of=of)

        return TableCaptions(partial(self._side, column=name), make)

    def column(self, name: str) -> SideFile:
        """The side file of a column."""
        if name not in self._columns:
            self._columns[name] = self._side("values", partial(self._values, name), column=name)
        return self._columns[name]

    def _side(self, kind: str, make: Callable[[], Any], column: str | None = None) -> SideFile:
        """The side file of some kind that is made of the table, or of one of its columns."""
        of_column = "" if column is None else f".{digest_of(column)}"
        what = f"{self.of}: {self}" if column is None else f"{self.of}: column '{column}' of {self}"
        return self._sides.get(f"{self._name}{of_column}.{kind}", {**self._made_of, "column": column}, make, what=what)

    def _rows_of_parts(self) -> Bools:
        """The rows of the datasets that the table is for."""
        found, starts = np.zeros(len(self._index), np.bool_), self._index.starts
        for first, last in (shards for part in self._parts for shards in part.shards):
            found[starts[first] : starts[last]] = True
        return found

    @cached_property
    def _matched(self) -> tuple[KeyedTable, Ints]:
        """The table, and its row for each row of the index, -1 where it has none; only `mmdata join` asks for it."""
        table = KeyedTable(self._words, of=self.of, key=self._key)
        rows, count, index = np.full(len(self._index), -1, np.int64), 0, self._index
        for part in self._parts:
            keys = (table if len(self._parts) == 1 else KeyedTable(part.words, of=self.of, key=self._key)).keys()
            if (twice := first_twice(keys)) is not None:
                places = " and ".join(table.place(count + row) for row in twice)
                raise ConfigError(f"{self.of}: the key '{keys[twice[0]].as_py()}' comes twice: in {places}")
            other = OtherKeys(keys, self.of, str(self), "the table", table.key_hint)
            for shards in part.shards:
                found = match(other, index, lambda shard: index.shard(shard).keys, shards=shards)
                rows[slice(*index.starts[list(shards)].tolist())] = np.where(found < 0, -1, found + count)
            count += len(keys)
        if len(self._parts) == 1:
            warn_of_shared_keys(rows, index, of=self.of, what="the table")
        return table, rows

    def _which_rows(self) -> Any:
        table, rows = self._matched
        types = pa.schema([(name, kind) for name, kind in table.types.items() if name != table.key])
        schema = pa.schema([("has_row", pa.bool_())], {_TYPES: types.serialize().to_pybytes()})
        return pa.Table.from_arrays([pa.array(rows >= 0)], schema=schema)

    def _values(self, name: str) -> Any:
        table, rows = self._matched
        values = take_rows(table.column(name), rows)
        if pa.types.is_uint64(values.type) and (compute.max(values).as_py() or 0) >= 2**63:
            raise ConfigError(f"{self.of}: column '{name}' has whole numbers above 2^63 - 1: store them as texts")
        return pa.table({name: values})


class Joined:
    """The tables and the tars that are joined with an index.

    Args:
        settings: of the tables and tars.
        index: whose rows get their columns.
        datasets: what `data.shards` calls its datasets, in their order.
        cache_dir: where side files lie if the index's folder cannot be written; see `LoadingConfig.cache_dir`.
        writes: whether they are made anew: `mmdata join` alone does that.

    Attributes:
        tables: in the order of the settings.
        shards: folders of tars, by name.
    """

    def __init__(
        self,
        settings: Sequence[JoinConfig],
        index: Index,
        *,
        datasets: Sequence[str] = (),
        cache_dir: str | Path | None = None,
        writes: bool = False,
    ) -> None:
        sides = SideFiles(index, cache_dir, writes=writes)
        places = {f"data.join.{n}": one for n, one in enumerate(settings)}
        self.tables = [
            JoinedTable(one, index, sides, of=of, datasets=datasets) for of, one in places.items() if one.shards is None
        ]
        self._by_name: dict[str, JoinedTable] = {}
        for table in self.tables:
            for name in table.types:
                if name in self._by_name:
                    before = self._by_name[name]
                    raise ConfigError(f"{table.of}: column '{name}' is in {before}, too; rename one of them")
                self._by_name[name] = table
        self.shards: dict[str, JoinedShards] = {}
        for of, one in places.items():
            if one.shards is not None and one.name is not None:
                if one.name in self.shards:
                    raise ConfigError(f"{of}: the name '{one.name}' is that of {self.shards[one.name].of}, too")
                keys = None if one.key is None else self._keys(one.key, of)
                self.shards[one.name] = JoinedShards(one, index, sides, of=of, keys=keys)

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, *, writes: bool = False) -> Joined:
        """The tables and tars of a section `data`."""
        datasets = [source.shards for source in sources(data)]
        return cls(data.join, index, datasets=datasets, cache_dir=data.loading.cache_dir, writes=writes)

    @property
    def parts(self) -> list[JoinedTable | JoinedShards]:
        """Tables and shards."""
        return [*self.tables, *self.shards.values()]

    @property
    def types(self) -> dict[str, Any]:
        """Arrow's types of the columns of all tables, by name."""
        return {name: kind for table in self.tables for name, kind in table.types.items()}

    def table_of(self, name: str) -> JoinedTable:
        """The table that has a column."""
        return self._by_name[name]

    def _keys(self, name: str, of: str) -> RowKeys:
        """A column of texts as keys."""
        texts = [one for one, kind in self.types.items() if kind_of(kind) == "text"]
        if name not in texts:
            listed = ", ".join(texts) or "none"
            raise ConfigError(f"{of}: key: no column '{name}' of texts{meant(name, texts)}; there are {listed}")
        return self._by_name[name].row_keys(name)


def _parts_of(
    table: str | list[str] | dict[str, str | list[str]] | None, index: Index, datasets: Sequence[str], *, of: str
) -> Iterator[TablePart]:
    """The files of a table: all for all rows, or some for each dataset."""
    if not isinstance(table, dict):
        yield TablePart([table] if isinstance(table, str) else table or [], [(0, index.num_shards)])
        return
    for name, files in table.items():
        pairs = zip(datasets, index.sources, strict=True)
        shards = [(source.first_shard, source.last_shard) for dataset, source in pairs if dataset == name]
        if not shards:
            raise ConfigError(
                f"{of}: no dataset '{name}'{meant(name, datasets)}; data.shards has {', '.join(datasets)}"
            )
        yield TablePart([files] if isinstance(files, str) else files, shards)


def _types_of(found: SideFile) -> dict[str, Any]:
    schema = pa.ipc.read_schema(pa.py_buffer(found.columns.schema.metadata[_TYPES]))
    return dict(zip(schema.names, schema.types, strict=True))
