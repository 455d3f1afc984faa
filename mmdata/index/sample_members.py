"""All members of one sample of an indexed tar, found by the tar's headers: an index names only image and captions.

The members of a sample are consecutive, so the headers between the sample before and the sample after are enough. No
payload is read on the way, and every index will do, whichever version made it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from threading import Event
from typing import Protocol

import numpy as np

from mmdata.errors import BadSample, DamagedShard, Interrupted, Reason
from mmdata.index.index import Index
from mmdata.index.spans import span_of
from mmdata.index.store import ShardStore
from mmdata.tars.tar import Member, Seekable, read_members_from, split_name


class OwnSamples:
    """The samples of an index's own tars; its methods are those of `JoinedShards`.

    Args:
        index: of the tars.
        store: reads them.
    """

    def __init__(self, index: Index, store: ShardStore) -> None:
        self._index, self._store = index, store
        self._listed: dict[int, tuple[str, int]] = {}  # name and bytes of a shard

    def members(self, row: int, wanted: Collection[str], stop: Event) -> dict[str, Member]:
        """Members of a row's sample by extension: all of them, or some with the wanted ones; raises BadSample."""
        shard, local = self._locate(row)
        if shard not in self._listed:
            self._listed[shard] = (self._index.shard_name(shard), self._index.listed(shard).bytes)
        name, size = self._listed[shard]
        start, end = span_of(self._index.shard(shard), local)
        file = ShardFile(self._store, shard, size, stop)
        return find_members(file, start, self._key(shard, local), name=name, end=end, wanted=wanted)

    def read_member(self, row: int, member: Member, stop: Event) -> bytes:
        """The bytes of a member of a row's sample."""
        return self._store.read(self._locate(row)[0], member.offset, member.size, stop)

    def place(self, row: int) -> str:
        """Shard and sample of a row, for messages."""
        shard, local = self._locate(row)
        return f"shard '{self._index.shard_name(shard)}', sample '{self._key(shard, local)}'"

    def _key(self, shard: int, local: int) -> str:
        return self._index.shard(shard).keys[local].as_py()

    def _locate(self, row: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._index.starts, row, side="right")) - 1
        return shard, row - int(self._index.starts[shard])


class ReadsShards(Protocol):
    """Reads members of shards by offset."""

    def read(self, shard: int, offset: int, size: int, stop: Event | None = None) -> bytes:
        """See `ShardStore.read`."""
        ...


class ShardFile:
    """A shard of a store, read as a file.

    Args:
        store: reads it: a ShardStore, or the tars that are joined.
        shard: its number.
        size: in bytes.
        stop: once it is set, reads raise Interrupted.
    """

    def __init__(self, store: ReadsShards, shard: int, size: int, stop: Event) -> None:
        self._store, self._shard, self._size, self._stop = store, shard, size, stop
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; returns it."""
        self._position = offset if whence == os.SEEK_SET else self._size + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, fewer at the end."""
        size = max(0, min(size if size >= 0 else self._size, self._size - self._position))
        if self._stop.is_set():
            raise Interrupted(str(self._shard))
        data = self._store.read(self._shard, self._position, size, self._stop)
        self._position += size
        return data


def find_members(
    file: Seekable,
    start: int,
    key: str,
    *,
    name: str,
    end: int | None = None,
    exact: bool = False,
    wanted: Collection[str] = (),
    remedy: str = "see `mmdata verify`",
) -> dict[str, Member]:
    """The members of a sample by extension, as in `Group.members`.

    Args:
        file: the tar.
        start: offset of a header, of the sample or before it.
        key: of the sample.
        name: of the tar, for messages.
        end: no header of the sample lies behind it; None: unknown.
        exact: `start` is that of the sample, in a tar that was whole when it was indexed.
        wanted: extensions with which the search ends, once all are found; empty: never.
        remedy: what helps where the tar is another one, for the message.

    Raises:
        BadSample: there is no such sample: the tar is not the one that was indexed.
    """
    found: dict[str, Member] = {}
    damage = ""
    try:
        for member in read_members_from(file, start, name=name):
            if end is not None and member.start > end:
                break
            split = split_name(member.name)
            if split is not None and split[0] == key:
                found[split[1]] = member
                if wanted and all(extension in found for extension in wanted):
                    break
            elif exact or (found and split is not None):
                break
    except DamagedShard as error:
        # The last row of a damaged tar is whole (`mmdata index --skip-damaged`). Nothing before another row was.
        damage = f": {error.what}"
    if not found or (damage and (exact or end is not None)):
        raise BadSample(
            Reason.FILE_CHANGED,
            f"its members are not where they were indexed, from byte {start} on{damage}; {remedy}",
        )
    return found
