"""Bytes of members, by offset, from mapped shards. A shard of another size than the manifest's is never read."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from threading import Lock

from mmdata.errors import DataError
from mmdata.shards.index import Index

MAX_OPEN = 64
"""Shards mapped at once; each holds a file descriptor."""


class ShardStore:
    """Reads members of an index's shards. Safe to share between threads.

    Args:
        index: whose shards; they must lie on a local disk.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = Lock()

    def read(self, shard: int, offset: int, size: int) -> memoryview:
        """Bytes [offset, offset + size) of a shard, without a copy; the view keeps the shard mapped.

        Raises:
            DataError: the shard is missing, its size is not the manifest's, or the range lies outside it.
        """
        with self._lock:
            view = self._open.get(shard)
            if view is None:
                view = self._open[shard] = self._map(shard)
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)  # unmapped once the last view of it is gone
            else:
                self._open.move_to_end(shard)
        if offset < 0 or size < 0 or offset + size > len(view):
            path = self._index.shard_path(shard)
            raise DataError(f"shard '{path}': bytes {offset} to {offset + size} of {len(view)} asked; {_REMEDY}")
        return view[offset : offset + size]

    def _map(self, shard: int) -> memoryview:
        path = self._index.shard_path(shard)
        expected = self._index.manifest.entry(shard).bytes
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != expected:
                    raise DataError(f"shard '{path}': {found} bytes, and its index was made of {expected}; {_REMEDY}")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise DataError(f"shard '{path}': no such file, and the manifest names it; {_REMEDY}") from None


_REMEDY = "the shard changed since it was indexed: fetch it again, or remove manifest.json and run `mmdata index`"
