"""Reads members of shards by offset. A shard whose size is not the manifest's is never read."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from threading import Event, Lock
from typing import TYPE_CHECKING

from mmdata.errors import DataError, Interrupted

if TYPE_CHECKING:
    from mmdata.shards.index import Index

MAX_OPEN = 64
"""Open shards; each holds a file descriptor."""


class ShardStore:
    """Reads members of an index's shards. Safe to share between threads.

    Args:
        index: of the shards. A shard behind a URL is fetched into the cache when a member of it is first read.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = Lock()

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
        data = opened.read(offset, size)
        if len(data) != size:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': is shorter than indexed, {opened.size} bytes; {_REMEDY}")
        return data

    def is_here(self, shard: int) -> bool:
        """Whether a shard can be read without fetching it; a shard in the cache counts as used now."""
        part, local = self._index.part(shard)
        return part.folder.has_shard(part.listed(local))

    def fetch(self, shard: int, stop: Event) -> None:
        """Bring a shard into the cache. Returns immediately if it is in the cache, and when `stop` is set.

        Raises:
            DataError, ConfigError: it cannot be fetched.
        """
        part, local = self._index.part(shard)
        if part.folder.cache is not None:
            with suppress(Interrupted):
                os.close(part.open_shard(local, stop))

    def _opened(self, shard: int, stop: Event | None) -> _OpenShard:
        with self._lock:
            if opened := self._open.get(shard):
                self._open.move_to_end(shard)
                return opened
        opened = self._open_shard(shard, stop)  # without the lock: fetching takes long, and other threads read on
        with self._lock:
            for number in [number for number, other in self._open.items() if other.is_removed()]:
                del self._open[number]  # the cache removed the file; closing it frees its room on the disk
            opened = self._open.setdefault(shard, opened)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return opened

    def _open_shard(self, shard: int, stop: Event | None) -> _OpenShard:
        part, local = self._index.part(shard)
        expected = part.listed(local).bytes
        try:
            descriptor = part.open_shard(local, stop)
        except FileNotFoundError:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': no such file, and the manifest names it; {_REMEDY}") from None
        opened = _OpenShard(descriptor, cached=part.folder.cache is not None)
        if opened.size != expected:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': {opened.size} bytes, and its index was made of {expected}; {_REMEDY}")
        return opened


class _OpenShard:
    """A descriptor that is closed with the last reference: one thread may read it while another drops it."""

    def __init__(self, descriptor: int, *, cached: bool) -> None:
        self._descriptor = descriptor
        self._cached = cached
        self.size = os.fstat(descriptor).st_size

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes of the range that exist."""
        if self._cached:
            with suppress(PermissionError):
                os.utime(self._descriptor)  # the cache removes the least recently used files first
        # Not a mapping: pread waits for the disk without the interpreter's lock, a page fault would hold it; and a file
        # cut short under a mapping ends the process with SIGBUS.
        return os.pread(self._descriptor, size, offset)

    def is_removed(self) -> bool:
        """Whether the cache has removed the file, which keeps its room on the disk as long as it is open."""
        return self._cached and os.fstat(self._descriptor).st_nlink == 0


_REMEDY = "the shard changed since it was indexed: fetch it again, or remove manifest.json and run `mmdata index`"
