"""The tars behind URLs that an index is made of. Each is read once as a stream, several concurrently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from typing import Any

from mmdata.shards.foreign import guess_by_samples
from mmdata.shards.images.probe import Limits
from mmdata.shards.members import USUAL, Members
from mmdata.shards.remote.cache import ShardCache
from mmdata.shards.remote.fetch import RemoteFolder
from mmdata.shards.remote.tar_stream import TarStream
from mmdata.shards.remote.urls import TarUrls
from mmdata.shards.scan import scan_samples
from mmdata.shards.staging import ReadTar

READERS = 4
"""Tars that are read concurrently. Each holds a sample or two in memory."""
MAX_GUESSED_TARS = 16
"""Tars that are looked at for a first sample."""


class UrlTars:
    """Tars behind URLs, with the methods of `LocalTars`.

    Args:
        urls: of the tars.
        cache: of the loader.

    Raises:
        ConfigError: see `RemoteFolder`.
    """

    are_remote = True

    def __init__(self, urls: TarUrls, cache: ShardCache) -> None:
        self.names = urls.names
        self.sizes: list[int | None] = [None] * len(self.names)
        self.threads = min(READERS, len(self.names))
        self._folder = RemoteFolder(urls.folder, cache)
        self._stop = Event()
        self._lock = Lock()
        self._open: dict[int, TarStream] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def location(self, folder: Path) -> str:
        """The URL of the tars' folder, with its query."""
        return self._folder.url

    def place(self, number: int) -> str:
        """The URL of a tar."""
        return self._folder.place(".", self.names[number])

    def identity(self, number: int) -> dict[str, Any]:
        """The URL: a tar that was read is not asked for again."""
        return {"url": self.place(number)}

    def guess_members(self) -> Members:
        """The members by the first samples; the streams of the tars that were looked at go on with `read`."""
        for number in range(min(len(self.names), MAX_GUESSED_TARS)):
            stream = self._stream(number)
            stream.keeps_all = True
            found = guess_by_samples(stream.samples, stream.payload)
            stream.keeps_all = False
            if found is not None:
                return found
        return USUAL

    def read(self, number: int, *, limits: Limits, members: Members, step: Callable[[int], None]) -> ReadTar:
        """Read a tar; the arguments are those of `scan_shard`."""
        stream = self._stream(number)
        try:
            name = self.names[number]
            scan = scan_samples(stream.samples, stream.payload, name=name, limits=limits, members=members, step=step)
            sha256, size = stream.finish()
            return ReadTar(scan, sha256, size)
        finally:
            with self._lock:
                self._open.pop(number, None)
            stream.close()

    def close(self) -> None:
        """End all reading, also that of other threads."""
        self._stop.set()
        with self._lock:
            for stream in self._open.values():
                stream.close()

    def _stream(self, number: int) -> TarStream:
        """The stream of a tar, which may have begun."""
        with self._lock:
            if (begun := self._open.get(number)) is not None:
                return begun
        stream = TarStream(self._folder, self.names[number], stop=self._stop)
        with self._lock:
            self._open[number] = stream
        return stream
