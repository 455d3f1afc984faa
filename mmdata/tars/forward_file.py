"""Reads a tar from a stream of bytes, from front to back: what a tar reader asks of a file, without its storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

_CHUNK = 2**20  # bytes
_LOOK_BEHIND = 1024  # bytes; `read_members` reads the two blocks that end a tar a second time
_NO_END = 2**63 - 1


class ForwardFile:
    """A file for `read_members` over a stream of bytes that cannot seek: it goes forward, and back by 1,024 bytes.

    Args:
        file: a blocking stream of bytes; the caller closes it.
        explain: makes the error of a failed read, from the offset and what the stream raised.
        size: bytes of the stream; None: unknown, and `seek(0, SEEK_END)` returns a number larger than any file.
    """

    def __init__(self, file: BinaryIO, explain: Callable[[int, Exception], Exception], size: int | None = None) -> None:
        self._file = file
        self._explain = explain
        self._size = _NO_END if size is None else size
        self._at = 0  # offset of the next read
        self._end = 0  # bytes read from `file`
        self._behind = b""  # the last bytes before `_end`

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read. SEEK_END moves nothing, and returns the size."""
        if whence == os.SEEK_END:
            return self._size
        assert whence == os.SEEK_SET
        assert offset >= self._end - len(self._behind)
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end of the stream.

        Raises:
            Exception: that of `explain`, if a read failed.
        """
        while self._at > self._end:  # read and forget the bytes up to the offset
            if not self._pull(min(_CHUNK, self._at - self._end)):
                return b""
        # Bytes before `_end` come from `_behind`: the stream itself cannot go back.
        again = self._behind[len(self._behind) - (self._end - self._at) :][:size]
        data = again + self._pull(size - len(again)) if len(again) < size else again
        self._at += len(data)
        return data

    def drain(self) -> None:
        """Read and forget what is left of the stream."""
        while self._pull(_CHUNK):
            pass

    def _pull(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except Exception as error:  # fsspec's protocols and codecs share no base class of errors
            raise self._explain(self._end, error) from error
        self._end += len(data)
        self._behind = data[-_LOOK_BEHIND:] if len(data) >= _LOOK_BEHIND else (self._behind + data)[-_LOOK_BEHIND:]
        return data
