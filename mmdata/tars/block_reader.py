"""Reads a tar from front to back in large blocks, each once, and hashes them in passing."""

from __future__ import annotations

import os
from typing import BinaryIO, Protocol

BLOCK = 2**20
"""Bytes that are read at once. The last two blocks are held, and what lies before them is read again: an image that is
larger than a block, as the headers behind it are read first."""


class Digest(Protocol):
    """A hash in the making, as `hashlib.sha256()` is."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""
        ...


class BlockReader:
    """What a tar is read from; see `mmdata.tars.tar.Seekable`.

    Args:
        file: the caller closes it.
        digest: gets all bytes, once `drain` was called; None: what nobody asks for is not read.
    """

    def __init__(self, file: BinaryIO, digest: Digest | None = None) -> None:
        self._descriptor = file.fileno()
        self._digest = digest
        self._at = 0
        self._held = memoryview(bytearray(2 * BLOCK))
        self._begin = self._end = 0  # of what is held

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position; returns it."""
        self._at = os.fstat(self._descriptor).st_size if whence == os.SEEK_END else offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer at the end."""
        assert size >= 0
        begin, end = self._at, self._at + size
        if self._digest is None and begin > self._end + BLOCK:
            self._begin = self._end = begin
        while self._end < end and self._pull():
            pass
        if begin >= self._begin:
            data = bytes(self._held[begin - self._begin : min(end, self._end) - self._begin])
        else:
            data = os.pread(self._descriptor, size, begin)
        self._at = begin + len(data)
        return data

    def drain(self) -> None:
        """Read what is left, if there is a digest."""
        while self._digest is not None and self._pull():
            pass

    def _pull(self) -> bool:
        kept = min(self._end - self._begin, BLOCK)
        self._held[:kept] = self._held[self._end - self._begin - kept : self._end - self._begin]
        count = os.preadv(self._descriptor, [self._held[kept : kept + BLOCK]], self._end)
        if self._digest is not None:
            self._digest.update(self._held[kept : kept + count])
        self._begin, self._end = self._end - kept, self._end + count
        return count > 0
