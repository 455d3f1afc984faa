"""Random access to the rows of many shards. A shard's columns are read when first asked for."""

from __future__ import annotations

import hashlib
import operator
import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmdata.errors import ConfigError
from mmdata.index.columns import FIXED, LISTS, Histograms, ShardColumns, offsets_of, spans
from mmdata.index.manifest import Manifest
from mmdata.index.sample import IndexedSample, row_of_key
from mmdata.index.store import OpenShard, ShardStore
from mmdata.processes import new_lock
from mmdata.storage.cache import ShardCache
from mmdata.storage.folder import Folder, ListedShard, Location

OPENERS = 8
"""Threads that fetch the columns of shards behind URLs."""
HELD_ROWS = 2**21
"""Rows whose columns stay in memory, about 140 bytes each: two windows of the default size.

A plan reads the shards of a window twice, and a window's batches need all of them: with the columns in memory, each
index file is read once.
"""

LONG_RUN = 16
"""Rows are not sorted where runs of rows of the same shard have at least this mean length, as in a window of shards."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_ONCE = "use weight or repeat instead of listing a dataset twice"


SHOWN = [
    *("bytes", "captions", "class_names", "column", "fingerprint", "has_captions", "has_images", "has_labels", "keys"),
    *("lists", "locate", "manifests", "num_shards", "open", "sample", "shard_path", "take", "take_lists", "tokenizer"),
]
"""What `dir(index)` and tab completion show: what users call. The other names are for mmdata's own parts."""


class ShardsOfFolder(NamedTuple):
    """A folder of an index, and its shards.

    Attributes:
        folder: with the manifest.
        first_shard: number of its first shard.
        last_shard: number behind its last shard.
    """

    folder: Folder
    first_shard: int
    last_shard: int


class Index:
    """The rows of one or more folders of shards, numbered 0 … len−1: folder by folder, each in manifest order.

    Safe to share between threads.

    Args:
        manifests: of the folders, at least one.

    Attributes:
        manifests: as given.
        num_shards, bytes, captions: summed over the folders.
        has_images: whether the rows have images.
        has_labels: whether any row has a label.
        has_captions: whether the rows have captions; False if any of the folders holds labels only.
        tokenizer: fingerprint of the tokenizer that counted the captions of all folders with rows; None if there is no
            such tokenizer.
        fingerprint: equal for equal rows in equal order, tokenizer included, wherever the folders lie. For one folder
            it is the manifest's root hash.
        held_rows: rows whose columns are kept; those of the shards used least recently make room.

    Raises:
        ConfigError: two manifests are of the same folder, or list the same shard.
        DataError: a list of shards is missing or damaged.

    Example:
        Of folders with 3 and 2 shards, shards 0, 1 and 2 are the first folder's and 3 and 4 the second's:
        Index(first, second).part(4) == (second, 1)
    """

    def __init__(self, *manifests: Manifest) -> None:
        for given in cast("tuple[object, ...]", manifests):
            if not isinstance(given, Manifest):
                raise TypeError(f"an index is opened from its folder: mmdata.Index.open({given!r})")
        if len(manifests) > 1:
            _check_folders_differ(manifests)
            _check_shards_differ(manifests)
        self.manifests = list(manifests)
        self.num_shards = sum(manifest.num_shards for manifest in manifests)
        self.bytes = sum(manifest.bytes for manifest in manifests)
        self.captions = sum(manifest.captions for manifest in manifests)
        self.has_images = all(manifest.has_images for manifest in manifests)
        self.has_labels = any(manifest.has_labels for manifest in manifests)
        self.has_captions = all(manifest.has_captions for manifest in manifests)
        tokenizers = {manifest.tokenizer for manifest in [part for part in manifests if part.rows] or manifests}
        self.tokenizer = tokenizers.pop() if len(tokenizers) == 1 else None
        roots = "\n".join(manifest.root for manifest in manifests)
        self.fingerprint = roots if len(manifests) == 1 else hashlib.sha256(roots.encode()).hexdigest()
        self._num_rows = sum(manifest.rows for manifest in manifests)
        self._first_shards = [0, *accumulate(manifest.num_shards for manifest in manifests)]
        self.held_rows = HELD_ROWS
        self._open: OrderedDict[int, ShardColumns] = OrderedDict()
        self._rows_open = 0
        self._was_read: set[int] = set()
        self._lock = new_lock()
        # A weak reference: a store refers to its index, and its files must close when the last sample is gone.
        self._store: Callable[[], ShardStore | None] = lambda: None

    @classmethod
    def open(cls, folder: Location | Sequence[Location], *, cache: ShardCache | None = None) -> Index:
        """Open the index of one folder, or of several.

        For one folder only manifest.json is read; for several the lists of shards too, to compare their shards.

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
        return cls(*(Manifest.read(name, cache) for name in folders))

    def __len__(self) -> int:
        return self._num_rows

    def __dir__(self) -> list[str]:
        return SHOWN

    def __repr__(self) -> str:
        where = f"'{self.manifests[0].folder}'" if len(self.manifests) == 1 else f"{len(self.manifests)} folders"
        labels = ", with labels" if self.has_labels else ""
        shards = "1 shard" if self.num_shards == 1 else f"{self.num_shards:,} shards"
        return f"Index({len(self):,} rows in {shards} of {where}, {self.captions:,} captions{labels})"

    @overload
    def __getitem__(self, row: SupportsIndex) -> IndexedSample: ...

    @overload
    def __getitem__(self, row: slice) -> list[IndexedSample]: ...

    def __getitem__(self, row: SupportsIndex | slice) -> IndexedSample | list[IndexedSample]:
        """The sample in a row, to look at: `index[0].image`, `index[-1].captions`, `index[:10]`.

        Raises:
            IndexError: there is no such row.
            TypeError: not a number; `index.sample(key)` takes a key.
        """
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        if isinstance(row, str):
            raise TypeError(f"an index has rows 0 to {len(self) - 1}: index[0]; index.sample({row!r}) looks up a key")
        number = operator.index(row)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of an index of {len(self):,} rows, 0 to {len(self) - 1}")
        # All samples that exist share a store: with a store each, a list of samples would open a file for each sample.
        if (store := self._store()) is None:
            store = ShardStore(self)
            self._store = weakref.ref(store)
        return IndexedSample.at(self, store, number % len(self))

    def sample(self, key: str) -> IndexedSample:
        """The sample with a key.

        Raises:
            KeyError: no row has the key, and the error names the nearest; or several rows have.
        """
        return self[row_of_key(self, key)]

    @cached_property
    def starts(self) -> Rows:
        """The first row of each shard, and `len(index)`: int64 (num_shards + 1,); reads the lists of shards."""
        return offsets_of(np.concatenate([manifest.shard_rows for manifest in self.manifests]))

    def check_images(self, *, of: str = "") -> None:
        """Raise a ConfigError, whose message begins with `of`, if a folder has no images."""
        for part in self.manifests:
            if not part.has_images:
                raise ConfigError(
                    f"{of}'{part.folder}': samples without images, whose members come to the rows of others: "
                    f"data.join: [{{shards: {part.folder}, name: NAME}}] beside a data.shards with images"
                )

    @property
    def sources(self) -> list[ShardsOfFolder]:
        """The folders, in their order, each with its shards."""
        spans = pairwise(self._first_shards)
        return [ShardsOfFolder(manifest.folder, *span) for manifest, span in zip(self.manifests, spans, strict=True)]

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, by label; None if labels are numbers only, or if folders differ in their names.

        A folder may have the first of another one's names only, or no labels at all.
        """
        named = [((manifest.accounts or {}).get("classes") or [], manifest.has_labels) for manifest in self.manifests]
        names: list[list[str]] = [some for some, has_labels in named if some or has_labels]
        longest = max(names, key=len, default=[])
        return list(longest) if longest and all(some and some == longest[: len(some)] for some in names) else None

    @cached_property
    def caches(self) -> list[ShardCache]:
        """The caches of the folders behind URLs, each once."""
        found = [manifest.tars_folder.cache for manifest in self.manifests]
        return list({id(cache): cache for cache in found if cache is not None}.values())

    def cells(self) -> Iterator[Histograms]:
        """The histograms of all shards; see `Manifest.cells`."""
        return chain.from_iterable(manifest.cells() for manifest in self.manifests)

    def token_histogram(self) -> Rows:
        """Captions by length: entry i counts those of i tokens."""
        found = [manifest.token_histogram() for manifest in self.manifests]
        total = np.zeros(max(map(len, found)), np.int64)
        for counts in found:
            total[: len(counts)] += counts
        return total

    def part(self, shard: int) -> tuple[Manifest, int]:
        """The manifest that lists a shard, and the shard's number in that manifest.

        Raises:
            IndexError: `shard` is not one of 0 … num_shards−1.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} asked of an index of {self.num_shards}")
        # Folders without shards begin at the same number as the next folder: the last of them has the shard.
        number = bisect_right(self._first_shards, shard) - 1
        return self.manifests[number], shard - self._first_shards[number]

    def listed(self, shard: int) -> ListedShard:
        """What the manifest says of a shard; see `Manifest.listed`."""
        part, local = self.part(shard)
        return part.listed(local)

    def shard_path(self, shard: int) -> Path:
        """Path of the tar. One behind a URL is fetched into the cache first, which may remove it at any time."""
        part, local = self.part(shard)
        return part.shard_path(local)

    def shard_place(self, shard: int) -> str:
        """Path or URL of the tar, for messages."""
        part, local = self.part(shard)
        return part.shard_place(local)

    def shard_name(self, shard: int) -> str:
        """Name of the tar, for messages; with its folder if there are several."""
        part, local = self.part(shard)
        name = part.listed(local).name
        return name if len(self.manifests) == 1 else f"{part.folder}/{name}"

    def open_shard(self, shard: int, stop: Event | None = None) -> OpenShard:
        """The tar of a shard, to be read; see `Manifest.open_shard`."""
        part, local = self.part(shard)
        return OpenShard(part.open_shard(local, stop), cached=part.tars_folder.cache is not None)

    def caption_keys(self, shard: int) -> tuple[str, ...]:
        """The keys that hold captions in the JSON of a shard, for `captions_of`."""
        return self.part(shard)[0].members.caption_keys

    def shard(self, shard: int) -> ShardColumns:
        """One shard's columns. Their hash is compared with the manifest's when they are read.

        Raises:
            DataError: the index file is missing, not the one that the manifest names, or holds impossible values.
        """
        with self._lock:
            if (columns := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return columns
        part, local = self.part(shard)
        columns = part.columns(local)
        with self._lock:
            self._was_read.add(shard)
            if shard not in self._open:  # another thread may have opened it
                self._open[shard] = columns
                self._rows_open += len(columns)
            while self._rows_open > self.held_rows and len(self._open) > 1:
                _, dropped = self._open.popitem(last=False)
                self._rows_open -= len(dropped)
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
        return {name: wanted.restore(values) for name, values in result.items()}

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
        values, result_offsets = np.concatenate(found), offsets_of(wanted.restore(lengths))
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
        return wanted.restore(np.array(found, object)).tolist()

    def column(self, name: str) -> Array:
        """A whole column (len,), copied: 1 to 8 bytes a row."""
        _check_names([name], FIXED)
        self.fetch_columns(np.arange(self.num_shards))
        parts = [self.shard(shard).fixed(name) for shard in range(self.num_shards)]
        return np.concatenate([np.empty(0, FIXED[name]), *parts])

    def lists(self, name: str) -> tuple[Rows, Array]:
        """A whole list column, copied: offsets (len + 1,) and values."""
        _check_names([name], LISTS)
        self.fetch_columns(np.arange(self.num_shards))
        parts = [self.shard(shard).lists(name) for shard in range(self.num_shards)]
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for offsets, _ in parts)])
        values = np.concatenate([np.empty(0, LISTS[name]), *(values for _, values in parts)])
        return offsets_of(lengths), values

    def _by_shard(self, rows: Rows) -> _RowsByShard:
        """Rows grouped by shard; the columns of shards behind URLs have been fetched."""
        shards, local = self.locate(rows)
        self.fetch_columns(shards)
        return _group_by_shard(shards, local)

    def fetch_columns(self, shards: Rows) -> None:
        """Open columns behind URLs concurrently: one after the other, nearly all the time would be waiting.

        Does nothing for folders on this machine.
        """
        if not self.caches:
            return
        if len(missing := [shard for shard in np.unique(shards).tolist() if shard not in self._was_read]) > 1:
            with ThreadPoolExecutor(OPENERS) as pool:
                list(pool.map(self.shard, missing))


def _check_names(names: Sequence[str], known: dict[str, Any]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no column {unknown}; there are {list(known)}")


class _RowsByShard(NamedTuple):
    """The rows of a request, grouped by shard.

    Attributes:
        order: int64 (n,), the permutation that groups the request; None: the request is grouped as it is.
        parts: (shard, which rows of the grouped request, their numbers within the shard: (k,) or a slice). Without a
            permutation a shard may have several parts.
    """

    order: Rows | None
    parts: list[tuple[int, slice, Rows | slice]]

    def restore(self, values: Array) -> Array:
        """Values (n,) of the grouped rows, in the order of the request."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result


def _group_by_shard(shards: Rows, local: Rows) -> _RowsByShard:
    """Group rows by shard.

    Args:
        shards: (n,), the shard of each row.
        local: (n,), the number of each row within its shard.
    """
    order, cuts = None, np.flatnonzero(np.diff(shards)) + 1
    if len(cuts) * LONG_RUN > len(shards):
        order = np.argsort(shards, kind="stable")
        shards, local = shards[order], local[order]
        cuts = np.flatnonzero(np.diff(shards)) + 1
    bounds = np.unique([0, *cuts.tolist(), len(shards)])
    # A part without a break is a range of consecutive rows: a slice reads it without a copy.
    breaks = np.searchsorted(np.flatnonzero(np.diff(local) != 1), [bounds[:-1], bounds[1:] - 1])
    parts: list[tuple[int, slice, Rows | slice]] = []
    for (a, b), consecutive in zip(pairwise(bounds.tolist()), (breaks[0] == breaks[1]).tolist(), strict=True):
        within = slice(int(local[a]), int(local[a]) + b - a) if consecutive else local[a:b]
        parts.append((int(shards[a]), slice(a, b), within))
    return _RowsByShard(order, parts)


def _check_folders_differ(parts: Sequence[Manifest]) -> None:
    seen: dict[str, Manifest] = {}
    for part in parts:
        first = seen.setdefault(part.folder.identity, part)
        if first is not part:
            raise ConfigError(f"shards '{part.folder}': the same folder as '{first.folder}'; {_ONCE}")


def _check_shards_differ(parts: Sequence[Manifest]) -> None:
    """Compare the hashes of the tars. Shards without rows are all equal and are not compared."""
    shards = [np.flatnonzero(part.shard_rows) for part in parts]
    hashes = [part.tar_hashes().take(pa.array(numbers)) for part, numbers in zip(parts, shards, strict=True)]
    owner = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in shards])
    code = pa.concat_arrays(hashes).dictionary_encode().indices.to_numpy()  # equal hashes, equal numbers
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    first = first[inverse]  # position of the first shard with the same hash
    twice = np.flatnonzero(owner[first] != owner)
    if len(twice):
        number = np.concatenate(shards)
        again, earlier = int(twice[0]), int(first[twice[0]])
        part, other = parts[int(owner[again])], parts[int(owner[earlier])]
        raise ConfigError(
            f"shards '{part.folder}': '{part.listed(int(number[again])).name}' is the same shard as "
            f"'{other.listed(int(number[earlier])).name}' in '{other.folder}', the first of "
            f"{len(twice)} that two datasets share; leave them out of one, or {_ONCE}"
        )
