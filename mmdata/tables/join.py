"""Tables, and tars in other folders, that are joined with an index by key.

`mmdata join` matches keys with rows, and writes the columns that are asked for into side files of the index. All others
read these, and no table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.corpus import JoinConfig
from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted, meant
from mmdata.index.index import Index
from mmdata.index.side import SideFile, SideFiles, digest_of, side_name
from mmdata.index.store import OpenShards, ShardStore
from mmdata.storage.folder import local_folder
from mmdata.tables.captions import TableCaptions, cleaned
from mmdata.tables.selection import shard_runs
from mmdata.tables.table import KeyedTable, find_files, in_words, take_rows
from mmdata.tables.values import compute
from mmdata.tars.captions import MAX_CAPTION_BYTES, clean_captions
from mmdata.tars.members import Selector, absent, kind_of, open_member, pick
from mmdata.tars.scan import IndexedMember

logger = logging.getLogger("mmdata")

VERSION = 2
"""Of the side files; raise it when their content changes, or when captions are cleaned in another way."""
MATCH_ROWS = 2**24
"""Rows of the index that are matched at a time: for each time, Arrow hashes all keys."""
HELD_ROWS = 2**22
"""Samples of joined tars whose columns stay in memory, some 170 bytes each: rows may have them in any order."""
_TYPES = b"types"

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Span = tuple[int, int]
"""First shard, and the shard after the last."""


@dataclass(frozen=True)
class Joining:
    """One of the settings of `data.join`, and what it is joined with.

    Attributes:
        settings: of the table or the tars.
        of: name of the setting, for messages.
        index: whose rows get the columns.
        sides: the side files of the index.
    """

    settings: JoinConfig
    of: str
    index: Index
    sides: SideFiles


class JoinedPart:
    """What is joined with an index: a table, or tars.

    Args:
        join: of the settings.
        name: begins the names of its side files.
        made_of: what they are made of, JSON.
        spans: the shards whose rows it is for.

    Attributes:
        of: name of the setting, for messages.
        missing: what becomes of rows that it does not have, see `JoinConfig`.
        path: of the file that says which rows it has.
        num_found: how many rows of the index it has.

    Raises:
        ConfigError: it is not joined; a key comes twice, no row has one of the keys, or rows without one are an error.
        DataError: a file is damaged.
    """

    def __init__(self, join: Joining, *, name: str, made_of: Mapping[str, Any], spans: Sequence[Span]) -> None:
        self.of, self.missing = join.of, join.settings.missing
        self._index, self._sides, self._name = join.index, join.sides, name
        self._made_of = {"version": VERSION, **made_of}
        self._which = self._side("rows", self._rows_found)
        self.path = self._which.path
        has_row = self._which.array("has_row").to_numpy(zero_copy_only=False)
        self.num_found = int(np.count_nonzero(has_row))
        is_for = np.zeros(len(has_row), np.bool_)
        for first, last in spans:
            is_for[self._index.starts[first] : self._index.starts[last]] = True
        self._has_row: Bools = has_row | ~is_for
        if missing := len(has_row) - int(np.count_nonzero(self._has_row)):
            self._tell_missing(missing, int(np.count_nonzero(is_for)))

    def has_rows(self, shard: int) -> Bools:
        """Whether it has each row of a shard; True for rows that it is not for."""
        return self._has_row[slice(*self._index.starts[shard : shard + 2].tolist())]

    def captions(self, column: str, *, of: str) -> TableCaptions:
        """A column of a table, or a member of tars, as captions; `of`: name of the setting, for messages.

        Raises:
            ConfigError: it holds no texts, or is not joined.
        """

        def make() -> Any:
            values, rows = self._texts(column, of), self._matched
            return cleaned(take_rows(values, rows), place=lambda row: self._place(int(rows[row])), of=of)

        return TableCaptions(partial(self._side, column=column), make)

    def _side(self, kind: str, make: Callable[[], Any], column: str | None = None) -> SideFile:
        """The side file of some kind that is made of all that is joined, or of one column."""
        of_column = "" if column is None else f".{digest_of(column)}"
        what = f"{self.of}: {self}" if column is None else f"{self.of}: column '{column}' of {self}"
        return self._sides.get(f"{self._name}{of_column}.{kind}", {**self._made_of, "column": column}, make, what=what)

    def _tell_missing(self, missing: int, num_rows: int) -> None:
        said = f"{self.of}: {missing:,} of {num_rows:,} rows have no row in {self}"
        if self.missing == "error":
            first = self._index.keys(np.flatnonzero(~self._has_row)[:1])[0]
            raise ConfigError(f"{said}, such as '{first}'; leave them out (missing: mask) or keep them (missing: keep)")
        logger.warning("%s", said)

    # What follows is asked for by `mmdata join` alone.

    def _keys(self) -> Iterator[tuple[Any, Sequence[Span], str]]:
        """Its keys, Arrow texts; the shards that they are for; and what may be wrong with them, for messages."""
        raise NotImplementedError

    def _keys_of(self, shard: int) -> Any:
        """The keys that the rows of a shard have in it, Arrow texts; null where a row has none."""
        return self._index.shard(shard).keys

    def _place(self, row: int) -> str:
        """File and place of one of its rows, for messages."""
        raise NotImplementedError

    def _texts(self, column: str, of: str) -> Any:
        """The captions of its rows: texts, or lists of them."""
        raise NotImplementedError

    def _rows_found(self) -> Any:
        """The table that says which rows of the index it has."""
        return pa.table({"has_row": self._matched >= 0})

    @cached_property
    def _matched(self) -> Ints:
        """Its row for each row of the index, -1 where it has none: int64 (len(index),)."""
        starts, rows, count = self._index.starts, np.full(len(self._index), -1, np.int64), 0
        for keys, spans, hint in self._keys():
            if (twice := _first_twice(keys)) is not None:
                places = " and ".join(self._place(count + row) for row in twice)
                key = keys[twice[0]].as_py()
                raise ConfigError(f"{self.of}: the key '{key}' comes twice: in {places}")
            for first, last in spans:
                found = self._places(keys, first, last, hint)
                rows[starts[first] : starts[last]] = np.where(found < 0, -1, found + count)
            count += len(keys)
        self._warn_of_shared_keys(rows)
        return rows

    def _places(self, keys: Any, first: int, last: int, hint: str) -> Ints:
        """The place of the key of each row of some shards among keys, -1 where it is not there: int64 (rows,)."""
        found, known, example = [np.empty(0, np.int64)], keys.combine_chunks(), None
        self._index.fetch_columns(np.arange(first, last))
        for begin, end in shard_runs(self._index.starts[first : last + 1], MATCH_ROWS):
            texts = pa.chunked_array(
                [self._keys_of(first + shard).cast(pa.large_string()) for shard in range(begin, end)]
            )
            rows = compute.index_in(texts, value_set=known, skip_nulls=True)
            found.append(rows.fill_null(-1).to_numpy())
            example = example or _first(texts)
        result = np.concatenate(found)
        if len(result) and not (result >= 0).any():
            raise ConfigError(
                f"{self.of}: {len(result):,} of {len(result):,} rows have no row in it: keys are like '{example}', "
                f"and those of {self} like '{_first(known)}'{hint}"
            )
        return result

    def _warn_of_shared_keys(self, found: Ints) -> None:
        """Warn where rows of several datasets get the same rows: `mmdata convert` numbers the keys of each from 0."""
        taken = np.zeros(int(found.max(initial=-1)) + 1, np.bool_)
        for source in self._index.sources:
            places = found[self._index.starts[source.first_shard] : self._index.starts[source.last_shard]]
            places = places[places >= 0]
            if twice := int(taken[places].sum()):
                said = f"{self.of}: {twice:,} rows of '{source.folder}' have keys that rows of another dataset have too"
                logger.warning(
                    "%s, and get the same rows of %s: that is right only if they are the same samples (`mmdata "
                    "convert` numbers each dataset from 0); a table for each dataset is data.join: [{table: {FOLDER: "
                    "FILE}}]",
                    said,
                    self,
                )
            taken[places] = True


class JoinedTable(JoinedPart):
    """A table, and its columns for the rows of an index.

    Args:
        join: of the settings.
        datasets: what `data.shards` calls the datasets of the index, in its order.

    Attributes:
        types: Arrow's, of the columns that come to a sample, by name: all but the keys.
    """

    def __init__(self, join: Joining, datasets: Sequence[str] = ()) -> None:
        self._key, self._parts = join.settings.key, list(_parts_of(join, datasets))
        self._words = [word for _, words, _ in self._parts for word in words]
        self._files = find_files(self._words, of=join.of)
        statuses = [(path.name, path.stat()) for path in self._files]
        files = [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]  # there may be 100,000
        paths = [[dataset, *map(os.path.abspath, words)] for dataset, words, _ in self._parts]
        others = [source.folder.identity for source in join.index.sources[1:]]
        name = side_name(self._words[0], paths, self._key, others)
        spans = [span for _, _, spans in self._parts for span in spans]
        super().__init__(join, name=name, made_of={"key": self._key, "files": digest_of(files)}, spans=spans)
        types = pa.ipc.read_schema(pa.py_buffer(self._which.columns.schema.metadata[_TYPES]))
        self.types: dict[str, Any] = dict(zip(types.names, types.types, strict=True))
        self._columns: dict[str, SideFile] = {}

    def __str__(self) -> str:
        return in_words(self._files)

    def of_shard(self, shard: int, name: str) -> Any:
        """A column for the rows of a shard, an Arrow array; null where a row has no value."""
        begin, end = self._index.starts[shard : shard + 2].tolist()
        return self.column(name).array(name).slice(begin, end - begin)

    def column(self, name: str) -> SideFile:
        """The side file of a column."""
        if name not in self._columns:
            self._columns[name] = self._side("values", partial(self._values, name), column=name)
        return self._columns[name]

    @cached_property
    def _table(self) -> KeyedTable:
        return KeyedTable(self._words, of=self.of, key=self._key)

    def _keys(self) -> Iterator[tuple[Any, Sequence[Span], str]]:
        for _, words, spans in self._parts:
            table = self._table if len(self._parts) == 1 else KeyedTable(words, of=self.of, key=self._key)
            yield table.keys(), spans, table.key_hint

    def _place(self, row: int) -> str:
        return self._table.place(row)

    def _texts(self, column: str, of: str) -> Any:
        return self._table.column(column)

    def _rows_found(self) -> Any:
        types = pa.schema([(name, kind) for name, kind in self._table.types.items() if name != self._table.key])
        return super()._rows_found().replace_schema_metadata({_TYPES: types.serialize().to_pybytes()})

    def _values(self, name: str) -> Any:
        values = take_rows(self._table.column(name), self._matched)
        if pa.types.is_uint64(values.type) and (compute.max(values).as_py() or 0) >= 2**63:
            raise ConfigError(f"{self.of}: column '{name}' has whole numbers above 2^63 - 1: store them as texts")
        return pa.table({name: values})


class JoinedShards(JoinedPart):
    """Tars, and their sample for each row of an index. Safe to share between threads.

    Args:
        join: of the settings.
        keys: the table, and its column, that has the rows' keys in these tars; None: they are the rows' own.

    Attributes:
        fingerprint: equal for the same samples at the same rows.
    """

    def __init__(self, join: Joining, keys: tuple[JoinedTable, str] | None = None) -> None:
        assert join.settings.shards is not None, "it is no table"
        self._folder, self._own_keys = join.settings.shards, keys
        local_folder(self._folder)
        try:
            self._known = Index.open(self._folder)
        except DataError as error:
            raise DataError(f"{join.of}: {error}") from error
        self._known.held_rows = HELD_ROWS
        self._shards = ShardStore(self._known)
        table, column = keys or (None, "")
        name = side_name(self._folder, os.path.abspath(self._folder), column, table and table.path.name)
        made_of = {"samples": self._known.fingerprint, "keys": table and table.column(column).fingerprint}
        super().__init__(join, name=name, made_of=made_of, spans=[(0, join.index.num_shards)])
        self.fingerprint = digest_of(self._known.fingerprint, self._which.fingerprint)
        # (num_rows,), the sample of each row, -1 where there is none
        self._samples: Ints = self._which.array("sample").to_numpy()

    def __str__(self) -> str:
        return f"'{self._folder}'"

    @property
    def open_shards(self) -> OpenShards:
        """The tars that stay open."""
        return self._shards.open_shards

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row's sample, by extension.

        Raises:
            BadSample: the tars have no sample of the row.
        """
        if (sample := int(self._samples[row])) < 0:
            raise BadSample(Reason.MISSING_FIELD, f"no sample of the row's key in {self}")
        return self._shards.members(sample)

    def read_member(self, row: int, member: IndexedMember, stop: Event) -> bytes:
        """The bytes of a member of a row's sample; see `ShardStore.read_member`."""
        return self._shards.read_member(int(self._samples[row]), member, stop)

    def key(self, row: int) -> str:
        """The key of a row's sample in these tars."""
        return self._shards.key(int(self._samples[row]))

    def place(self, row: int) -> str:
        """Tar and sample of a row, for messages."""
        sample = int(self._samples[row])
        return str(self) if sample < 0 else self._shards.place(sample)

    def _keys(self) -> Iterator[tuple[Any, Sequence[Span], str]]:
        shards = map(self._known.shard, range(self._known.num_shards))
        # Copied, so that other columns need not stay in memory.
        keys = [columns.keys.take(pa.array(np.arange(len(columns)))) for columns in shards]
        yield pa.chunked_array(keys, pa.string()).cast(pa.large_string()), [(0, self._index.num_shards)], ""

    def _keys_of(self, shard: int) -> Any:
        if self._own_keys is None:
            return super()._keys_of(shard)
        table, column = self._own_keys
        return table.of_shard(shard, column)

    def _place(self, row: int) -> str:
        return self._shards.place(row)

    def _rows_found(self) -> Any:
        return super()._rows_found().append_column("sample", [self._matched])

    def _texts(self, column: str, of: str) -> Any:
        selector = Selector.parse(column)
        kind = kind_of(selector, of=of)
        if kind not in ("json", "txt") or (kind == "json" and not selector.key):
            raise ConfigError(f"{of}: '{selector}': captions are in json:KEY or txt")
        texts: list[list[str] | None] = [None] * len(self._known)
        samples = np.unique(self._samples[self._samples >= 0]).tolist()
        lacking, first = 0, ""
        for sample in samples:
            try:
                texts[sample] = self._captions_of(sample, selector, kind)
            except BadSample as bad:
                lacking += 1
                first = first or f"{self._shards.place(sample)}: {bad}"
        if lacking == len(samples):
            raise ConfigError(f"{of}: none of {counted(len(samples), 'sample')} has a caption in {selector}: {first}")
        if lacking:
            logger.warning("%s: %s without a caption in it; the first: %s", of, counted(lacking, "sample"), first)
        return pa.chunked_array([pa.array(texts, pa.large_list(pa.large_string()))])

    def _captions_of(self, sample: int, selector: Selector, kind: str) -> list[str]:
        """The captions of a sample, at least one; raises BadSample."""
        member = self._shards.members(sample).get(selector.extension)
        if member is None:
            raise BadSample(Reason.MISSING_FIELD, f"no member .{selector.extension}")
        if member.size > MAX_CAPTION_BYTES:
            raise BadSample(Reason.CAPTION_TOO_LONG, f"{member.size} bytes; at most {MAX_CAPTION_BYTES}")
        opened = open_member(self._shards.read_member(sample, member, Event()), kind)
        if (value := pick(opened, selector)) is None:
            raise BadSample(Reason.MISSING_FIELD, absent(selector, opened))
        return clean_captions(value)[0]


def _parts_of(join: Joining, datasets: Sequence[str]) -> Iterator[tuple[str, list[str], list[Span]]]:
    """Of each dataset that has files of a table: its name, these files, and its shards; or all files for all shards."""
    table, sources = join.settings.table, join.index.sources
    if not isinstance(table, dict):
        yield "", [table] if isinstance(table, str) else table or [], [(0, join.index.num_shards)]
        return
    for name, files in table.items():
        own = (source for dataset, source in zip(datasets, sources, strict=True) if dataset == name)
        if not (spans := [(source.first_shard, source.last_shard) for source in own]):
            listed = ", ".join(datasets)
            raise ConfigError(f"{join.of}: no dataset '{name}'{meant(name, datasets)}; data.shards has {listed}")
        yield name, [files] if isinstance(files, str) else files, spans


def _first_twice(keys: Any) -> tuple[int, int] | None:
    """The first two rows that have the same key; None if no key comes twice."""
    rows = np.arange(len(keys))
    firsts = compute.index_in(keys, value_set=keys.combine_chunks(), skip_nulls=True)
    again = np.flatnonzero(compute.not_equal(firsts, pa.array(rows, pa.int32())).fill_null(False))
    return (firsts[int(again[0])].as_py(), int(again[0])) if len(again) else None


def _first(keys: Any) -> str | None:
    """The first key that is not null."""
    return next(iter(keys.drop_null().slice(0, 1).to_pylist()), None)
