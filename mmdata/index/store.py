"""Reads members of shards, and parts of index files, by offset. A shard of another size than listed is never read."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, DataError, Interrupted, Reason
from mmdata.hashing import fast_hash, hash64
from mmdata.processes import new_lock
from mmdata.safe_read import open_regular
from mmdata.system import read_at, read_into
from mmdata.tars.captions import captions_of
from mmdata.tars.scan import IndexedMember

if TYPE_CHECKING:
    from mmdata.index.index import Index

MAX_OPEN = 64
"""Shards that stay open if nothing else is said; each holds a file descriptor."""


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

    def captions(self, rows: NDArray[np.int64]) -> list[list[str]]:
        """The captions of some rows, cleaned: a list for each row.

        Raises:
            DataError: they are not those that were indexed.
        """
        index, (shards, _) = self._index, self._index.locate(rows)
        places = [*index.take(rows, ["caption_offset", "caption_bytes", "caption_format"]).values()]
        offsets, hashes = index.take_lists(rows, "caption_hash")
        found: list[list[str]] = []
        for i, (shard, key) in enumerate(zip(shards.tolist(), index.keys(rows), strict=True)):
            offset, size, caption_format = (int(column[i]) for column in places)
            try:
                captions = captions_of(self.read(shard, offset, size), caption_format, index.caption_keys(shard))
            except BadSample:
                captions = []
            if [hash64(caption.encode()) for caption in captions] != hashes[offsets[i] : offsets[i + 1]].tolist():
                raise DataError(
                    f"shard '{index.shard_place(shard)}', sample '{key}': the captions are not those that were "
                    "indexed; `mmdata verify` says what changed: fetch the shard again, or index it anew"
                )
            found.append(captions)
        return found

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row's sample but its image, by extension."""
        shard, local = self._locate(row)
        return self._index.shard(shard).members(local)

    def read_member(self, row: int, member: IndexedMember, stop: Event) -> bytes:
        """The bytes of a member of a row's sample.

        Raises:
            BadSample: they are not those that were indexed.
            DataError, Interrupted: see `read`.
        """
        data = self.read(self._locate(row)[0], member.offset, member.size, stop)
        if fast_hash(data) != member.xxh3:
            raise BadSample(Reason.FILE_CHANGED, "its bytes are not those that were indexed; see `mmdata verify`")
        return data

    def key(self, row: int) -> str:
        """The key of a row's sample, with which the names of its members begin."""
        shard, local = self._locate(row)
        return self._index.shard(shard).keys[local].as_py()

    def place(self, row: int) -> str:
        """Shard and sample of a row, for messages."""
        return f"shard '{self._index.shard_name(self._locate(row)[0])}', sample '{self.key(row)}'"

    def is_here(self, shard: int) -> bool:
        """Whether a shard can be read without fetching it; a shard in the cache counts as used now."""
        part, local = self._index.part(shard)
        cache = part.tars_folder.cache
        return cache is None or cache.touch(part.listed(local).sha256)

    def fetch(self, shard: int, stop: Event) -> None:
        """Bring a shard into the cache. Returns immediately if it is in the cache, and when `stop` is set.

        Raises:
            DataError, ConfigError: it cannot be fetched.
        """
        part, _ = self._index.part(shard)
        if part.tars_folder.cache is not None:
            with suppress(Interrupted):
                self._open_shard(shard, stop)

    def _locate(self, row: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._index.starts, row, side="right")) - 1
        return shard, row - int(self._index.starts[shard])

    def _opened(self, shard: int, stop: Event | None) -> OpenShard:
        opened = self.open_shards.get(shard)
        return opened or self.open_shards.keep(shard, self._open_shard(shard, stop))

    def _open_shard(self, shard: int, stop: Event | None) -> OpenShard:
        expected = self._index.listed(shard).bytes
        try:
            opened = self._index.open_shard(shard, stop)
        except FileNotFoundError:
            place = self._index.shard_place(shard)
            raise DataError(
                f"shard '{place}': no such file, and the manifest names it; put it back, or index the others anew "
                "(`mmdata index FOLDER --overwrite`)"
            ) from None
        if opened.size != expected:
            place = self._index.shard_place(shard)
            raise DataError(f"shard '{place}': {opened.size} bytes, and its index was made of {expected}; {_REMEDY}")
        return opened


class OpenShard:
    """A descriptor that is closed with the last reference: one thread may read it while another drops it.

    Args:
        descriptor: of the shard.
        cached: whether it lies in a cache, which may remove it.

    Attributes:
        size: of the shard, in bytes.
    """

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
        return read_at(self._descriptor, size, offset)

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


def read_part(path: str | os.PathLike[str], what: str, offset: int, size: int) -> memoryview:
    """Bytes [offset, offset + size) of a regular file, read-only, fewer at its end.

    Args:
        path: of the file.
        what: kind of file, for messages.
        offset, size: of the part.

    Raises:
        FileNotFoundError: there is none.
        DataError: it is a folder, a FIFO or a device.
    """
    descriptor = open_regular(path, what)
    try:
        room = np.empty(min(size, max(os.fstat(descriptor).st_size - offset, 0)), np.uint8).data
        filled = 0
        while filled < len(room) and (count := read_into(descriptor, room[filled:], offset + filled)):
            filled += count
    finally:
        os.close(descriptor)
    return room[:filled].toreadonly()
