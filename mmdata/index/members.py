"""The members of samples besides the image, read by offset and compared with their hashes."""

from __future__ import annotations

from threading import Event

import numpy as np

from mmdata.errors import BadSample, Reason
from mmdata.hashing import fast_hash
from mmdata.index.index import Index
from mmdata.index.store import ShardStore
from mmdata.tars.scan import IndexedMember


class SampleMembers:
    """Safe to share between threads.

    Args:
        index: of the tars.
        store: reads them.
    """

    def __init__(self, index: Index, store: ShardStore) -> None:
        self._index, self._store = index, store

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row's sample but its image, by extension."""
        shard, local = self._locate(row)
        return self._index.shard(shard).members(local)

    def read_member(self, row: int, member: IndexedMember, stop: Event) -> bytes:
        """The bytes of a member of a row's sample.

        Raises:
            BadSample: they are not those that were indexed.
            DataError, Interrupted: see `ShardStore.read`.
        """
        data = self._store.read(self._locate(row)[0], member.offset, member.size, stop)
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

    def _locate(self, row: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._index.starts, row, side="right")) - 1
        return shard, row - int(self._index.starts[shard])
