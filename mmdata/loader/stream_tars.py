"""The tars of a stream. Each is indexed in memory when the stream reaches it, by the reader that makes every index.

A tar keeps its number, and so its rows keep theirs, whatever the order of a pass: row numbers have gaps.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.atomic import explain
from mmdata.config import DataConfig
from mmdata.errors import DataError, Interrupted, Reason, excerpt
from mmdata.forked import new_lock
from mmdata.images.probe import DEFAULT_LIMITS
from mmdata.index import Index
from mmdata.index.caption_lengths import counts_of
from mmdata.index.columns import ShardColumns
from mmdata.index.encode import encode, rearranged
from mmdata.index.index import HELD_ROWS
from mmdata.index.manifest import Histograms, Manifest
from mmdata.loader.sample_buffers import SampleBuffers
from mmdata.plan.ranges import PASS_SHIFT
from mmdata.safe_read import open_regular
from mmdata.seeding import Purpose, permutation
from mmdata.storage import ShardCache
from mmdata.storage.cache import GB, Remote
from mmdata.storage.fetch import RemoteFolder, display_name
from mmdata.storage.folder import LocalFolder
from mmdata.storage.listed import ListedShard
from mmdata.tables.joined import Joined
from mmdata.tables.row_files import read_lines
from mmdata.tables.select import below_share, filters_of
from mmdata.tars.members import USUAL, Members
from mmdata.tars.scan import Scan, scan_file
from mmdata.tars.texts import Loss
from mmdata.text.tokenizer import Tokenizer

logger = logging.getLogger("mmdata")

FETCHERS = 4
"""Tars behind URLs that are fetched concurrently."""
FIRST_ROWS = 1024
"""Rows of the first window of a pass, at least; the first batches wait for it. Each window has twice as many rows as
the one before it, up to `data.shuffle_window_rows`."""
WINDOW_BYTES = 2**33
"""Bytes from which on a window takes no further tar: two windows of tars behind URLs lie in the cache."""

Losses = list[tuple[str, dict[Loss, str]]]
"""(key, what was lost) of samples that lost a text member."""


@dataclass(frozen=True)
class IndexedTar:
    """What is known of a tar once it was read.

    Attributes:
        number: of the tar in the stream.
        name: for messages: its path, or its URL without secrets.
        bytes: its size.
        columns: of its usable and selected rows.
        left_out: the unusable samples, as in the quarantine list of an index; and the tar itself, if it is damaged.
        losses: of its usable samples.
        num_usable: usable samples, selected or not.
        places: of the selected rows among the usable samples, rising; None: all are selected.
    """

    number: int
    name: str
    bytes: int
    columns: ShardColumns
    left_out: list[dict[str, Any]]
    losses: Losses
    num_usable: int
    places: NDArray[np.int64] | None = None

    def rows_among(self, usable: int) -> int:
        """How many of its first `usable` usable samples are selected."""
        return min(usable, self.num_usable) if self.places is None else int(np.searchsorted(self.places, usable))


class TarFiles:
    """Tars on this machine, and behind URLs, which are fetched whole into the cache.

    Args:
        shards: paths and URLs.
        data: settings.

    Attributes:
        num_tars: tars have numbers below this.
        num_threads: tars that are read concurrently.
        is_lasting: whether a tar can be read again, and again in later passes.
        drops: called with the number of a tar that is let go.
    """

    is_lasting = True

    def __init__(self, shards: Sequence[str], data: DataConfig) -> None:
        self.shards, self.num_tars = list(shards), len(shards)
        self.num_threads = FETCHERS if any("://" in shard for shard in shards) else 1
        self._cache = ShardCache(data.loading.cache_dir, max_bytes=int(data.loading.cache_gb * GB))
        self._seed = data.seed
        # max_rows are the first rows, as with an index: each pass then reads the same tars.
        self._shuffles = data.shuffle and data.max_rows is None
        self.drops: list[Callable[[int], None]] = []
        self._files: dict[int, Remote] = {}

    def of_pass(self, number: int) -> Iterator[int]:
        """The numbers of the tars of a pass, in its order; every tar once."""
        if not self._shuffles:
            return iter(range(self.num_tars))
        return iter(permutation(self.num_tars, seed=self._seed, epoch=number, purpose=Purpose.SHARD_ORDER).tolist())

    def window(self, data: DataConfig) -> tuple[int, int, int]:
        """Rows of the first window of a pass, rows of the later ones, at most, and bytes that end a window."""
        first = max(FIRST_ROWS, 4 * data.global_batch_size)
        return first, max(first, data.shuffle_window_rows), WINDOW_BYTES

    def name(self, tar: int) -> str:
        """Name of a tar, for messages."""
        return display_name(self.shards[tar])

    def open(self, tar: int, stop: Event) -> int:
        """A descriptor of a tar, which the caller closes.

        Raises:
            DataError, ConfigError: it cannot be read.
            Interrupted: `stop` was set.
        """
        shard = self.shards[tar]
        if "://" not in shard:
            try:
                return open_regular(shard, "shard")
            except OSError as error:
                raise DataError(f"shard {explain(error)}") from error
        folder = RemoteFolder(shard, self._cache)
        if tar not in self._files:
            self._files[tar] = folder.file_of(shard, stop)
        return self._cache.open(self._files[tar], stop)

    def is_cached(self, tar: int) -> bool:
        """Whether a tar is read from the cache, which may remove it."""
        return "://" in self.shards[tar]

    def let_go(self, tar: int) -> None:
        """Told of each tar of which no batch of this pass needs a row any more.

        It is closed: one that the cache has removed keeps its room on the disk as long as it is open.
        """
        for drop in self.drops:
            drop(tar)


TarSource = TarFiles | SampleBuffers
"""Where the tars of a stream come from."""


class TarIndexer:
    """Indexes tars when they are first asked for, and keeps those used last. Safe to share between threads.

    Args:
        source: of the tars.
        data: settings.
        tokenizer: counts the tokens of captions; None: batches have none.
    """

    def __init__(self, source: TarSource, data: DataConfig, tokenizer: Tokenizer | None) -> None:
        self.source = source
        self.stride = 1 << (PASS_SHIFT - (source.num_tars).bit_length())
        self.members = Members.parse(**data.members.model_dump()) if data.members else USUAL
        self.max_length = data.max_length
        self._data = data
        self._counts = None if tokenizer is None else counts_of(tokenizer, data.caption_template)
        self._needs_captions = tokenizer is not None or data.add_captions
        self._held_rows = max(HELD_ROWS, 4 * data.shuffle_window_rows)
        self._kept: OrderedDict[int, IndexedTar] = OrderedDict()
        self._rows_kept = 0
        self._lines = cache(read_lines)  # once: one set of keys for all tars, also if the file changes
        self._reading: dict[int, Lock] = {}
        self._lock = new_lock()

    def get(self, number: int, stop: Event | None = None) -> IndexedTar:
        """What is known of a tar; it is read if it is not kept.

        Raises:
            DataError, ConfigError, Interrupted: it cannot be read, or is damaged, unless `data.skip_damaged` is set.
        """
        with self._lock:
            if (known := self._kept.get(number)) is not None:
                self._kept.move_to_end(number)
                return known
            own = self._reading.setdefault(number, new_lock())
        with own:
            if (known := self._kept.get(number)) is not None:  # another thread has read it meanwhile
                return known
            read = self._index(number, stop or Event())
            with self._lock:
                self._kept[number] = read
                self._rows_kept += len(read.columns)
                self._reading.pop(number, None)
                while self._rows_kept > self._held_rows and len(self._kept) > 1:
                    self._rows_kept -= len(self._kept.popitem(last=False)[1].columns)
            return read

    def forget(self, number: int) -> None:
        """Keep a tar no longer."""
        with self._lock:
            if (read := self._kept.pop(number, None)) is not None:
                self._rows_kept -= len(read.columns)

    def _index(self, number: int, stop: Event) -> IndexedTar:
        name = self.source.name(number)
        try:
            size, scan = self._scan(number, name, stop)
            damage = scan.damage
        except DataError as error:
            size, scan, damage = 0, Scan(), error
        if damage is not None:
            if not self._data.skip_damaged:
                raise damage
            what = getattr(damage, "what", str(damage))
            logger.warning("%s; the stream goes on with the next shard", what)
            if not any(line["reason"] == Reason.DAMAGED_SHARD.value for line in scan.quarantined):
                reason = Reason.DAMAGED_SHARD.value
                scan.quarantined.append({"shard": name, "key": "", "offset": -1, "reason": reason, "detail": what})
        if len(scan.rows) > self.stride:
            raise DataError(
                f"shard '{name}': {len(scan.rows):,} samples, and a tar of a stream of "
                f"{self.source.num_tars:,} has at most {self.stride:,}; pack smaller shards"
            )
        named = [
            (row.key, {Loss.LABEL_NAME: f"label {excerpt(label)} is a name; `mmdata index` numbers names"})
            for row, label in zip(scan.rows, scan.labels, strict=True)
            if isinstance(label, str)
        ]
        columns = encode(scan.rows, None if self._counts is None else self._count)
        read = IndexedTar(number, name, size, columns, scan.quarantined, scan.losses + named, len(columns))
        return self._selected(read)

    def _count(self, captions: list[str]) -> list[int]:
        assert self._counts is not None
        return list(self._counts.count(captions))

    def _scan(self, number: int, name: str, stop: Event) -> tuple[int, Scan]:
        """Size and samples of a tar."""

        def step(offset: int) -> None:
            if stop.is_set():
                raise Interrupted(name)

        with os.fdopen(self.source.open(number, stop), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            scan = scan_file(file, name=name, limits=DEFAULT_LIMITS, members=self.members, step=step)
        return size, scan.in_captioned_corpus(name, self.members) if self._needs_captions else scan

    def _selected(self, tar: IndexedTar) -> IndexedTar:
        """A tar with its selected rows alone."""
        share, count = self._data.val.share, len(tar.columns)
        if not count or (self._data.select is None and share is None):
            return tar
        index = GrowingIndex.of(self, [tar], stride=count)
        mask = np.ones(count, np.bool_)
        for rule in filters_of(self._data, index, Joined([], index), lines=self._lines):
            mask &= rule.mask(0)
        if share is not None:
            mask &= below_share(index, 0, share) == (self._data.split == "val")
        rows = np.flatnonzero(mask)
        columns = rearranged([(tar.columns, rows, np.zeros(len(rows), np.int64))])
        return replace(tar, columns=columns, places=rows)


@dataclass(frozen=True)
class GrowingManifest(Manifest):
    """The tars of a stream as a manifest; its totals are those of the first tars.

    Attributes:
        tars: indexes them.
        first: the tars that are read already.
        stride: numbers of rows that each tar has for its own.
    """

    tars: TarIndexer = field(kw_only=True, compare=False, repr=False)
    first: list[IndexedTar] = field(kw_only=True, compare=False, repr=False)
    stride: int = field(kw_only=True)

    @property
    def shard_rows(self) -> NDArray[np.int64]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numbers of rows of each tar: the same of all."""
        return np.full(self.num_shards, self.stride, np.int64)

    @property
    def members(self) -> Members:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which members of a sample are image, caption and label."""
        return self.tars.members

    def columns(self, shard: int) -> ShardColumns:
        """The columns of a tar, which is read if it is not kept."""
        return self._tar(shard).columns

    def listed(self, shard: int) -> ListedShard:
        """Name and size of a tar, which is read if it is not kept."""
        tar = self._tar(shard)
        count = len(tar.columns)
        return ListedShard(
            name=tar.name.rpartition("/")[2],
            bytes=tar.bytes,
            sha256="",
            rows=count,
            index_offset=0,
            index_bytes=0,
            index_sha256="",
            index_xxh3=0,
            images=count,
            captions=0,
            labels=0,
        )

    def is_cached(self, shard: int) -> bool:
        """See `Manifest`: tars behind URLs are."""
        return self.tars.source.is_cached(self._tar(shard).number)

    def open_shard(self, shard: int, stop: Event | None = None) -> int:
        """A descriptor of a tar, which the caller closes."""
        return self.tars.source.open(self._tar(shard).number, stop or Event())

    def shard_place(self, shard: int) -> str:
        """Path or URL of a tar, for messages."""
        return self._tar(shard).name

    def cells(self) -> Iterator[Histograms]:
        """The histograms of the first tars."""
        for tar in self.first:
            cells, counts = tar.columns.histogram()
            yield Histograms(np.array([0, len(cells)]), cells, counts)

    def _tar(self, shard: int) -> IndexedTar:
        return self.first[0] if self.num_shards == 1 else self.tars.get(shard)


class GrowingIndex(Index):
    """The index of a stream: a tar is read when something is first asked of it."""

    @classmethod
    def of(cls, tars: TarIndexer, first: list[IndexedTar], *, stride: int | None = None) -> GrowingIndex:
        """The index of all tars of a stream, of which some are read; with a stride, of a single tar of so many rows."""
        num_tars, stride = (tars.source.num_tars, tars.stride) if stride is None else (1, stride)
        # Later captions may be longer than the first ones: the longest text bound holds them all.
        tokens = [tar.columns.lists("caption_tokens")[1] for tar in first]
        lengths = np.bincount(np.concatenate([*tokens, [tars.max_length]]))
        manifest = GrowingManifest(
            rows=num_tars * stride,
            bytes=sum(tar.bytes for tar in first),
            num_shards=num_tars,
            captions=sum(tar.columns.num_captions for tar in first),
            lengths=[(int(length), int(lengths[length])) for length in np.flatnonzero(lengths)],
            has_images=True,
            has_labels=any(tar.columns.num_labels for tar in first),
            index_files=[],
            folder=LocalFolder(Path()),
            tars=tars,
            first=first,
            stride=stride,
        )
        return cls(manifest)

    def shard_name(self, shard: int) -> str:
        """Path or URL of a tar, for messages: tars of one name may lie in several folders."""
        return self.shard_place(shard)

    def shard(self, shard: int) -> ShardColumns:
        """One tar's columns."""
        return self.manifests[0].columns(shard)
