"""The tars of a stream. Each is indexed in memory when the stream reaches it, by the reader that makes every index.

A tar keeps its number, and so its rows keep theirs, whatever the order of a pass: row numbers have gaps.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import ConfigError, DataError, Interrupted, counted, excerpt, explain, sample_name
from mmdata.images.probe import DEFAULT_LIMITS
from mmdata.index import Index
from mmdata.index.caption_lengths import counts_of
from mmdata.index.columns import Histograms, ShardColumns
from mmdata.index.encode import encode, rearranged
from mmdata.index.index import HELD_ROWS
from mmdata.index.manifest import Manifest, ShardEntry
from mmdata.index.store import OpenShard, OpenShards
from mmdata.plan.boxes import SETTING, count_boxes
from mmdata.plan.rows import PASS_SHIFT
from mmdata.plan.windows import KeyedPermutation
from mmdata.processes import new_lock
from mmdata.safe_read import open_regular
from mmdata.seeding import Purpose
from mmdata.storage import ShardCache
from mmdata.storage.cache import GB, Remote
from mmdata.storage.folder import ListedShard, RemoteFolder
from mmdata.storage.urls import display_name
from mmdata.tables.joined import Joined
from mmdata.tables.select import Filter, below_share, filters_of
from mmdata.tars.members import Members
from mmdata.tars.scan import IndexRow, scan_shard
from mmdata.tars.tar import END, header, padding, split_name
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

BUFFER_ROWS = 4096
"""Samples of a window of an iterable, at least."""
BUFFER_BYTES = 2**29
"""Bytes of samples from which on a window of an iterable takes no further sample."""
TAR_BYTES = 2**26
"""Bytes of samples in a tar in memory, about."""
NUM_TARS = 2**20
"""Tars in memory of PASSES passes together."""
PASSES = 16
"""Passes whose tars in memory have numbers of their own; the next ones use them again. Only small passes are in use so
many at once, if more batches are prefetched than a pass has."""


class TarFiles:
    """Tars on this machine, and behind URLs, which are fetched whole into the cache.

    Args:
        shards: paths and URLs.
        data: settings.

    Attributes:
        num_tars: tars have numbers below this.
        num_threads: tars that are read concurrently.
        is_lasting: whether a tar can be read again, and again in later passes.
        in_words: what it is, for messages.
        first_rows, window_rows: of the first window of a pass, and of the later ones, at most.
        window_bytes: that end a window.
    """

    is_lasting = True
    window_bytes = WINDOW_BYTES

    def __init__(self, shards: Sequence[str], data: DataConfig) -> None:
        self.shards, self.num_tars = list(shards), len(shards)
        self.in_words = counted(self.num_tars, "shard")
        self.num_threads = FETCHERS if any("://" in shard for shard in shards) else 1
        self.first_rows = max(FIRST_ROWS, 4 * data.global_batch_size)
        self.window_rows = max(self.first_rows, data.shuffle_window_rows)
        self._cache = ShardCache(data.loading.cache_dir, max_bytes=int(data.loading.cache_gb * GB))
        self._order = KeyedPermutation(data.seed, data.shuffle)
        self._files: dict[int, Remote] = {}

    def of_pass(self, number: int) -> Iterator[int]:
        """The numbers of the tars of a pass, in its order; every tar once."""
        return iter(self._order(self.num_tars, number, Purpose.SHARD_ORDER, 0).tolist())

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
        if tar not in self._files:
            self._files[tar] = RemoteFolder(shard, self._cache).file_of(shard, stop)
        return self._cache.open(self._files[tar], stop)

    def in_memory(self) -> set[int]:
        """The tars that take memory until they are dropped: none."""
        return set()

    def drop(self, tar: int) -> None:
        """Nothing: a tar that the cache has removed is closed with the next one that is opened."""


class SampleTars:
    """Gathers the samples of an iterable into tars in memory, in the order in which they come; see `TarFiles`.

    A key may come again, as it does from an endless iterable: a tar ends before it.

    Args:
        samples: iterated once a pass. Each is a mapping from `__key__` to its key, and from extensions to bytes.
        data: settings. Batches are made of the samples of a window, and those left over of the last.
    """

    is_lasting = False
    in_words = "the iterable"
    num_tars = NUM_TARS
    num_threads = 1
    window_bytes = BUFFER_BYTES

    def __init__(self, samples: Iterable[Any], data: DataConfig) -> None:
        num_buckets = _count(data.text_buckets) * max(_count(data.image_buckets), _count(data.image_patches))
        num_buckets *= _count(data.targets.box_buckets if data.targets is not None else None)
        self.first_rows = self.window_rows = max(BUFFER_ROWS, 2 * num_buckets * data.global_batch_size)
        self._samples = samples
        self._files: dict[int, BinaryIO] = {}

    def of_pass(self, number: int) -> Iterator[int]:
        """See `TarFiles`; a tar is there when its number is given."""
        of_each = NUM_TARS // PASSES
        samples = map(_encoded, self._samples)
        waiting = next(samples, None)
        for tar in range(number % PASSES * of_each, (number % PASSES + 1) * of_each):
            if waiting is None:
                return
            in_memory = hasattr(os, "memfd_create")  # the kernel of Linux has it
            file: Any = open(os.memfd_create("mmdata"), "w+b") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
            keys = set[str]()
            while waiting and file.tell() < TAR_BYTES and len(keys) < self.window_rows and waiting[0] not in keys:
                keys.add(waiting[0])
                file.write(waiting[1])
                waiting = next(samples, None)
            file.write(END)
            file.flush()
            self._files[tar] = file
            yield tar

    def name(self, tar: int) -> str:
        """See `TarFiles`."""
        return "samples of the iterable"

    def open(self, tar: int, stop: Event) -> int:
        """See `TarFiles`."""
        return os.dup(self._files[tar].fileno())

    def in_memory(self) -> set[int]:
        """See `TarFiles`: all that were not dropped."""
        return set(self._files)

    def drop(self, tar: int) -> None:
        """Free the memory of a tar, once it is closed everywhere."""
        self._files.pop(tar, None)


def _count(buckets: int | list[Any] | None) -> int:
    """The largest number of buckets that a setting gives."""
    return buckets if isinstance(buckets, int) else len(buckets or [None])


TarSource = TarFiles | SampleTars
"""Where the tars of a stream come from."""


def _encoded(sample: Any) -> tuple[str, bytes]:
    """Key of a sample, and its members as a stretch of a tar.

    Raises:
        ConfigError: no sample of WebDataset, or one that is decoded, or that no tar can hold.
    """
    if not isinstance(sample, Mapping) or not isinstance(sample.get("__key__"), str):
        raise ConfigError(
            "stream: an iterable must give samples as WebDataset does, dictionaries with __key__ and bytes by "
            f"extension (jpg, txt, json, …): got {type(sample).__name__}; leave out .to_tuple() and .batched()"
        )
    key, members = sample["__key__"], list[bytes]()
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if not isinstance(value, (bytes, str)):
            raise ConfigError(
                f"stream: sample '{key}': '{name}' is of type {type(value).__name__}, and a stream takes the bytes of "
                "files, and decodes them itself: leave out .decode()"
            )
        if split_name(f"{key}.{name}") != (key, name.lower()):
            raise ConfigError(
                f"stream: sample '{key}': a key may hold no dot in its last part, nor begin with __: WebDataset cuts "
                "it there"
            )
        data = value.encode() if isinstance(value, str) else value
        try:
            members += [header(f"{key}.{name}", len(data)), data, padding(len(data))]
        except ValueError as error:
            raise ConfigError(
                f"stream: sample {excerpt(key)}: '{name}' of {len(data):,} bytes cannot be a file of a tar ({error}): "
                "give it a __key__ of at most 90 bytes, and less than 8 GiB"
            ) from None
    return key, b"".join(members)


@dataclass(frozen=True)
class IndexedTar:
    """What is known of a tar once it was read.

    Attributes:
        number: of the tar in the stream.
        name: for messages: its path, or its URL without secrets.
        columns: of its usable and selected rows.
        entry: of these rows, as in a manifest.
        left_out: the unusable samples, as in the quarantine list of an index.
        places: of the selected rows among the usable samples, rising.
        boxes: how many each of these rows has, int32 (n,); 0 without `data.targets`.
    """

    number: int
    name: str
    columns: ShardColumns
    entry: ShardEntry
    left_out: list[dict[str, Any]]
    places: NDArray[np.int64]
    boxes: NDArray[np.int32]


class TarIndexer:
    """Indexes tars when they are asked for, and keeps those used last. Safe to share between threads.

    Args:
        source: of the tars.
        data: settings.
        tokenizer: counts the tokens of captions; None: batches have none.

    Attributes:
        stride: numbers of rows that each tar has for its own.
        open_shards: the tars from which batches are read.
        boxes: where the boxes of a row are, see `Joined.member`; None: batches have none.
    """

    def __init__(self, source: TarSource, data: DataConfig, tokenizer: Tokenizer | None) -> None:
        self.source = source
        self.stride = 1 << (PASS_SHIFT - source.num_tars.bit_length())
        self.members = Members.parse(**data.members)
        self.max_length = data.max_length
        self.open_shards = OpenShards()
        self._data = data
        boxes = data.targets.boxes if data.targets is not None else None
        self.boxes = None if boxes is None else Joined([], GrowingIndex(self, [])).member(boxes, setting=SETTING)
        self._count = None if tokenizer is None else counts_of(tokenizer, data.caption_template).count
        self._needs_captions = tokenizer is not None
        self._held_rows = max(HELD_ROWS, 4 * data.shuffle_window_rows)
        self._kept: OrderedDict[int, IndexedTar] = OrderedDict()
        self._told = set[Loss]()
        self._filters: list[Filter] = []  # made of the first tar
        self._lock = new_lock()

    def get(self, number: int, stop: Event | None = None) -> IndexedTar:
        """What is known of a tar; it is read if it is not kept.

        Raises:
            DataError, ConfigError, Interrupted: it cannot be read, or is damaged.
        """
        with self._lock:
            if (known := self._kept.get(number)) is not None:
                self._kept.move_to_end(number)
                return known
        read = self._selected(self._read(number, stop or Event()))
        with self._lock:
            self._kept[number] = read
            rows = sum(len(tar.columns) for tar in self._kept.values())
            while rows > self._held_rows and len(self._kept) > 1:
                rows -= len(self._kept.popitem(last=False)[1].columns)
        return read

    def drop(self, number: int) -> None:
        """Keep a tar in memory no longer."""
        with self._lock:
            self._kept.pop(number, None)
        self.open_shards.drop(number)
        self.source.drop(number)

    def _read(self, number: int, stop: Event) -> IndexedTar:
        def step(offset: int) -> None:
            if stop.is_set():
                raise Interrupted(name)

        name, descriptor = self.source.name(number), self.source.open(number, stop)
        size = os.fstat(descriptor).st_size
        opened = OpenShard(os.dup(descriptor), cached=False)
        scan = scan_shard(descriptor, name=name, limits=DEFAULT_LIMITS, members=self.members, step=step)
        if scan.damage is not None:
            raise scan.damage
        if self._needs_captions:
            scan = scan.of_corpus(captions=True, members=self.members)
        if len(rows := scan.rows) > self.stride:
            raise DataError(
                f"shard '{name}': {len(rows):,} samples, and a tar of a stream of "
                f"{self.source.num_tars:,} has at most {self.stride:,}; pack smaller shards"
            )
        for sample in scan.usable:
            lost = sample.losses
            if isinstance(sample.label, str):
                named = f"label {excerpt(sample.label)} is a name; `mmdata index` numbers names"
                lost = {**lost, Loss.LABEL_NAME: named}
            self._tell(sample_name(name, sample.row.key), lost)
        columns = encode(rows, self._count)
        entry = ShardEntry.of(columns, name.rpartition("/")[2], size=size, sha256="")
        boxes = np.array([self._boxes_of(row, opened) for row in rows], np.int32)
        return IndexedTar(number, name, columns, entry, scan.quarantined, np.arange(len(rows)), boxes)

    def _boxes_of(self, row: IndexRow, tar: OpenShard) -> int:
        """How many boxes a row of a tar has."""
        if self.boxes is None:
            return 0
        members = {member.extension: member for member in row.members}
        return count_boxes(members, lambda member: tar.read(member.offset, member.size), *self.boxes[1:])

    def _tell(self, sample: str, lost: dict[Loss, str]) -> None:
        """Log the first loss of each kind."""
        with self._lock:
            new = lost.keys() - self._told
            self._told |= new
        for loss in sorted(new):
            told = "%s: %s (%s); this sample and later ones with the same fault are used without it"
            logger.warning(told, sample, lost[loss], loss)

    def _selected(self, tar: IndexedTar) -> IndexedTar:
        """A tar with its selected rows alone."""
        share, count = self._data.val.share, len(tar.columns)
        if not count or (self._data.select is None and share is None):
            return tar
        index = GrowingIndex(self, [tar], alone=True)
        mask = np.ones(count, np.bool_)
        joined = Joined([], index)
        with self._lock:  # once: one set of keys for all tars, also if the file changes
            self._filters = self._filters or list(filters_of(self._data, joined))
        for rule in self._filters:
            mask &= rule.mask(joined, 0)
        if share is not None:
            mask &= below_share(index, 0, share) == (self._data.split == "val")
        rows = np.flatnonzero(mask)
        columns = rearranged([(tar.columns, rows, np.zeros(len(rows), np.int64))])
        entry = ShardEntry.of(columns, tar.entry.name, size=tar.entry.bytes, sha256="")
        return replace(tar, columns=columns, entry=entry, places=rows, boxes=tar.boxes[rows])


class GrowingIndex(Index):
    """The index of the tars of a stream: a tar is read when something is first asked of it.

    Args:
        tars: indexes them.
        first: those that are read already; the totals of the index are theirs.
        alone: the index is of the first tar alone, whose number is 0.
    """

    def __init__(self, tars: TarIndexer, first: list[IndexedTar], *, alone: bool = False) -> None:
        num_tars, self._stride = (1, len(first[0].columns)) if alone else (tars.source.num_tars, tars.stride)
        # Later captions may be longer than the first ones: the longest text bound holds them all.
        tokens = [tar.columns.lists("caption_tokens")[1] for tar in first]
        lengths = np.bincount(np.concatenate([*tokens, [tars.max_length]]))
        manifest = Manifest(
            rows=num_tars * self._stride,
            bytes=sum(tar.entry.bytes for tar in first),
            num_shards=num_tars,
            captions=sum(tar.entry.captions for tar in first),
            lengths=[(int(length), int(lengths[length])) for length in np.flatnonzero(lengths)],
            has_images=True,
            has_labels=any(tar.entry.labels for tar in first),
            index_files=[],
            accounts={"members": tars.members.content()},
        )
        super().__init__(manifest)
        self.tars, self._first, self._get = tars, first, first.__getitem__ if alone else tars.get

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Each tar has equally many numbers of rows, whatever rows it has."""
        return np.arange(self.num_shards + 1) * self._stride

    def cells(self) -> Iterator[Histograms]:
        """The histograms of the first tars."""
        for entry in (tar.entry for tar in self._first):
            yield Histograms(np.array([0, len(entry.cells)]), entry.cells, entry.counts)

    def listed(self, shard: int) -> ListedShard:
        """Name and size of a tar."""
        return self._get(shard).entry

    def shard_place(self, shard: int) -> str:
        """Path or URL of a tar, for messages."""
        return self._get(shard).name

    def shard_name(self, shard: int) -> str:
        """Path or URL of a tar: tars of one name may lie in several folders."""
        return self.shard_place(shard)

    def shard(self, shard: int) -> ShardColumns:
        """One tar's columns."""
        return self._get(shard).columns

    def open_shard(self, shard: int, stop: Event | None = None) -> OpenShard:
        """A tar to be read; one behind a URL lies in the cache."""
        is_cached = "://" in self.shard_place(shard)
        return OpenShard(self.tars.source.open(shard, stop or Event()), cached=is_cached)
