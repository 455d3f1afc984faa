"""A file over HTTP that goes on, after a failed request, at the byte where it ended: as a loader's fetching does."""

from __future__ import annotations

import io
import logging
from threading import Event
from typing import Any

import fsspec

from mmdata.storage import fetch
from mmdata.storage.http import HttpFile, request_options

logger = logging.getLogger("mmdata")

PIECE_BYTES = 2**18
"""Bytes that may fail `fetch.ATTEMPTS` times."""


class ResumedHttpFile(io.RawIOBase):
    """A file of unknown size, read from front to back.

    Each PIECE_BYTES have the attempts and waits of `repeat_requests`: a server that ends each connection after some
    hundred KB is read to the end, and one that ends each after a few bytes is given up.

    Args:
        url: of the file.
        name: for messages.
        stop: ends the waiting between two requests.

    Attributes:
        size: bytes of the whole file; None if the server does not say.

    Raises:
        FileNotFoundError, WrongAnswer, Failed: see `HttpFile`; when all attempts have failed. Reading raises them too.
    """

    def __init__(self, url: str, name: str, stop: Event | None = None) -> None:
        super().__init__()
        self._file_system: Any = fsspec.filesystem("http", **request_options())
        self._url, self._name = url, name
        self._stop = stop or Event()
        self._at = 0  # offset of the next byte
        self._piece = 0  # offset of the piece that is read
        self._failures = 0  # in this piece
        self._file: HttpFile | None = None  # None after a failure
        self._first: HttpFile = fetch.repeat_requests(name, self._stop)(self._open)
        self.size = self._first.size

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with the bytes that have arrived, one or more; with none only at the end of the file."""
        if self._at - self._piece >= PIECE_BYTES:
            self._piece, self._failures = self._at, 0
        return fetch.repeat_requests(self._name, self._stop, failures=self._failures)(self._read_once, buffer)

    def close(self) -> None:
        """End the connection."""
        if not self.closed and getattr(self, "_file", None) is not None:
            self._drop()
        super().close()

    def _open(self) -> HttpFile:
        first = getattr(self, "_first", None)
        self._file = HttpFile(self._file_system, self._url, self._name, start=self._at, of=first)
        return self._file

    def _read_once(self, buffer: Any) -> int:
        if self._file is None and self._at == self._first.size:  # the connection broke behind the last byte
            return 0
        try:
            if self._file is None:
                logger.warning("shard '%s': reading goes on at byte %d with another request", self._name, self._at)
            count = (self._file or self._open()).readinto(buffer)
        except Exception:
            self._failures += 1
            self._drop()
            raise
        self._at += count
        return count

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
