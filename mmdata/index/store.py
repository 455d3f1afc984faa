"""Reads members of shards by offset. A shard whose size is not the manifest's is never read."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import DataError, Interrupted
from mmdata.forked import new_lock
from mmdata.storage.extract import Extract
from mmdata.storage.fetch import NoRanges

if TYPE_CHECKING:
    from mmdata.index.index import Index

logger = logging.getLogger("mmdata")

MAX_OPEN = 64
"""Shards that stay open if nothing else is said; each holds a file descriptor."""
MAX_EXTRACTS = 1024
"""Shards of which is known what to fetch of them; 24 bytes a selected row of each."""
MEMBERS = ("image", "caption")
"""Members of a row that batches are made of."""


class ShardStore:
    """Reads members of an index's shards. Safe to share between threads.

    Args:
        index: of the shards. A shard behind a URL is fetched into the cache when a member of it is first read.

    Attributes:
        open_shards: those that stay open.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.open_shards = OpenShards()
        self._lock = new_lock()
        self._rows_of: Callable[[int], NDArray[np.int64]] | None = None
        self._whole_samples = False
        self._without_ranges = set[str]()  # folders whose server sends whole shards alone
        self._extracts: OrderedDict[int, Extract | None] = OrderedDict()

    def keep_to(self, rows_of: Callable[[int], NDArray[np.int64]], *, whole_samples: bool = False) -> None:
        """Of shards behind URLs fetch only the members of some rows, where these are at most half of the bytes.

        Other members can still be read: their shard is fetched whole then.

        Args:
            rows_of: gives the rows of a shard, by their numbers in the index.
            whole_samples: all members of the rows, not only image and caption.
        """
        self._rows_of, self._whole_samples = rows_of, whole_samples

    def read(self, shard: int, offset: int, size: int, stop: Event | None = None) -> bytes:
        """Bytes [offset, offset + size) of a shard.

        Raises:
            DataError: the shard is missing, its size is not the manifest's, or the range lies outside it.
            Interrupted: `stop` was set while the shard was being fetched.
        """
        opened = self._opened(shard, stop)
        if offset < 0 or size < 0 or offset + size > opened.size:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': bytes {offset} to {offset + size} of {opened.size} asked; {_REMEDY}")
        if (data := opened.read(offset, size)) is None:  # not in the extract
            with self._lock:
                self._extracts[shard] = None
            self.open_shards.drop(shard)
            data = self._opened(shard, stop).read(offset, size)
        if data is None or len(data) != size:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': is shorter than indexed, {opened.size} bytes; {_REMEDY}")
        return data

    def is_here(self, shard: int) -> bool:
        """Whether a shard can be read without fetching it; a shard in the cache counts as used now."""
        part, local = self._index.part(shard)
        listed, extract = part.listed(local), self.extract(shard)
        return part.folder.has_shard(listed) or (extract is not None and part.folder.has_extract(listed, extract))

    def bytes_of(self, shard: int) -> int:
        """Bytes that are fetched of a shard."""
        extract = self.extract(shard)
        return self._index.listed(shard).bytes if extract is None else extract.bytes

    def fetch(self, shard: int, stop: Event) -> None:
        """Bring a shard into the cache. Returns immediately if it is in the cache, and when `stop` is set.

        Raises:
            DataError, ConfigError: it cannot be fetched.
        """
        part, _ = self._index.part(shard)
        if part.folder.cache is not None:
            with suppress(Interrupted):
                self._open_shard(shard, stop)

    def _opened(self, shard: int, stop: Event | None) -> OpenShard:
        opened = self.open_shards.get(shard)
        return opened or self.open_shards.keep(shard, self._open_shard(shard, stop))

    def _open_shard(self, shard: int, stop: Event | None) -> OpenShard:
        part, local = self._index.part(shard)
        expected = part.listed(local).bytes
        extract = self.extract(shard)
        if extract is not None and part.folder.has_shard(part.listed(local)):
            extract = None
        if str(part.folder) in self._without_ranges:
            extract = None
        try:
            try:
                descriptor = (
                    part.open_shard(local, stop) if extract is None else part.open_extract(local, extract, stop)
                )
            except NoRanges as error:
                logger.warning("'%s': its server sends no parts of files, so whole shards are fetched", error)
                self._without_ranges.add(str(part.folder))
                extract, descriptor = None, part.open_shard(local, stop)
        except FileNotFoundError:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': no such file, and the manifest names it; {_REMEDY}") from None
        opened = OpenShard(descriptor, cached=part.folder.cache is not None, extract=extract, size=expected)
        if opened.size != expected:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': {opened.size} bytes, and its index was made of {expected}; {_REMEDY}")
        return opened

    def extract(self, shard: int) -> Extract | None:
        """What is fetched of a shard behind a URL; None: all of it."""
        if self._rows_of is None:
            return None
        with self._lock:
            if shard in self._extracts:
                return self._extracts[shard]
        extract = self._find_extract(shard, self._rows_of(shard))
        with self._lock:
            self._extracts.setdefault(shard, extract)
            if len(self._extracts) > MAX_EXTRACTS:
                self._extracts.popitem(last=False)
            return extract

    def _find_extract(self, shard: int, rows: NDArray[np.int64]) -> Extract | None:
        whole = self._index.listed(shard).bytes
        if self._whole_samples:
            columns, own = self._index.shard(shard), rows - self._index.starts[shard]
            members = columns.members_of(own).flatten()
            offsets, sizes = (
                np.concatenate([columns.fixed(f"image_{name}")[own], members.field(field).to_numpy()])
                for name, field in (("offset", "offset"), ("bytes", "size"))
            )
        else:
            columns = self._index.take(rows, [f"{kind}_{what}" for kind in MEMBERS for what in ("offset", "bytes")])
            offsets = np.concatenate([columns[f"{kind}_offset"] for kind in MEMBERS]).astype(np.int64)
            sizes = np.concatenate([columns[f"{kind}_bytes"] for kind in MEMBERS]).astype(np.int64)
        if not sizes.any():
            return None
        extract = Extract(offsets[sizes > 0], sizes[sizes > 0], of=whole)
        return extract if 2 * extract.bytes <= whole else None


class OpenShard:
    """A descriptor that is closed with the last reference: one thread may read it while another drops it.

    Args:
        descriptor: of the shard.
        cached: whether it lies in a cache, which may remove it.
        extract: what the descriptor holds of it; None: all of it.
        size: in bytes, of the shard of an extract.

    Attributes:
        size: of the shard, in bytes.
    """

    def __init__(self, descriptor: int, *, cached: bool, extract: Extract | None = None, size: int = 0) -> None:
        self._descriptor = descriptor
        self._cached = cached
        self._extract = extract
        self.size = size if extract is not None else os.fstat(descriptor).st_size

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes | None:
        """The bytes of the range that exist; None if they are not in the extract."""
        place = offset if self._extract is None else self._extract.place(offset, size)
        if place is None:
            return None
        if self._cached:
            with suppress(PermissionError):
                os.utime(self._descriptor)  # the cache removes the least recently used files first
        # Not a mapping: pread waits for the disk without the interpreter's lock, a page fault would hold it; and a file
        # cut short under a mapping ends the process with SIGBUS.
        return os.pread(self._descriptor, size, place)

    def is_removed(self) -> bool:
        """Whether the cache has removed the file, which keeps its room on the disk as long as it is open."""
        return self._cached and os.fstat(self._descriptor).st_nlink == 0


class OpenShards:
    """Shards that stay open, by number; the one used least recently makes room. Safe to share between threads.

    Attributes:
        most: how many.
    """

    def __init__(self) -> None:
        self.most = MAX_OPEN
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = new_lock()

    def get(self, number: int) -> OpenShard | None:
        """The shard with a number; None if it is not open."""
        with self._lock:
            if (opened := self._shards.get(number)) is not None:
                self._shards.move_to_end(number)
            return opened

    def keep(self, number: int, opened: OpenShard) -> OpenShard:
        """Keep a shard that was opened without the lock; returns the one that another thread was faster to open."""
        with self._lock:
            for removed in [number for number, other in self._shards.items() if other.is_removed()]:
                del self._shards[removed]  # the cache removed the file; closing it frees its room on the disk
            opened = self._shards.setdefault(number, opened)
            while len(self._shards) > self.most:
                self._shards.popitem(last=False)
            return opened

    def drop(self, number: int) -> None:
        """Close a shard, if it is open."""
        with self._lock:
            self._shards.pop(number, None)


_REMEDY = "the shard changed since it was indexed: fetch it again, or index it anew (`mmdata index FOLDER --overwrite`)"
