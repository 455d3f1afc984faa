"""Random access to the rows of many shards. Columns are read shard by shard, when first asked for."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmdata.errors import ConfigError
from mmdata.shards.cache import ShardCache
from mmdata.shards.columns import FIXED, LISTS, Columns
from mmdata.shards.folder import Folder, Location
from mmdata.shards.manifest import Manifest
from mmdata.shards.ragged import offsets_of, spans
from mmdata.shards.union import UnionManifest

OPENERS = 8
"""Threads that fetch the columns of remote shards."""
HELD_ROWS = 2**21
"""Rows whose columns stay in memory, 100 to 120 bytes each: those of two windows of the usual size.

A plan reads the shards of a window twice, and batches come from all of them, so each file is read once for all that.
"""

LONG_RUN = 16
"""Rows of one shard one after another, in the mean, that are enough to do without sorting: windows are whole shards."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class Source(NamedTuple):
    """A folder of an index: consecutive shards.

    Attributes:
        folder: where its manifest lies.
        first_shard: number of its first shard.
        last_shard: number of the shard after its last.
    """

    folder: Folder
    first_shard: int
    last_shard: int


class _ByShard(NamedTuple):
    """Rows of an index, those of a shard together.

    Attributes:
        order: puts the rows that were asked for together, (n,); None: they stand so, in long runs.
        parts: shards; each with its part of the rows in that order, and with their numbers within the shard, (k,) or a
            slice. In long runs a shard may have several parts.
    """

    order: Rows | None
    parts: list[tuple[int, slice, Rows | slice]]

    def as_asked(self, values: Array) -> Array:
        """Values (n,) in that order, brought back into the order in which the rows were asked for."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result


class Index:
    """The rows of a folder of shards, numbered 0 … len−1 in manifest order. Safe to share between threads.

    Those of several folders are numbered one folder after the other.

    Attributes:
        manifest: the list of shards.
        held_rows: rows whose columns are kept; those of the shards used least recently make room.
    """

    def __init__(self, manifest: Manifest | UnionManifest) -> None:
        self.manifest = manifest
        self.held_rows = HELD_ROWS
        self._open: OrderedDict[int, Columns] = OrderedDict()
        self._rows_open = 0
        self._checksums: dict[int, int] = {}  # of the files that were opened; 0 as long as they are
        self._lock = Lock()

    @classmethod
    def open(cls, folder: Location | Sequence[Location], *, cache: ShardCache | None = None) -> Index:
        """Open the index of a folder, or of several as one.

        Of one folder manifest.json is read and nothing else; of several the pages too, to compare their shards.

        Args:
            folder: a folder or a URL (http, https, s3, gs, hf, file and others that fsspec opens), or several.
            cache: where files behind URLs are kept; default: 100 GB in the user's folder of caches.

        Raises:
            DataError: no manifest, a damaged one, or one of another schema; or it cannot be fetched.
            ConfigError: a command, no folder at all, a folder twice, the same shard in two of them, no credentials.
        """
        folders = [folder] if isinstance(folder, (str, os.PathLike)) else list(folder)
        if not folders:
            raise ConfigError("an index of no folder: give one with a manifest, or several")
        parts = [Manifest.read(name, cache) for name in folders]
        return cls(parts[0] if len(parts) == 1 else UnionManifest(parts))

    def __len__(self) -> int:
        return self.manifest.rows

    @cached_property
    def starts(self) -> Rows:
        """The first row of each shard, and `len(index)`: int64 (num_shards + 1,); reads the manifest's pages."""
        return offsets_of(self.manifest.shard_rows)

    @cached_property
    def sources(self) -> list[Source]:
        """The folders, in their order, each with its shards; one with the shards 0 … num_shards−1 for a plain index."""
        parts = self.manifest.parts
        ends = offsets_of(np.array([part.num_shards for part in parts], np.int64)).tolist()
        return [Source(part.folder, *span) for part, span in zip(parts, pairwise(ends), strict=True)]

    @property
    def fingerprint(self) -> str:
        """The manifest's root hash: equal for equal rows in equal order, tokenizer included, wherever they lie."""
        return self.manifest.root

    @cached_property
    def caches(self) -> list[ShardCache]:
        """Of the folders behind URLs, each once."""
        found = [part.folder.cache for part in self.manifest.parts]
        return list({id(cache): cache for cache in found if cache is not None}.values())

    def shard_path(self, shard: int) -> Path:
        """Path of the tar; of one behind a URL, that in the cache, fetched first and removed when room is needed."""
        part, local = self.manifest.part(shard)
        return part.shard_path(local)

    def shard_place(self, shard: int) -> str:
        """Path or URL of the tar, for messages."""
        part, local = self.manifest.part(shard)
        return part.shard_place(local)

    def shard_name(self, shard: int) -> str:
        """For messages: the tar's name, with its folder where there are several."""
        part, local = self.manifest.part(shard)
        name = part.listed(local).name
        return name if len(self.manifest.parts) == 1 else f"{part.folder}/{name}"

    def shard(self, shard: int) -> Columns:
        """One shard's columns; hashed against the manifest, and their values checked, the first time.

        Raises:
            DataError: the index file is missing, not the one that the manifest names, or holds impossible values.
        """
        with self._lock:
            if (columns := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return columns
        part, local = self.manifest.part(shard)
        columns = part.columns(local, checksum=self._checksums.get(shard, 0))
        with self._lock:
            self._checksums.setdefault(shard, 0)
            if shard not in self._open:  # another thread may have opened it meanwhile
                self._open[shard] = columns
                self._rows_open += len(columns)
            while self._rows_open > self.held_rows and len(self._open) > 1:
                dropped, columns_dropped = self._open.popitem(last=False)
                self._checksums[dropped] = columns_dropped.checksum
                self._rows_open -= len(columns_dropped)
        return columns

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        """Shard numbers (n,) and rows within those shards (n,).

        Raises:
            IndexError: a row outside 0 … len−1.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} asked of an index of {len(self)}")
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        return shards, rows - self.starts[shards]

    def take(self, rows: Rows, names: Sequence[str]) -> dict[str, Array]:
        """Values of some rows, in the order asked: name -> (n,); names are those of `columns.FIXED`."""
        _check_names(names, FIXED)
        wanted = self._by_shard(rows)
        result: dict[str, Array] = {name: np.empty(len(rows), FIXED[name]) for name in names}
        for shard, part, local in wanted.parts:
            columns = self.shard(shard)
            for name, values in result.items():
                values[part] = columns.fixed(name)[local]
        return {name: wanted.as_asked(values) for name, values in result.items()}

    def take_lists(self, rows: Rows, name: str) -> tuple[Rows, Array]:
        """Lists of some rows, in the order asked: offsets (n + 1,) and values; names are those of `columns.LISTS`."""
        _check_names([name], LISTS)
        wanted = self._by_shard(rows)
        lengths = np.empty(len(rows), np.int64)
        found: list[Array] = [np.empty(0, LISTS[name])]
        for shard, part, local in wanted.parts:
            offsets, values = self.shard(shard).lists(name)
            begins, ends = offsets[:-1][local], offsets[1:][local]
            np.subtract(ends, begins, out=lengths[part])
            if isinstance(local, slice):
                found.append(values[begins[0] : ends[-1]])
            else:
                found.append(values[spans(begins, lengths[part])])
        values, result_offsets = np.concatenate(found), offsets_of(wanted.as_asked(lengths))
        if wanted.order is None:
            return result_offsets, values
        result = np.empty_like(values)
        result[spans(result_offsets[wanted.order], lengths)] = values
        return result_offsets, result

    def keys(self, rows: Rows) -> list[str]:
        """Keys of some rows, in the order asked."""
        wanted = self._by_shard(rows)
        found: list[str] = []
        for shard, _, local in wanted.parts:
            found += self.shard(shard).keys_of(local)
        return wanted.as_asked(np.array(found, object)).tolist()

    def column(self, name: str) -> Array:
        """A whole column (len,), copied: 1 to 8 bytes a row."""
        _check_names([name], FIXED)
        self._fetch_columns(np.arange(self.manifest.num_shards))
        parts = [self.shard(shard).fixed(name) for shard in range(self.manifest.num_shards)]
        return np.concatenate([np.empty(0, FIXED[name]), *parts])

    def lists(self, name: str) -> tuple[Rows, Array]:
        """A whole list column, copied: offsets (len + 1,) and values."""
        _check_names([name], LISTS)
        self._fetch_columns(np.arange(self.manifest.num_shards))
        parts = [self.shard(shard).lists(name) for shard in range(self.manifest.num_shards)]
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for offsets, _ in parts)])
        values = np.concatenate([np.empty(0, LISTS[name]), *(values for _, values in parts)])
        return offsets_of(lengths), values

    def _by_shard(self, rows: Rows) -> _ByShard:
        """Rows put together by shard; columns of shards behind URLs have been fetched."""
        shards, local = self.locate(rows)
        self._fetch_columns(shards)
        order, cuts = None, np.flatnonzero(np.diff(shards)) + 1
        if len(cuts) * LONG_RUN > len(shards):
            order = np.argsort(shards, kind="stable")
            shards, local = shards[order], local[order]
            cuts = np.flatnonzero(np.diff(shards)) + 1
        bounds = np.unique([0, *cuts.tolist(), len(shards)])
        breaks = np.searchsorted(np.flatnonzero(np.diff(local) != 1), [bounds[:-1], bounds[1:] - 1])
        parts: list[tuple[int, slice, Rows | slice]] = []
        for (a, b), one_run in zip(pairwise(bounds.tolist()), (breaks[0] == breaks[1]).tolist(), strict=True):
            within = slice(int(local[a]), int(local[a]) + b - a) if one_run else local[a:b]
            parts.append((int(shards[a]), slice(a, b), within))
        return _ByShard(order, parts)

    def _fetch_columns(self, shards: Rows) -> None:
        """Open columns that lie behind URLs, many at once: one after the other, most of the time would be waiting."""
        if not self.caches:
            return
        if len(missing := [shard for shard in np.unique(shards).tolist() if shard not in self._checksums]) > 1:
            with ThreadPoolExecutor(OPENERS) as pool:
                list(pool.map(self.shard, missing))


def _check_names(names: Sequence[str], known: dict[str, Any]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no column {unknown}; there are {list(known)}")
