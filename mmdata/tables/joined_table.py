"""A table for the rows of an index: matched by key, missing where the table has no such key.

A table is matched once. What was found is kept in a file beside the index, with digests of both: a table that changed
since is refused, as other ranks or a run that is resumed may have read what it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import JoinConfig
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.index.index import Index
from mmdata.tables.captions import TableCaptions
from mmdata.tables.digests import LAYOUT
from mmdata.tables.match import first_twice, match, warn_of_shared_keys
from mmdata.tables.parts import parts_of
from mmdata.tables.place import name_of_join
from mmdata.tables.stored import Arrays, Keep, MadeOf, Store
from mmdata.tables.table import Table, compute
from mmdata.tables.values import Values

logger = logging.getLogger("mmdata")

VERSION = 1
"""Of the files of joins; raise it when their content changes, or when captions are cleaned in another way."""

Ints = NDArray[np.int64]


class JoinedTable:
    """A table, and its row for each row of an index.

    Args:
        settings: of the table.
        index: whose rows get the columns.
        store: keeps what was matched and counted.
        of: name of the setting, for messages.
        datasets: what `data.shards` calls the datasets of the index, in its order.

    Attributes:
        of: as given.
        names: of the columns that come to a sample: all but the keys.
        leaves_out: whether rows that the table does not have are not loaded.
        table_rows: int64 (len(index),), -1 where the table has no row with the key.
        path: of the file that keeps them; None if no folder can be written.

    Raises:
        ConfigError: a key comes twice, no row of the index has one of the keys, rows without one are an error, or
            there is no such dataset.
        DataError: a file is damaged, or has changed since it was joined.
    """

    def __init__(
        self, settings: JoinConfig, index: Index, store: Store, *, of: str, datasets: Sequence[str] = ()
    ) -> None:
        given = settings.table
        self._parts = list(parts_of(given, index, datasets, of=of))
        self._table = Table([file for part in self._parts for file in part.files], of=of, key=settings.key)
        self._store, self._index, self._given_key = store, index, settings.key
        self.names = [name for name in self._table.names if name != self._table.key]
        self.of = of
        self.leaves_out = settings.missing == "mask"
        self._starts = index.starts
        self._name = name_of_join(self._table, index, sorted(given) if isinstance(given, dict) else ())
        self._checked: set[str] = set()
        found = store.get(self._name, self._fits, self._match)
        self._made_of, self.path = found.made_of, found.path
        self.table_rows = found.arrays["rows"].astype(np.int64)
        self._check_missing(settings.missing)
        if not isinstance(given, dict):
            warn_of_shared_keys(self.table_rows, index, of=self.of, what="the table")
        self._columns: dict[str, Any] = {}

    def __str__(self) -> str:
        return str(self._table)

    def has_rows(self, shard: int) -> NDArray[np.bool_]:
        """Whether the table has each row of a shard; all of them where it is for other datasets."""
        rows = self.table_rows[self._starts[shard] : self._starts[shard + 1]]
        return rows >= 0 if self._is_for(shard) else np.ones(len(rows), np.bool_)

    @property
    def types(self) -> dict[str, Any]:
        """Arrow's types of the columns, by name."""
        return {name: self._table.types[name] for name in self.names}

    def of_shard(self, shard: int, name: str) -> Any:
        """A column for the rows of a shard, an Arrow array; null where a row has no value."""
        rows = self.table_rows[self._starts[shard] : self._starts[shard + 1]]
        return self._column(name).take(pa.array(rows, mask=rows < 0))

    def values(self, name: str, *, of: str) -> Values:
        """A column as batches take it; `of`: name of the setting, for messages."""
        column, keep = self._column(name), self._keep(name)
        return Values(column, self.table_rows, name=name, of=of, keep=keep)

    def captions(self, name: str, *, of: str) -> TableCaptions:
        """A column as captions; `of`: name of the setting, for messages."""
        column, keep = self._read(name), self._keep(name)
        return TableCaptions(column, self.table_rows, place=self._table.place, of=of, keep=keep)

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            values = self._read(name)
            if pa.types.is_string(values.type):  # as one array of more than 2 GB, too
                values = values.cast(pa.large_string())
            values = values.combine_chunks()
            if pa.types.is_uint64(values.type) and (compute.max(values).as_py() or 0) >= 2**63:
                raise ConfigError(f"{self.of}: column '{name}' has whole numbers above 2^63 - 1: store them as texts")
            self._columns[name] = values
        return self._columns[name]

    def _read(self, name: str) -> Any:
        """A column of the table, if it is as it was when the table was joined."""
        column = self._table.column(name)
        if name not in self._checked:
            self._check(self._made_of, [name])
        return column

    def _match(self) -> tuple[MadeOf, Arrays]:
        """The rows of the table, and what they depend on."""
        table = self._table
        digests = table.digests(table.names)
        rows, count = np.full(len(self._index), -1, np.int64), 0
        for part in self._parts:
            keys = table.keys() if len(self._parts) == 1 else Table(part.files, of=self.of, key=self._given_key).keys()
            if (twice := first_twice(keys)) is not None:
                places = " and ".join(table.place(count + row) for row in twice)
                raise ConfigError(f"{self.of}: the key '{keys[twice[0]].as_py()}' comes twice: in {places}")
            for shards in part.shards:
                found = match(keys, self._index, shards=shards)[slice(*self._starts[list(shards)])]
                if len(found) and not (found >= 0).any():
                    like = next((key for key in keys.to_pylist() if key is not None), "none")
                    first = self._index.keys(self._starts[[shards[0]]])[0]
                    missing = self._missing(len(found), len(found))
                    raise ConfigError(
                        f"{missing}: keys are like '{first}', and those of the table like '{like}'{table.key_hint}"
                    )
                rows[slice(*self._starts[list(shards)])] = np.where(found < 0, -1, found + count)
            count += len(keys)
        if table.digests([table.key]) != {name: digests[name] for name in (LAYOUT, table.key)}:
            raise DataError(f"{self.of}: {table} changed while it was joined; run this again when it is written")
        self._checked.update(table.names)
        made_of = {
            "version": VERSION,
            "index": self._index.fingerprint,
            "table": table.words,
            "key": table.key,
            "digests": digests,
        }
        return made_of, {"rows": rows.astype(np.int32) if count < 2**31 else rows}

    def _fits(self, made_of: MadeOf) -> bool:
        """Whether a join is of this index; raises DataError if it is, and the table has changed since."""
        if (made_of["version"], made_of["index"]) != (VERSION, self._index.fingerprint):
            return False
        try:
            # Other columns are compared when they are asked for, unless all are to be as they are now.
            self._check(made_of, self._table.names if self._store.replaces else [self._table.key])
        except DataError:
            if not self._store.replaces:
                raise
            return False
        return True

    def _check(self, made_of: MadeOf, names: Sequence[str]) -> None:
        """Raise DataError if columns of the table are not as they were when it was joined."""
        was = made_of["digests"]
        if all(was.get(name) == digest for name, digest in self._table.digests(names).items()):
            self._checked.update(names)
            return
        now = self._table.digests([name for name in self._table.names if name in was])
        changed = [f"'{name}'" for name, digest in was.items() if name != LAYOUT and now.get(name) != digest]
        listed = f" (in {', '.join(changed[:3])}{', …' * (len(changed) > 3)})" if changed else ""
        raise DataError(
            f"{self.of}: {self._table} changed after it was joined with the index{listed}: join it again with "
            f"`{self._command()}`, or put back the file that was joined"
        )

    def _command(self) -> str:
        """The command that joins the table again."""
        if len(self._index.manifests) > 1 or len(self._parts) > 1:
            return "mmdata join CONFIG"
        key = f" --key {self._given_key}" if self._given_key else ""
        return f"mmdata join {self._index.manifests[0].folder} {' '.join(self._table.words)}{key}"

    def _keep(self, name: str) -> Keep:
        """Keeps arrays that are made of a column, beside the join."""
        digests: dict[str, str] = self._made_of["digests"]
        parts = [self._made_of["index"], *(digests.get(one, "") for one in (LAYOUT, self._table.key, name))]
        made_of = {"version": VERSION, "column": name, "of": parts}

        def keep(what: str, make: Callable[[], Arrays]) -> Arrays:
            file = f"{self._name}.{hash64(name.encode()) % 2**64:016x}.{what}"
            return self._store.get(file, lambda found: found == made_of, lambda: (made_of, make())).arrays

        return keep

    def _check_missing(self, policy: str) -> None:
        is_missing, rows = self.table_rows < 0, len(self._index)
        for shard in range(self._index.num_shards):
            if not self._is_for(shard):
                is_missing[self._starts[shard] : self._starts[shard + 1]] = False
                rows -= int(self._starts[shard + 1] - self._starts[shard])
        if not (missing := int(is_missing.sum())):
            return
        if policy == "error":
            first = self._index.keys(np.flatnonzero(is_missing)[:1])[0]
            raise ConfigError(
                f"{self._missing(missing, rows)}, such as '{first}'; leave them out (missing: mask) or keep them "
                "(missing: keep)"
            )
        logger.warning("%s", self._missing(missing, rows))

    def _missing(self, count: int, rows: int) -> str:
        return f"{self.of}: {count:,} of {rows:,} rows have no row in {self._table}"

    def _is_for(self, shard: int) -> bool:
        """Whether the table is for the dataset of a shard."""
        return any(first <= shard < last for part in self._parts for first, last in part.shards)
